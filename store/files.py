"""Files of an arena: every page reserved before use, mapped once, JSON replaced atomically.

Reserved means `posix_fallocate`: when shared memory is too small that is an ArenaFullError here, and never a
SIGBUS later in a worker that writes through its map.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

from tenplexrun.core.records import Record
from tenplexrun.errors import ArenaFullError, StoreError

MADV_POPULATE_WRITE = 23
TENSORS = ".bin"
"""Suffix of files that hold tensors; they count against the limit."""


class MappedFile:
    """A whole file, mapped shared and writable, until the last reference to it goes, dropped or not."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        memory = mmap.mmap(self.fd, 0)
        with contextlib.suppress(OSError):  # Linux before 5.14: pages are then mapped one by one, on first touch
            memory.madvise(MADV_POPULATE_WRITE)
        self.view = memoryview(memory)


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

    def reserve(self, name: str, num_bytes: int, recycle: str | None = None) -> Path:
        """Make a file of `num_bytes` (at least 1) whose pages all exist, those of the file `recycle` among them.

        Raises ArenaFullError with the bytes needed and free; then neither file exists any more.
        """
        path, num_bytes = self.folder / name, max(1, num_bytes)
        if recycle is not None:
            self._forget(recycle)
            (self.folder / recycle).rename(path)
        try:
            self._check_room(name, num_bytes)
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            self.drop([name])
            raise self._failure(name, num_bytes, error) from error
        except ArenaFullError:
            self.drop([name])
            raise
        return path

    def require(self, num_bytes: int) -> None:
        """Raises ArenaFullError unless so many bytes more can be had."""
        free = self._free_bytes()
        if self._limit_bytes is not None:
            free = min(free, self._limit_bytes - sum(map(self.size, self.names(TENSORS))))
        if num_bytes > free:
            raise self._full("a round with its two slots", num_bytes, max(0, free))

    def open(self, name: str) -> MappedFile:
        """A tensor file, opened once. Raises StoreError."""
        with self._lock:
            if name not in self._open:
                try:
                    self._open[name] = MappedFile(self.folder / name)
                except (OSError, ValueError) as error:
                    raise StoreError(f"cannot map {self.folder / name}: {error}") from error
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
            raise self._failure(name, len(text), error) from error

    def read_json(self, name: str) -> object:
        """Raises StoreError when it is missing or no JSON."""
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {self.folder / name}: {error}") from error

    def _forget(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)

    def _free_bytes(self) -> int:
        stats = os.statvfs(self.folder)
        return stats.f_bavail * stats.f_frsize

    def _check_room(self, name: str, num_bytes: int) -> None:
        free = self._free_bytes()
        if self._limit_bytes is not None:
            used = sum(self.size(other) for other in self.names(TENSORS) if other != name)
            free = min(free + self.size(name), self._limit_bytes - used) - self.size(name)
        if num_bytes - self.size(name) > free:
            raise self._full(name, num_bytes - self.size(name), max(0, free))

    def _failure(self, name: str, num_bytes: int, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            return self._full(name, num_bytes, self._free_bytes())
        return StoreError(f"cannot write {self.folder / name}: {error}; look after that folder and start again")

    def _full(self, name: str, needed: int, free: int) -> ArenaFullError:
        return ArenaFullError(
            f"shared memory is too small: {name} needs {needed} bytes more, {free} are free in {self.folder}; "
            "enlarge it (mount -o remount,size=... /dev/shm; containers: --shm-size) or put fewer workers on a node"
        )
