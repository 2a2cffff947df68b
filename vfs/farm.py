"""The view without FUSE: real files and links, in the same places, with the same content.

A directory is written beside its place and renamed; `current` flips by rename too. Only a bounded window is written,
`WINDOW_BYTES` a rank by default: so much of each round a script sees that reads packs. The Python loader needs nothing
but the links to the extents, and is not bound by it.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from tenplexrun.errors import ArenaFullError, DataError
from tenplexrun.vfs.mounts import clear
from tenplexrun.vfs.nodes import Directory, File, Link, Node

WINDOW_BYTES = 256 << 20
_BLOCK_BYTES = 4 << 20


class Farm:
    """Writes trees below `path`; the same methods as `vfs.mount.Mount`, without a kernel to serve."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        """Begin with an empty directory. Raises DataError when something mounted there cannot be removed."""
        clear(self._path)
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True, exist_ok=True)

    def show(self, group: str, name: str, directory: Directory, current: bool) -> None:
        """Write `directory` as `group`/`name`; if `current`, let the link `group`/current point to it.
        Raises ArenaFullError when shared memory is full."""
        shelf = self._path / group
        partial = shelf / f".{name}"
        try:
            shelf.mkdir(exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            _write(directory, partial)
            shutil.rmtree(shelf / name, ignore_errors=True)
            partial.rename(shelf / name)
            if current:
                (shelf / ".current").unlink(missing_ok=True)
                (shelf / ".current").symlink_to(name)
                (shelf / ".current").rename(shelf / "current")
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _failure(error, shelf / name) from error

    def drop(self, group: str, name: str) -> None:
        """Remove `group`/`name`; files of it that are open stay readable."""
        shutil.rmtree(self._path / group / name, ignore_errors=True)
        current = self._path / group / "current"
        if current.is_symlink() and os.readlink(current) == name:
            current.unlink()


def _write(node: Node, path: Path) -> None:
    if isinstance(node, Link):
        path.symlink_to(node.target)
    elif isinstance(node, Directory):
        path.mkdir()
        for name, child in node.entries.items():
            _write(child, path / name)
    elif isinstance(node, File):
        _write_file(node, path)


def _write_file(node: File, path: Path) -> None:
    with open(path, "xb") as file:
        for offset in range(0, node.num_bytes, _BLOCK_BYTES):
            file.write(node.read_all(offset, min(_BLOCK_BYTES, node.num_bytes - offset)))
    path.chmod(0o444)


def _failure(error: OSError, path: Path) -> Exception:
    if error.errno != errno.ENOSPC:
        return DataError(f"cannot write the dataset view {path}: {error}")
    free = shutil.disk_usage(path.parent).free
    return ArenaFullError(
        f"the dataset view {path} needs more shared memory than the {free} bytes that are free: free some (df -h "
        "/dev/shm), enlarge it, give a smaller --view-window, or allow FUSE (/dev/fuse), whose view takes none"
    )
