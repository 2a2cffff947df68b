"""The view through FUSE: one mount a process, served by asyncio, read only.

Content behind an inode never changes, so the kernel may cache it: each round gets new inodes. Requests are answered
from trees of `vfs.nodes`; whatever goes wrong in a handler is EIO for that one request, since pyfuse3 ends the mount on
any other exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import stat
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyfuse3
import pyfuse3.asyncio

from tenplexrun.errors import DataError
from tenplexrun.vfs.mounts import clear, raise_read_ahead
from tenplexrun.vfs.nodes import Directory, File, Link, Live, Node

_CACHE_S = 3600.0
_FRESH_S = 1.0  # directories change when rounds come and go
_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Any]])


@dataclass(slots=True, eq=False)
class _Inode:
    number: int
    node: Node
    listed: dict[str, _Inode] = field(default_factory=dict)
    unlisted: dict[str, _Inode] = field(default_factory=dict)
    lookups: int = 0
    attached: bool = True
    grown: bool = False

    def below(self) -> Iterator[_Inode]:
        yield self
        for child in (*self.listed.values(), *self.unlisted.values()):
            yield from child.below()


def _guarded(handler: _Handler) -> _Handler:
    @functools.wraps(handler)
    async def guard(*args: Any) -> Any:
        try:
            return await handler(*args)
        except pyfuse3.FUSEError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ESTALE:
                raise pyfuse3.FUSEError(errno.ESTALE) from error
            args[0].report(f"{handler.__name__} failed: {type(error).__name__}: {error}")
            raise pyfuse3.FUSEError(errno.EIO) from error

    return guard  # type: ignore[return-value]


class Mount(pyfuse3.Operations):  # type: ignore[misc]
    """Serves `root` and other trees below `path`. `show`/`drop` change them; `run` answers the kernel until unmounted
    or `stop`ped. `report` is told what a handler failed with."""

    supports_dot_lookup = False

    def __init__(self, path: Path, root: Directory, report: Callable[[str], None]) -> None:
        super().__init__()
        self._path, self.report = path, report
        self._numbers = itertools.count(pyfuse3.ROOT_INODE)
        self._inodes: dict[int, _Inode] = {}
        self._open_directories: dict[int, list[tuple[str, _Inode]]] = {}
        self._handles = itertools.count(1)
        self._born_ns = time.time_ns()
        self._root = self._grow(root)
        self._fill(self._root)

    def start(self) -> None:
        """Mount, in place of whatever a killed predecessor left there. Raises DataError with the reason if refused."""
        clear(self._path)
        self._path.mkdir(parents=True, exist_ok=True)
        pyfuse3.asyncio.enable()
        options = {*pyfuse3.default_options, "fsname=tenplexrun", "ro"}
        with _stderr_of_libfuse() as said:
            try:
                pyfuse3.init(self, str(self._path), options)
            except RuntimeError as error:
                raise DataError(f"cannot mount {self._path}: {said() or error}") from None

    async def run(self) -> None:
        await pyfuse3.main()

    def stop(self) -> None:
        pyfuse3.terminate()

    def close(self) -> None:
        """Unmount. Open files stay readable to nobody: the process that served them goes."""
        pyfuse3.close(unmount=True)
        clear(self._path)

    def show(self, group: str, name: str, directory: Directory, current: bool) -> None:
        """Show `directory` as `group`/`name`; if `current`, let the link `group`/current point to it."""
        if group not in self._root.listed:
            self._root.listed[group] = self._grow(Directory({}))
        self._put(group, name, directory)
        if current:
            self._put(group, "current", Link(name, moves=True))

    def drop(self, group: str, name: str) -> None:
        """Forget `group`/`name`; files of it that are open stay readable."""
        shelf = self._root.listed[group].listed
        self._detach(shelf.pop(name, None))
        if "current" in shelf and shelf["current"].node == Link(name, moves=True):
            self._detach(shelf.pop("current"))

    def _put(self, group: str, name: str, node: Node) -> None:
        shelf = self._root.listed[group].listed
        self._detach(shelf.pop(name, None))
        shelf[name] = self._grow(node)

    def _fill(self, inode: _Inode) -> None:
        """A directory gets inodes for what is in it when somebody looks for the first time: there may be thousands."""
        if isinstance(inode.node, Directory) and not inode.grown:
            inode.grown = True
            for name, node in inode.node.entries.items():
                inode.listed[name] = child = self._grow(node)
                child.attached = inode.attached
                self._release(child)

    async def _refresh(self, inode: _Inode) -> None:
        """A live directory gets what is there now, with new inodes for what has changed; one that has gone stays."""
        self._fill(inode)
        if not isinstance(inode.node, Live):
            return
        found = await asyncio.to_thread(inode.node.entries)
        if inode.attached:
            for name in [name for name, child in inode.listed.items() if child.node is not found.get(name)]:
                self._detach(inode.listed.pop(name))
            for name in found.keys() - inode.listed.keys():
                inode.listed[name] = self._grow(found[name])

    def _grow(self, node: Node) -> _Inode:
        inode = _Inode(next(self._numbers), node)
        self._inodes[inode.number] = inode
        return inode

    def _detach(self, top: _Inode | None) -> None:
        for inode in top.below() if top is not None else ():
            inode.attached = False
            self._release(inode)

    def _release(self, inode: _Inode) -> None:
        if not inode.attached and inode.lookups <= 0:
            self._inodes.pop(inode.number, None)

    def _inode(self, number: int) -> _Inode:
        if number not in self._inodes:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return self._inodes[number]

    def _child(self, parent: _Inode, name: str) -> _Inode:
        if not isinstance(parent.node, Directory | Live):
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        found = parent.listed.get(name) or parent.unlisted.get(name)
        if found is None:
            hidden = parent.node.hidden(name) if isinstance(parent.node, Directory) else None
            if hidden is None:
                raise pyfuse3.FUSEError(errno.ENOENT)
            found = parent.unlisted[name] = self._grow(hidden)
            found.attached = parent.attached
        return found

    def _attributes(self, inode: _Inode) -> Any:
        entry, node = pyfuse3.EntryAttributes(), inode.node
        entry.st_ino = inode.number
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._born_ns
        entry.st_blksize = 128 << 10
        entry.entry_timeout = entry.attr_timeout = _CACHE_S
        if isinstance(node, File):
            entry.st_mode, entry.st_size = stat.S_IFREG | 0o444, node.num_bytes
            entry.st_blocks = -(-node.num_bytes // 512)
        elif isinstance(node, Link):
            entry.st_mode, entry.st_size = stat.S_IFLNK | 0o777, len(os.fsencode(node.target))
            entry.entry_timeout = 0 if node.moves else _CACHE_S
        else:
            entry.st_mode, entry.st_nlink = stat.S_IFDIR | 0o555, 2
            entry.entry_timeout = entry.attr_timeout = _FRESH_S
        return entry

    def init(self) -> None:
        # The kernel takes a read-ahead only after the answer to its first request, which is this one.
        asyncio.get_running_loop().call_soon(raise_read_ahead, self._path)

    @_guarded
    async def lookup(self, parent_inode: int, name: bytes, ctx: object) -> Any:
        parent = self._inode(parent_inode)
        await self._refresh(parent)
        child = self._child(parent, os.fsdecode(name))
        child.lookups += 1
        self._inodes[child.number] = child  # below a directory that was dropped only the kernel keeps it
        return self._attributes(child)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for number, lookups in inode_list:
            if (inode := self._inodes.get(number)) is not None:
                inode.lookups -= lookups
                self._release(inode)

    @_guarded
    async def getattr(self, inode: int, ctx: object) -> Any:
        return self._attributes(self._inode(inode))

    @_guarded
    async def readlink(self, inode: int, ctx: object) -> bytes:
        node = self._inode(inode).node
        if not isinstance(node, Link):
            raise pyfuse3.FUSEError(errno.EINVAL)
        return os.fsencode(node.target)

    @_guarded
    async def opendir(self, inode: int, ctx: object) -> int:
        handle = next(self._handles)
        await self._refresh(self._inode(inode))
        self._open_directories[handle] = sorted(self._inode(inode).listed.items())
        return handle

    @_guarded
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._open_directories[fh]
        for number, (name, inode) in enumerate(listing[start_id:], start_id + 1):
            if not pyfuse3.readdir_reply(token, os.fsencode(name), self._attributes(inode), number):
                return
            inode.lookups += 1
            self._inodes[inode.number] = inode  # dropped since the directory was opened: the kernel knows it again

    @_guarded
    async def releasedir(self, fh: int) -> None:
        self._open_directories.pop(fh, None)

    @_guarded
    async def open(self, inode: int, flags: int, ctx: object) -> Any:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EROFS)
        self._inode(inode)
        return pyfuse3.FileInfo(fh=inode)  # cached by the kernel, never direct_io: that would refuse mmap

    @_guarded
    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:
        node = self._inode(fh).node
        if not isinstance(node, File):
            raise pyfuse3.FUSEError(errno.EISDIR)
        try:
            return node.read(off, size)
        except BlockingIOError:
            return await asyncio.to_thread(node.read_all, off, size)

    @_guarded
    async def release(self, fh: int) -> None:
        pass

    @_guarded
    async def statfs(self, ctx: object) -> Any:
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_files, data.f_namemax = len(self._inodes), 255
        return data


@contextlib.contextmanager
def _stderr_of_libfuse() -> Iterator[Callable[[], str]]:
    """libfuse says why a mount failed on descriptor 2 only: catch it. Yields a function that returns what it said."""
    with tempfile.TemporaryFile() as caught:

        def said() -> str:
            caught.seek(0)
            return " ".join(caught.read().decode(errors="replace").split())

        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
