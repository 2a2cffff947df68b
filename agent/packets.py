"""The agent's end of the packet sockets to its guardian and its warm pool (the format is told in `guardian`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tenplexrun.agent.guardian import Record, receive_packet, send_packet
from tenplexrun.errors import ProcessError, from_wire


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected packet sockets: one stays here, one is handed to a process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Packets:
    """Requests with replies, and notices, over one packet socket. `peer` names the other end in messages.

    `on_notice(record)` sees what the other end says unasked, `on_end()` its end; both run in the event loop.
    """

    def __init__(
        self, sock: socket.socket, peer: str, on_notice: Callable[[Record], None], on_end: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._sock, self._peer, self._on_notice, self._on_end = sock, peer, on_notice, on_end
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Record]] = {}
        self._unsent: deque[tuple[Record, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self.closed = False

    async def request(self, op: str, /, fds: Sequence[int] = (), **args: Any) -> Record:
        """Ask and wait. The descriptors are duplicated. Raises what the other end raised, ProcessError if it ended."""
        if self.closed:
            raise ProcessError(f"cannot ask {self._peer} to {op}: it has ended")
        number = next(self._ids)
        future: asyncio.Future[Record] = self._loop.create_future()
        self._waiting[number] = future
        self._send({"id": number, "op": op, **args}, fds)
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def notify(self, op: str, /, **args: Any) -> None:
        """Tell, without an answer; silently nothing if the other end has ended."""
        if not self.closed:
            self._send({"op": op, **args}, ())

    def close(self) -> None:
        """Stop talking; requests under way raise ProcessError. `on_end` is not called."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while self._unsent:
            _close_all(self._unsent.popleft()[1])
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessError(f"{self._peer} ended before it answered"))

    def _send(self, record: Record, fds: Sequence[int]) -> None:
        self._unsent.append((record, [os.dup(fd) for fd in fds]))
        if len(self._unsent) == 1:
            self._writable()

    def _writable(self) -> None:
        while self._unsent:
            record, fds = self._unsent[0]
            try:
                send_packet(self._sock, record, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._writable)
                return
            except OSError:
                pass  # it has ended: the reader learns it and tells
            self._unsent.popleft()
            _close_all(fds)
        self._loop.remove_writer(self._sock)

    def drain(self) -> None:
        """Take what the other end, known to have ended, has said last."""
        while not self.closed and self._readable():
            pass

    def _readable(self) -> bool:
        try:
            packet = receive_packet(self._sock)
        except BlockingIOError:
            return False
        if packet is None:
            self.close()
            self._on_end()
            return False
        record, fds = packet
        _close_all(fds)
        future = self._waiting.get(record.pop("re", 0))
        if future is None:
            if "op" in record:
                self._on_notice(record)
        elif not future.done():
            if "error" in record:
                future.set_exception(from_wire(record["error"]))
            else:
                future.set_result(record["ok"])
        return True


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
