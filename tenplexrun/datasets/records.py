"""Formats whose samples differ in size: lines, images, archives, records, and Tenplex's own index."""

from __future__ import annotations

import io
import json
import mmap
import os
import struct
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.datasets.arrays import decode_npz
from tenplexrun.datasets.dataset import Dataset, Decode, Pieces, Spans
from tenplexrun.datasets.files import Options, list_files, option, whole
from tenplexrun.errors import DataError

Ranges = npt.NDArray[np.int64]
"""[n, 2]: begin and end of each sample in its file."""

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def open_jsonl(spec: str, path: str, options: Options) -> Dataset:
    """A sample is what one line says, as `json.loads` reads it. Empty lines are none."""
    return _dataset(spec, [(name, _lines(name)) for name in list_files(path, options, "**/*.jsonl")], _json)


def open_images(spec: str, path: str, options: Options) -> Dataset:
    """A sample is (pixels uint8 [height, width, channels], label): a file below a folder that is named like its class;
    labels number the classes in sorted order. `mode` is Pillow's, RGB if not given; L leaves the channels out."""
    names = [name for name in list_files(path, options) if name.lower().endswith(_IMAGES)]
    of_file = [os.path.relpath(name, path).rpartition("/")[0].partition("/")[0] for name in names]
    classes, labels = np.unique(np.array(of_file, dtype=object), return_inverse=True)
    mode = option(options, "mode", "RGB")
    files = [(name, np.array([[0, os.stat(name).st_size]])) for name in names]
    return _dataset(spec, files, _Image(mode, labels), f"{mode} {classes.tolist()} {np.bincount(labels).tolist()}")


def open_tar(spec: str, path: str, options: Options) -> Dataset:
    """WebDataset: the consecutive members of a tar file whose names are the same up to the first dot are one sample,
    {"__key__": that name, "extension": bytes, ...}."""
    return _dataset(spec, [(name, _groups(spec, name)) for name in list_files(path, options, "**/*.tar")], _members)


def open_tfrecord(spec: str, path: str, options: Options) -> Dataset:
    """A sample is the bytes of one record: for most, a serialised tf.train.Example."""
    files = [(name, _frames(spec, name)) for name in list_files(path, options, "**/*.tfrecord*")]
    return _dataset(spec, files, _bytes)


def open_tenplex(spec: str, path: str, options: Options) -> Dataset:
    """Tenplex's index: the number of files; then of each its path and number of samples, and of each sample its first
    byte and the one after its last. A sample is an .npz file, so the dictionary of its arrays. As read and written by
    `mlfs/vfs/vfile/index.go` of the system published with the paper. Relative paths start at the index's folder."""
    files = []
    try:
        words = iter(Path(path).read_text(encoding="utf-8").split())
        for _ in range(int(next(words))):
            name, count = os.path.join(os.path.dirname(path), next(words)), int(next(words))
            numbers = np.fromiter((int(next(words)) for _ in range(2 * count)), dtype=np.int64, count=2 * count)
            files.append((name, numbers.reshape(count, 2)))
        if next(words, None) is not None:
            raise ValueError("more lines than it announces")
    except (ValueError, StopIteration, RuntimeError) as error:
        raise DataError(f"dataset {spec}: not an index of Tenplex's, or cut off ({error}); build it again") from error
    for name, ranges in files:
        if "://" in name:
            raise DataError(f"dataset {spec}: {name} is not on this node; download it, and put its path into the index")
        begins, ends = ranges.T
        if len(ranges) and ((begins >= ends).any() or begins.min() < 0 or ends.max() > os.stat(name).st_size):
            raise DataError(f"dataset {spec}: the index has samples outside {name}; build it again")
    return _dataset(spec, files, decode_npz)


def _dataset(spec: str, files: Sequence[tuple[str, Ranges]], decode: Decode, note: str = "") -> Dataset:
    pieces = [whole(name) for name, _ in files]
    first = np.cumsum([0, *(piece.num_bytes for piece in pieces)])
    found = [ranges.reshape(-1, 2) + start for (_, ranges), start in zip(files, first, strict=False)]
    starts, ends = np.concatenate(found).T.astype(np.int64) if found else np.empty((2, 0), dtype=np.int64)
    spans = Spans(np.ascontiguousarray(starts), np.ascontiguousarray(ends), decode)
    return Dataset(spec, len(starts), "", (), Pieces(pieces), spans=spans, note=note)


def _ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)


def _lines(path: str) -> Ranges:
    size = os.stat(path).st_size
    if not size:
        return _ranges([])
    data = np.memmap(path, dtype=np.uint8, mode="r")
    step = 1 << 24
    breaks = np.concatenate([np.flatnonzero(data[i : i + step] == ord("\n")) + i for i in range(0, size, step)])
    begins = np.concatenate([[0], breaks + 1])
    ends = np.concatenate([breaks, [size]])
    ends -= (ends > begins) & (data[np.maximum(ends - 1, 0)] == ord("\r"))
    return np.stack([begins, ends], axis=1)[ends > begins]


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


def _groups(spec: str, path: str) -> Ranges:
    found: list[tuple[int, int]] = []
    last = None
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                key, end = _key(member.name), member.offset_data + -(-member.size // 512) * 512
                begin = found.pop()[0] if key == last else member.offset
                found.append((begin, end))
                last = key
    except tarfile.TarError as error:
        raise DataError(f"dataset {spec}: {path} is no plain tar file ({error}); unpack .gz, copy it again") from error
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


def _frames(spec: str, path: str) -> Ranges:
    """A record is its length (u64), a checksum of that (u32), the bytes, a checksum of them (u32)."""
    found = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        offset = 0
        while offset < size:
            end = offset + 12 + struct.unpack_from("<Q", data, offset)[0] if offset + 12 <= size else size + 1
            if end + 4 > size:
                raise DataError(
                    f"dataset {spec}: {path} is no TFRecord file, or cut off at byte {offset}; copy it again"
                )
            found.append((offset + 12, end))
            offset = end + 4
    return _ranges(found)
