"""Blocking sockets between stores: frames in and out, large buffers, and no wait without an end."""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections.abc import Iterator

from tenplexrun.core.records import Record
from tenplexrun.errors import PeerLostError, WireError
from tenplexrun.store.files import MappedFile
from tenplexrun.store.wire import FrameReader

BUFFER_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
"""Tensors are gathered, sent, received and hashed in steps of at most this size, which a processor's cache holds."""
MIN_RUN_BYTES = 256 << 10
"""Less than this is joined with other small writes: cheaper than a system call of its own."""


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Large buffers, no delay of small writes, and `timeout_s` as the longest wait for any progress."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.settimeout(timeout_s)


def failure(what: str, error: OSError) -> WireError:
    """The error to raise: the peer is lost, unless it, or this end, refuses to speak TLS with the other."""
    ended = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    if not isinstance(error, ssl.SSLError) or ended:
        return PeerLostError(f"{what}: {error}")
    return WireError(
        f"{what}: {error}; all nodes need TLS, or none, and certificates (--tls-cert) that the authority of --tls-ca "
        "has signed for their addresses"
    )


def receive_frame(sock: socket.socket, kind: int, timeout_s: float, first: bytes = b"") -> Record | None:
    """One frame's header, complete within `timeout_s` after its first bytes; None if the peer ended before them.
    `first`: what has been read of it already.

    Raises WireError on nonsense, PeerLostError on a stalled or broken connection. What follows the frame is not read.
    """
    reader = FrameReader(kind)
    reader.feed(first)
    deadline = time.monotonic() + timeout_s if first else None
    while True:
        try:
            data = sock.recv(min(reader.needed, CHUNK_BYTES))
        except OSError as error:
            raise failure("lost the peer while waiting for its message", error) from error
        if not data and deadline is None:
            return None
        if not data:
            raise PeerLostError("the peer closed the connection in the middle of a message")
        header = reader.feed(data)
        if header is not None:
            return header
        deadline = deadline or time.monotonic() + timeout_s
        if time.monotonic() > deadline:
            raise PeerLostError(f"the peer did not finish a message within {timeout_s} s")


def receive_into(sock: socket.socket, view: memoryview) -> Iterator[memoryview]:
    """Fill `view` from the stream: each of its parts, as it comes. The more room the system is given at once, the less
    it takes it. Raises PeerLostError when the peer goes away or stalls."""
    while view:
        try:
            count = sock.recv_into(view)
        except OSError as error:
            raise failure("lost the peer in the middle of a region", error) from error
        if not count:
            raise PeerLostError("the peer closed the connection in the middle of a region")
        yield view[:count]
        view = view[count:]


class Outbox:
    """Writes to one socket: small ones are joined, long runs of a file go by sendfile, with TLS from its map.

    Raises OSError.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def put(self, data: bytes | memoryview) -> None:
        if len(data) >= MIN_RUN_BYTES:
            self.flush()
            self._sock.sendall(data)
            return
        self._buffer += data
        if len(self._buffer) >= CHUNK_BYTES:
            self.flush()

    def put_run(self, file: MappedFile, offset: int, num_bytes: int) -> None:
        """`num_bytes` bytes of `file` from `offset` on."""
        if num_bytes < MIN_RUN_BYTES:
            self.put(file.view[offset : offset + num_bytes])
            return
        self.flush()
        if isinstance(self._sock, ssl.SSLSocket):  # the kernel cannot encrypt for us
            self._sock.sendall(file.view[offset : offset + num_bytes])
            return
        stop = offset + num_bytes
        while offset < stop:
            try:
                count = os.sendfile(self._sock.fileno(), file.fd, offset, stop - offset)
            except BlockingIOError:  # a socket with a time-out does not block
                self._wait_writable()
                continue
            if not count:
                raise OSError("a file of the arena ended early")
            offset += count

    def flush(self) -> None:
        self._sock.sendall(self._buffer)
        self._buffer.clear()

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        timeout_s = self._sock.gettimeout()
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise TimeoutError(f"the peer took nothing for {timeout_s} s")
