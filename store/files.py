"""Files of an arena: every page reserved before use, mapped once, JSON replaced atomically.

Reserved means `posix_fallocate`: when shared memory is too small that is an ArenaFullError here, and never a
SIGBUS later in a worker that writes through its map. What only the store writes, by `pwrite`, is just promised: its
pages come with their bytes, which spares their reservation and mapping beforehand.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from tenplexrun.core.records import Record
from tenplexrun.errors import ArenaFullError, StoreError

MADV_POPULATE_READ = 22
TENSORS = ".bin"
"""Suffix of files that hold tensors; they count against the limit."""


class MappedFile:
    """A whole file, open until the last reference to it goes, dropped or not. `read_only`: of which little is read."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._path, self._read_only = path, read_only
        self.fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        self._writing = threading.Lock()
        self._view = memoryview(b"")

    @property
    def view(self) -> memoryview:
        """All of it, mapped shared and, unless `read_only`, writable on first use, and again when it has grown. Raises
        StoreError."""
        if len(self._view) < os.fstat(self.fd).st_size:
            try:
                if self._read_only:
                    self._view = memoryview(mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ))
                    return self._view
                memory = mmap.mmap(self.fd, 0)
            except (OSError, ValueError) as error:
                raise StoreError(f"cannot map {self._path}: {error}") from error
            with contextlib.suppress(OSError):  # Linux before 5.14: pages are then mapped one by one, on first touch
                memory.madvise(MADV_POPULATE_READ)  # _WRITE would map them one by one, too
            self._view = memoryview(memory)
        return self._view

    def mapped(self, offset: int, num_bytes: int) -> memoryview | None:
        """These bytes, if they are mapped by now, as those of a recycled file; None where `write` is the faster way."""
        stop = offset + num_bytes
        return self._view[offset:stop] if stop <= len(self._view) else None

    def write(self, data: memoryview, offset: int) -> None:
        """Put `data` at `offset`. Raises ArenaFullError, StoreError."""
        try:
            with self._writing:  # the system lets in one at a time, and has the others spin
                while data:
                    count = os.pwrite(self.fd, data, offset)
                    data, offset = data[count:], offset + count
        except OSError as error:
            raise _failure(self._path, len(data), error) from error


class Files:
    """The files of one folder. `limit_bytes` bounds what its tensor files may reserve together.

    Safe to use from several threads; the caller sees to it that one name is not reserved and dropped at once.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._open: dict[str, MappedFile] = {}
        self._lock = threading.Lock()

    def names(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(f"*{suffix}"))

    def size(self, name: str) -> int:
        """Bytes of a file; 0 where there is none."""
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return 0

    def promise(self, name: str, num_bytes: int, recycle: str | None = None) -> None:
        """Have `name` be a file of at least `num_bytes` (1 or more), made of the file `recycle` if that is given, whose
        pages come as it is written; they count as taken from now on.

        Raises ArenaFullError with the bytes needed and free; then a file that was not there before is not there now.
        """
        self._make(name, num_bytes, recycle, lambda fd, size: os.ftruncate(fd, max(size, os.fstat(fd).st_size)))

    def reserve(self, name: str, num_bytes: int, recycle: str | None = None) -> None:
        """The same, and all its pages exist."""
        self._make(name, num_bytes, recycle, lambda fd, size: os.posix_fallocate(fd, 0, size))

    def _make(self, name: str, num_bytes: int, recycle: str | None, extend: Callable[[int, int], None]) -> None:
        path, num_bytes = self.folder / name, max(1, num_bytes)
        was_there = path.exists()
        if recycle is not None:
            self._rename(recycle, name)
        try:
            self._check_room(name, num_bytes)
            with path.open("ab") as file:
                extend(file.fileno(), num_bytes)
        except (OSError, ArenaFullError) as error:
            if not was_there:
                self.drop([name])
            raise _failure(path, num_bytes, error) if isinstance(error, OSError) else error from error

    def require(self, num_bytes: int) -> None:
        """Raises ArenaFullError unless so many bytes more can be had."""
        free = self._free_bytes()
        if self._limit_bytes is not None:
            free = min(free, self._limit_bytes - sum(map(self.size, self.names(TENSORS))))
        if num_bytes > free:
            raise _full(self.folder, "a round with its two slots", num_bytes, max(0, free))

    def open(self, name: str) -> MappedFile:
        """A tensor file, opened once. Raises StoreError."""
        with self._lock:
            if name not in self._open:
                try:
                    self._open[name] = MappedFile(self.folder / name)
                except OSError as error:
                    raise StoreError(f"cannot open {self.folder / name}: {error}") from error
            return self._open[name]

    def drop(self, names: Iterable[str]) -> None:
        """Unlink files (missing ones are fine). Their pages go when nobody has them open."""
        for name in names:
            self._forget(name)
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()

    def write_json(self, name: str, record: Record) -> None:
        """Replace a JSON file as a whole: a reader sees the old content or the new."""
        fresh, text = self.folder / f"{name}.new", json.dumps(record, separators=(",", ":"))
        try:
            fresh.write_text(text)
            fresh.replace(self.folder / name)
        except OSError as error:
            self.drop([fresh.name])
            raise _failure(self.folder / name, len(text), error) from error

    def read_json(self, name: str) -> object:
        """Raises StoreError when it is missing or no JSON."""
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {self.folder / name}: {error}") from error

    def _forget(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)

    def _rename(self, old: str, new: str) -> None:
        """A file that is mapped stays so."""
        with self._lock:
            (self.folder / old).rename(self.folder / new)
            if old in self._open:
                self._open[new] = self._open.pop(old)

    def _free_bytes(self) -> int:
        """What the file system has, without what is promised."""
        promised = 0
        for name in self.names(TENSORS):
            with contextlib.suppress(FileNotFoundError):
                stats = (self.folder / name).stat()
                promised += max(0, stats.st_size - 512 * stats.st_blocks)
        return _free_bytes(self.folder) - promised

    def _check_room(self, name: str, num_bytes: int) -> None:
        free = self._free_bytes()
        if self._limit_bytes is not None:
            used = sum(self.size(other) for other in self.names(TENSORS) if other != name)
            free = min(free + self.size(name), self._limit_bytes - used) - self.size(name)
        if num_bytes - self.size(name) > free:
            raise _full(self.folder, name, num_bytes - self.size(name), max(0, free))


def _free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _failure(path: Path, num_bytes: int, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return _full(path.parent, path.name, num_bytes, _free_bytes(path.parent))
    return StoreError(f"cannot write {path}: {error}; look after that folder and start again")


def _full(folder: Path, name: str, needed: int, free: int) -> ArenaFullError:
    return ArenaFullError(
        f"shared memory is too small: {name} needs {needed} bytes more, {free} are free in {folder}; "
        "enlarge it (mount -o remount,size=... /dev/shm; containers: --shm-size) or put fewer workers on a node"
    )
