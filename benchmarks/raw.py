"""The limit of moving bytes between nodes: sendfile → recv_into by as many streams as a pull has, nothing verified.

By a `states.Crew`, a member a node: `listen`, then `carry` in all of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tenplexrun.store.sockets import CHUNK_BYTES, tune
from tenplexrun.store.transfer import STREAMS_PER_SOURCE

Held = dict[str, Any]
SIZE = struct.Struct("<Q")
Address = tuple[str, int]


@dataclass(frozen=True)
class Flow:
    """Bytes from one member to another."""

    source: int
    target: int
    num_bytes: int


def listen(held: Held, hosts: Sequence[Sequence[str]]) -> Address:
    """On each member's host: (address) or (address, network namespace)."""
    address, *namespace = hosts[held["rank"]]
    for name in namespace:
        with open(f"/run/netns/{name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    held["listener"] = socket.create_server((address, 0), backlog=64)
    return address, int(held["listener"].getsockname()[1])


def carry(held: Held, addresses: Sequence[Address], flows: Sequence[Flow], paths: Sequence[str], new: bool) -> None:
    """A member's part: out of the file of its own path, into memory that exists or, `new`, a file that did not."""
    me = held["rank"]
    share = [(flow, flow.num_bytes // STREAMS_PER_SOURCE) for flow in flows for _ in range(STREAMS_PER_SOURCE)]
    total = sum(size for flow, size in share if flow.target == me)
    jobs: list[Callable[[], None]] = [
        partial(_send, addresses[flow.target], paths[me], size) for flow, size in share if flow.source == me
    ]
    file = None
    if total and new:
        file = os.open(os.path.dirname(paths[me]), os.O_TMPFILE | os.O_RDWR)
        os.ftruncate(file, total)
    elif total and len(held.get("memory", b"")) < total:
        held["memory"] = mmap.mmap(-1, total, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    place, lock = [0], threading.Lock()

    def receive() -> None:
        with held["listener"].accept()[0] as sock:
            _tune(sock)
            (size,) = SIZE.unpack(sock.recv(SIZE.size, socket.MSG_WAITALL))
            with lock:
                place[0] += size
                stop = place[0]
            if file is None:
                _into_memory(sock, memoryview(held["memory"])[stop - size : stop])
            else:
                _into_file(sock, file, stop - size, stop)

    jobs += [receive] * sum(flow.target == me for flow, _ in share)
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if file is not None:
        os.close(file)


def _send(address: Address, path: str, size: int) -> None:
    file, offset = os.open(path, os.O_RDONLY), 0
    with socket.create_connection(address) as sock:
        _tune(sock)
        sock.sendall(SIZE.pack(size))
        while offset < size:
            offset += os.sendfile(sock.fileno(), file, offset, size - offset)
    os.close(file)


def _into_memory(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


def _into_file(sock: socket.socket, file: int, offset: int, stop: int) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while offset < stop:
        count = sock.recv_into(buffer[: stop - offset], 0, socket.MSG_WAITALL)
        offset += os.pwrite(file, buffer[:count], offset)


def _tune(sock: socket.socket) -> None:
    tune(sock, 60.0)
    sock.setblocking(True)
