"""What all formats share: a dataset's name, its options, and its files, which are local or behind URLs."""

from __future__ import annotations

import contextlib
import fnmatch
import glob as globbing
import io
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from tenplexrun.datasets import remote
from tenplexrun.datasets.dataset import Piece
from tenplexrun.datasets.index import SampleIndex
from tenplexrun.errors import DataError

Options = Mapping[str, list[str]]

SCAN_BYTES = 32 << 20
"""Of a remote file that is scanned, so many are fetched together."""


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset as it is named: `spec` as a whole, the path or URL and the options in it, and its stored index if the
    option `index` names one."""

    spec: str
    path: str
    options: Options
    index: SampleIndex | None = None

    def option(self, name: str, default: str) -> str:
        return self.options.get(name, [default])[-1]

    def positive(self, name: str, example: int) -> int:
        """The option `name`, a whole number of at least 1. Raises DataError without one."""
        text = self.option(name, "")
        if not text.isdecimal() or int(text) < 1:
            raise DataError(f"dataset {self.spec}: give {name}, for example {name}={example}")
        return int(text)

    def files(self, pattern: str = "**/*") -> list[Piece]:
        """`path` itself if it is a file, else the files below it that match the options glob and exclude, sorted by the
        bytes of their relative names: the same order on every node."""
        pattern, excluded = self.option("glob", pattern), self.options.get("exclude", [])
        found = _remote(self.path, pattern) if remote.is_url(self.path) else _local(self.path, pattern)
        kept = {name: piece for name, piece in found.items() if not any(fnmatch.fnmatchcase(name, e) for e in excluded)}
        return [kept[name] for name in sorted(kept, key=os.fsencode)] if "" not in found else [found[""]]

    def relative(self, piece: Piece) -> str:
        """A file's name below `path`; "" for `path` itself."""
        return piece.path[len(self.path) :].lstrip("/")


def _local(root: str, pattern: str) -> dict[str, Piece]:
    if not os.path.isdir(root):
        return {"": whole(root)}
    if "**" in pattern.split("/"):
        fits = _fits(pattern)
        names = [name for name in _below(root) if fits(name)]
    else:
        names = globbing.glob(pattern, root_dir=root)
    paths = {name: os.path.join(root, name) for name in names}
    return {name: whole(path) for name, path in paths.items() if os.path.isfile(path)}


def _below(root: str, folder: str = "", way: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of what is below a folder and no folder. Links are followed, but not back to where the way has been:
    two such links have glob never end."""
    here = os.path.realpath(os.path.join(root, folder))
    if here in way:
        return
    with contextlib.suppress(PermissionError), os.scandir(here) as entries:
        for entry in entries:
            if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                yield from _below(root, f"{folder}{entry.name}/", (*way, here))
            else:
                yield f"{folder}{entry.name}"


def _remote(root: str, pattern: str) -> dict[str, Piece]:
    if remote.is_file(root):
        return {"": whole(root)}
    fits = _fits(pattern)
    found = {name: size for name, size in remote.files_below(root).items() if fits(name)}
    urls = {name: f"{root.rstrip('/')}/{name}" for name in found}
    unknown = [name for name, size in found.items() if size is None]
    sizes = {**found, **dict(zip(unknown, remote.sizes([urls[name] for name in unknown]), strict=True))}
    return {name: Piece(urls[name], 0, cast(int, size)) for name, size in sizes.items()}


def _fits(pattern: str) -> Callable[[str], bool]:
    """Whether a name is one that `glob` would find: it leaves hidden files out, if the pattern does not begin a name
    with a dot, too."""
    from fsspec.utils import glob_translate

    match, dotted = re.compile(glob_translate(pattern)).match, pattern.startswith(".") or "/." in pattern
    return lambda name: match(name) is not None and (dotted or not (name.startswith(".") or "/." in name))


def size_of(path: str) -> int:
    return remote.sizes([path])[0] if remote.is_url(path) else os.stat(path).st_size


def whole(path: str) -> Piece:
    if remote.is_url(path):
        return Piece(path, 0, size_of(path))
    found = os.stat(path)
    return Piece(path, 0, found.st_size, found.st_mtime_ns)


def read_file(path: str) -> bytes:
    return remote.read_file(path) if remote.is_url(path) else Path(path).read_bytes()


def open_file(path: str, ahead: int = 1 << 20) -> IO[bytes]:
    """To read and seek; of a remote file `ahead` bytes are fetched together."""
    if not remote.is_url(path):
        return open(path, "rb")
    return io.BufferedReader(remote.File(path, ahead))


def open_scan(piece: Piece) -> mmap.mmap | remote.File:
    """A whole file, not an empty one, to be sliced from its begin to its end in small steps."""
    if remote.is_url(piece.path):
        return remote.File(piece.path, SCAN_BYTES)
    with open(piece.path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def blocks(piece: Piece) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The bytes of a whole file, some MiB at a time, each block with the offset of its first byte."""
    local = None
    if not remote.is_url(piece.path) and piece.num_bytes:
        local = np.memmap(piece.path, dtype=np.uint8, mode="r")
    for begin in range(0, piece.num_bytes, SCAN_BYTES):
        end = min(begin + SCAN_BYTES, piece.num_bytes)
        data = remote.fetch([(piece.path, begin, end)])[0] if local is None else local[begin:end]
        yield begin, np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
