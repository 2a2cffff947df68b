"""Formats whose samples differ in size: lines, images, archives, records, and Tenplex's own index."""

from __future__ import annotations

import io
import itertools
import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.datasets.arrays import decode_npz
from tenplexrun.datasets.dataset import Dataset, Decode, Piece, Pieces, Spans
from tenplexrun.datasets.files import SCAN_BYTES, Source, blocks, open_file, open_scan, read_file, whole
from tenplexrun.datasets.remote import is_url
from tenplexrun.errors import DataError

Ranges = npt.NDArray[np.int64]
"""[n, 2]: begin and end of each sample in its file."""
Scan = Callable[[str, Piece], Ranges]
"""The dataset's name, for messages, and a whole file → where its samples are. Raises DataError."""

_LENGTH = struct.Struct("<Q")
_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def open_jsonl(source: Source) -> Dataset:
    """A sample is what one line says, as `json.loads` reads it. Empty lines are none."""
    return _dataset(source, source.files("**/*.jsonl"), _lines, _json)


def open_images(source: Source) -> Dataset:
    """A sample is (pixels uint8 [height, width, channels], label): a file below a folder that is named like its class;
    labels number the classes in sorted order. `mode` is Pillow's, RGB if not given; L leaves the channels out."""
    files = [piece for piece in source.files() if piece.path.lower().endswith(_IMAGES)]
    for piece in files:
        if not piece.num_bytes:
            raise DataError(f"{piece.path} is empty, which no image is: restore it, or leave it out with exclude=NAME")
    of_file = [source.relative(piece).rpartition("/")[0].partition("/")[0] for piece in files]
    classes, labels = np.unique(np.array(of_file, dtype=object), return_inverse=True)
    mode = source.option("mode", "RGB")
    note = f"{mode} {classes.tolist()} {np.bincount(labels).tolist()}"
    return _dataset(source, files, _all_of_it, _Image(mode, labels), note)


def open_tar(source: Source) -> Dataset:
    """WebDataset: the consecutive members of a tar file whose names are the same up to the first dot are one sample,
    {"__key__": that name, "extension": bytes, ...}."""
    return _dataset(source, source.files("**/*.tar"), _groups, _members)


def open_tfrecord(source: Source) -> Dataset:
    """A sample is the bytes of one record: for most, a serialised tf.train.Example."""
    return _dataset(source, source.files("**/*.tfrecord*"), _frames, _bytes)


def open_tenplex(source: Source) -> Dataset:
    """Tenplex's index: the number of files; then of each its path and number of samples, and of each sample its first
    byte and the one after its last. A sample is an .npz file, so the dictionary of its arrays. As read and written by
    `mlfs/vfs/vfile/index.go` of the system published with the paper. Relative paths start at the index's folder; URLs
    are taken as they are."""
    found: list[tuple[str, Ranges]] = []
    folder = source.path.rpartition("/")[0]
    try:
        words = iter(read_file(source.path).decode().split())
        for _ in range(int(next(words))):
            name, count = next(words), int(next(words))
            numbers = np.fromiter((int(next(words)) for _ in range(2 * count)), dtype=np.int64, count=2 * count)
            found.append((name if is_url(name) else os.path.join(folder, name), numbers.reshape(count, 2)))
        if next(words, None) is not None:
            raise ValueError("more lines than it announces")
    except (ValueError, StopIteration, RuntimeError) as error:
        raise DataError(
            f"dataset {source.spec}: not an index of Tenplex's, or cut off ({error}); build it again"
        ) from error
    files = [whole(name) for name, _ in found]
    for piece, (_, ranges) in zip(files, found, strict=True):
        begins, ends = ranges.T
        if len(ranges) and ((begins >= ends).any() or begins.min() < 0 or ends.max() > piece.num_bytes):
            raise DataError(f"dataset {source.spec}: the index has samples outside {piece.path}; build it again")
    ranges_of = iter([ranges for _, ranges in found])
    return _dataset(source, files, lambda *_: next(ranges_of), decode_npz)


def _dataset(source: Source, files: Sequence[Piece], scan: Scan, decode: Decode, note: str = "") -> Dataset:
    pieces = Pieces(files)
    if source.index is not None:
        spans = Spans(source.index.starts, source.index.starts + source.index.sizes, decode)
    else:
        firsts = itertools.accumulate((piece.num_bytes for piece in files), initial=0)
        found = [scan(source.spec, piece).reshape(-1, 2) + first for piece, first in zip(files, firsts, strict=False)]
        starts, ends = np.concatenate(found).T.astype(np.int64) if found else np.empty((2, 0), dtype=np.int64)
        spans = Spans(np.ascontiguousarray(starts), np.ascontiguousarray(ends), decode)
    return Dataset(source.spec, len(spans.starts), "", (), pieces, spans=spans, note=note)


def _ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)


def _all_of_it(_: str, piece: Piece) -> Ranges:
    return _ranges([(0, piece.num_bytes)])


def _lines(_: str, piece: Piece) -> Ranges:
    """Without their ends, which are \\n or \\r\\n."""
    begins, ends = [np.zeros(1, dtype=np.int64)], []
    last = 0  # the byte before the block
    for first, data in blocks(piece):
        breaks = np.flatnonzero(data == ord("\n"))
        before = data[breaks - 1]
        before[breaks == 0] = last
        begins.append(first + breaks + 1)
        ends.append(first + breaks - (before == ord("\r")))
        last = int(data[-1])
    ends.append(np.array([piece.num_bytes - (last == ord("\r"))]))
    lines = np.stack([np.concatenate(begins), np.concatenate(ends)], axis=1)
    return lines[lines[:, 1] > lines[:, 0]]


def _json(raw: bytes, _: int) -> Any:
    return json.loads(raw)


def _bytes(raw: bytes, _: int) -> bytes:
    return raw


@dataclass(frozen=True, slots=True)
class _Image:
    mode: str
    labels: npt.NDArray[np.int64]

    def __call__(self, raw: bytes, number: int) -> tuple[npt.NDArray[np.uint8], int]:
        try:
            from PIL import Image
        except ImportError as error:
            raise DataError("images need Pillow: pip install 'tenplexrun[images]'") from error
        with Image.open(io.BytesIO(raw)) as image:
            return np.array(image.convert(self.mode)), int(self.labels[number])


def _groups(spec: str, piece: Piece) -> Ranges:
    found: list[tuple[int, int]] = []
    last = None
    try:
        with open_file(piece.path, SCAN_BYTES) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                key, end = _key(member.name), member.offset_data + -(-member.size // 512) * 512
                begin = found.pop()[0] if key == last else member.offset
                found.append((begin, end))
                last = key
    except tarfile.TarError as error:
        raise DataError(
            f"dataset {spec}: {piece.path} is no plain tar file ({error}); unpack .gz, copy it again"
        ) from error
    return _ranges(found)


def _key(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _members(raw: bytes, _: int) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                sample["__key__"] = _key(member.name)
                sample[member.name[len(sample["__key__"]) + 1 :].lower()] = file.read()
    return sample


def _frames(spec: str, piece: Piece) -> Ranges:
    """A record is its length (u64), a checksum of that (u32), the bytes, a checksum of them (u32)."""
    found: list[tuple[int, int]] = []
    if not piece.num_bytes:
        return _ranges(found)
    with open_scan(piece) as data:
        offset, size = 0, piece.num_bytes
        while offset < size:
            end = offset + 12 + _LENGTH.unpack(data[offset : offset + 8])[0] if offset + 12 <= size else size + 1
            if end + 4 > size:
                raise DataError(
                    f"dataset {spec}: {piece.path} is no TFRecord file, or cut off at byte {offset}; copy it again"
                )
            found.append((offset + 12, end))
            offset = end + 4
    return _ranges(found)
