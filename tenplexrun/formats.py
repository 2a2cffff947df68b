"""Datasets by name: a format, a path and options, written as a URL.

    bytes:/dir?glob=**/*.py&sample_bytes=129&exclude=test/*   the files in sorted order, end to end, cut into records
    npy:/path.npy                                             the rows of an array

Shared by the view, which copies samples into shared memory, and by a training script that runs without a launcher.
Every format comes down to the same: fixed-size samples, laid end to end over pieces of files. A percent sign and `?`
in paths, `&`, `+` and `%` in options are percent-encoded, as in any URL.
"""

from __future__ import annotations

import bisect
import fnmatch
import glob as globbing
import itertools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.errors import DataError

_HASHED_BLOCKS = 256
_HASHED_BLOCK_BYTES = 1 << 20
_Options = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + num_bytes) of a file."""

    path: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Dataset:
    """`num_samples` samples of numpy type `dtype` and of `shape` each, laid end to end over `pieces`."""

    spec: str
    num_samples: int
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    _starts: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = itertools.accumulate((piece.num_bytes for piece in self.pieces), initial=0)
        object.__setattr__(self, "_starts", list(starts)[:-1])

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_samples * self.sample_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes of the samples laid end to end. Raises DataError when a file has gone or shrunk since it was listed."""
        parts = []
        number = bisect.bisect_right(self._starts, offset) - 1
        while num_bytes > 0:
            piece, skip = self.pieces[number], offset - self._starts[number]
            parts.append(self._read_piece(piece, skip, min(num_bytes, piece.num_bytes - skip)))
            offset, num_bytes, number = offset + len(parts[-1]), num_bytes - len(parts[-1]), number + 1
        return b"".join(parts)

    def gather(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The samples `ids` [n] as an array [n, *shape], read from the files one by one."""
        size = self.sample_bytes
        rows = b"".join(self.read(int(number) * size, size) for number in ids)
        return np.frombuffer(bytearray(rows), dtype=self.dtype).reshape(len(ids), *self.shape)

    def fingerprint(self) -> str:
        """Names the content: xxh3 over type, shape and bytes; beyond 256 MiB over 256 evenly spaced MiB of them."""
        digest = xxhash.xxh3_128(f"{self.num_samples} {self.dtype} {self.shape}".encode())
        blocks = -(-self.num_bytes // _HASHED_BLOCK_BYTES)
        for number in range(min(blocks, _HASHED_BLOCKS)):
            start = number * blocks // min(blocks, _HASHED_BLOCKS) * _HASHED_BLOCK_BYTES
            digest.update(self.read(start, min(_HASHED_BLOCK_BYTES, self.num_bytes - start)))
        return f"xxh3-{digest.hexdigest()}"

    def _read_piece(self, piece: Piece, skip: int, num_bytes: int) -> bytes:
        try:
            with open(piece.path, "rb", buffering=0) as file:
                file.seek(piece.offset + skip)
                data = file.read(num_bytes)
        except OSError as error:
            raise DataError(f"dataset {self.spec}: cannot read {piece.path}: {error.strerror}") from error
        if len(data) != num_bytes:
            raise DataError(f"dataset {self.spec}: {piece.path} has shrunk since the job began; restore it")
        return data


def open_dataset(spec: str) -> Dataset:
    """List a dataset's files and count its samples. Raises DataError with what is wrong with `spec` or the files."""
    name, path, options = _parse(spec)
    opener, known = _FORMATS[name]
    if unknown := sorted(set(options) - set(known)):
        raise DataError(f"dataset {spec}: unknown options {unknown}; {name}: takes {list(known)}")
    if not os.path.exists(path):
        raise DataError(f"dataset {spec}: {path} does not exist on this node")
    try:
        dataset = opener(spec, path, options)
    except OSError as error:
        raise DataError(f"dataset {spec}: cannot read {error.filename or path}: {error.strerror or error}") from error
    if dataset.num_samples < 1 or dataset.sample_bytes < 1:
        found = sum(piece.num_bytes for piece in dataset.pieces)
        raise DataError(
            f"dataset {spec}: {found} bytes found, not one sample of {dataset.sample_bytes}; check the path"
        )
    return dataset


def absolute(spec: str) -> str:
    """`spec` with its path made absolute, so that processes with other working directories understand it."""
    name, path, _ = _parse(spec)
    _, mark, query = spec.partition("?")
    return f"{name}:{quote(os.path.abspath(path))}{mark}{query}"


def _parse(spec: str) -> tuple[str, str, _Options]:
    name, colon, rest = spec.partition(":")
    path, _, query = rest.partition("?")
    if not colon or name not in _FORMATS or not path:
        raise DataError(f"dataset {spec!r} should be FORMAT:PATH?OPTIONS with FORMAT one of {', '.join(_FORMATS)}")
    try:
        options = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise DataError(f"dataset {spec}: options should be name=value, joined by '&' ({error})") from error
    return name, unquote(path), options


def _open_bytes(spec: str, path: str, options: _Options) -> Dataset:
    text = options.get("sample_bytes", [""])[-1]
    if not text.isdecimal() or int(text) < 1:
        raise DataError(f"dataset {spec}: give the size of a sample, for example sample_bytes=129")
    paths = [path] if os.path.isfile(path) else _list(path, options)
    pieces = tuple(Piece(name, 0, os.stat(name).st_size) for name in paths)
    total = sum(piece.num_bytes for piece in pieces)
    return Dataset(spec, total // int(text), "|u1", (int(text),), tuple(piece for piece in pieces if piece.num_bytes))


def _list(root: str, options: _Options) -> list[str]:
    """Regular files below `root`, sorted by the bytes of their relative names: the same order on every node."""
    pattern = options.get("glob", ["**/*"])[-1]
    names = (os.fsencode(name) for name in globbing.glob(pattern, root_dir=root, recursive=True))
    kept = (os.fsdecode(name) for name in sorted(set(names)))
    excluded = options.get("exclude", [])
    paths = (os.path.join(root, name) for name in kept if not any(fnmatch.fnmatchcase(name, e) for e in excluded))
    return [path for path in paths if os.path.isfile(path)]


def _open_npy(spec: str, path: str, options: _Options) -> Dataset:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"dataset {spec}: not a plain .npy array: {error}") from error
    if not isinstance(array, np.memmap) or array.ndim < 1 or array.dtype.names or not array.flags.c_contiguous:
        raise DataError(f"dataset {spec}: rows are those of one plain array in C order; save it with numpy.save")
    piece = Piece(path, array.offset, array.nbytes)
    return Dataset(spec, array.shape[0], array.dtype.str, array.shape[1:], (piece,))


_FORMATS: Mapping[str, tuple[Callable[[str, str, _Options], Dataset], tuple[str, ...]]] = {
    "bytes": (_open_bytes, ("glob", "exclude", "sample_bytes")),
    "npy": (_open_npy, ()),
}
