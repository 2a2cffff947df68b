"""Control messages between processes: one JSON object a line, over a Unix or TCP stream.

    request       {"v": 1, "id": 7, "op": "seal", ...}
    reply         {"v": 1, "re": 7, "ok": {...}}   or   {"v": 1, "re": 7, "error": {"kind", "message"}}
    notification  {"v": 1, "op": "committed", ...}      (no id, no reply)

Both ends may ask. Addresses are "unix:/path" or "host:port". Errors of `tenplexrun.errors` keep their class.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from tenplexrun.errors import ProcessError, TenplexError, WireError, from_wire, to_wire
from tenplexrun.tasks import end

SILENCE_S = 6
PROTOCOL = 1
MAX_LINE_BYTES = 64 << 20
RESTART_S = 15.0
_RETRY_S = 0.01
Record = dict[str, Any]
Handler = Callable[["Channel", str, Record], Awaitable[Record | None]]


class Channel:
    """One end of a connection. `handler(channel, op, args)` answers what the other end asks."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler | None = None
    ) -> None:
        self._reader, self._writer, self._handler = reader, writer, handler
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Record]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._main = asyncio.ensure_future(self._run())

    async def request(self, op: str, /, timeout_s: float | None = None, **args: Any) -> Record:
        """Ask the other end and wait. Raises what it raised, WireError when it is gone or silent too long."""
        if self.closed:
            raise WireError(f"cannot ask {op!r}: the other end has closed the connection")
        number = next(self._ids)
        future: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._send({"id": number, "op": op, **args})
        try:
            return await asyncio.wait_for(future, timeout_s)
        except asyncio.TimeoutError:
            raise WireError(f"no answer to {op!r} within {timeout_s} s") from None
        finally:
            self._waiting.pop(number, None)

    def notify(self, op: str, /, **args: Any) -> None:
        """Tell the other end, without an answer; silently nothing if it is gone."""
        if not self.closed:
            self._send({"op": op, **args})

    @property
    def closed(self) -> bool:
        return self._main.done() or self._writer.is_closing()

    async def wait_closed(self) -> None:
        """Return when the connection has ended, from whichever side."""
        await asyncio.wait([self._main])

    async def close(self) -> None:
        self._writer.close()
        await end([self._main])

    def _send(self, record: Record) -> None:
        line = json.dumps({"v": PROTOCOL, **record}, separators=(",", ":"))
        self._writer.write(line.encode() + b"\n")

    async def _run(self) -> None:
        try:
            while line := await self._reader.readline():
                self._receive(json.loads(line))
        except (OSError, ValueError, TypeError, RecursionError, asyncio.LimitOverrunError):
            pass  # a reset, or a peer that does not speak JSON lines: the same to us as its end
        finally:
            self._writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(WireError("the other end closed the connection before it answered"))
            for task in self._tasks:
                task.cancel()

    def _receive(self, record: Record) -> None:
        if not isinstance(record, dict) or record.pop("v", None) != PROTOCOL:
            raise ValueError("not a message of this protocol version")
        if "re" in record:
            future = self._waiting.get(record["re"])
            if future is not None and not future.done():
                if "error" in record:
                    future.set_exception(from_wire(record["error"]))
                else:
                    future.set_result(record.get("ok") or {})
            return
        task = asyncio.ensure_future(self._answer(record.pop("id", None), str(record.pop("op", "")), record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int | None, op: str, args: Record) -> None:
        try:
            if self._handler is None:
                raise WireError(f"this end answers no requests, {op!r} neither")
            reply: Record = {"ok": await self._handler(self, op, args) or {}}
        except Exception as error:
            reply = {"error": to_wire(error)}
        if number is not None and not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._send({"re": number, **reply})
                await self._writer.drain()


async def connect(
    address: str, handler: Handler | None = None, timeout_s: float = 10.0, tls: ssl.SSLContext | None = None
) -> Channel:
    """A channel to `address`; `tls` is for TCP. Raises WireError when nothing listens there."""
    kind, target = _split(address)
    try:
        if kind == "unix":
            opening = asyncio.open_unix_connection(str(target), limit=MAX_LINE_BYTES)
        else:
            opening = asyncio.open_connection(*target, limit=MAX_LINE_BYTES, ssl=tls)
        reader, writer = await asyncio.wait_for(opening, timeout_s)
    except (OSError, asyncio.TimeoutError) as error:
        raise WireError(f"cannot reach {address}: {error or 'timed out'}") from error
    _notice_silence(writer)
    return Channel(reader, writer, handler)


async def from_socket(sock: socket.socket, handler: Handler | None = None) -> Channel:
    """A channel over a connected stream socket, for example one end of a socketpair."""
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES)
    return Channel(reader, writer, handler)


async def serve(
    address: str,
    handler: Handler,
    on_open: Callable[[Channel], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[asyncio.AbstractServer, str]:
    """Listen at `address` (port 0: assigned by the system). Returns the server and the real address."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _notice_silence(writer)
        channel = Channel(reader, writer, handler)
        if on_open is not None:
            on_open(channel)

    kind, target = _split(address)
    if kind == "unix":
        server: asyncio.AbstractServer = await asyncio.start_unix_server(accept, str(target), limit=MAX_LINE_BYTES)
        return server, address
    host, port = target
    tcp = await asyncio.start_server(accept, host, port, limit=MAX_LINE_BYTES, ssl=tls)
    return tcp, join_host_port(host, tcp.sockets[0].getsockname()[1])


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """End a TCP connection whose other machine is silent for SILENCE_S. The kernels ask and answer, so that a process
    that is busy or stopped is not taken for a cut cable."""
    sock = writer.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - SILENCE_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)  # what is sent, too


class Caller:
    """The asking end of a server that may be started later, and again: connects when first used and when it must.

    `name` is what users know the server as; `handler` answers what it asks or tells.
    """

    def __init__(self, address: str, name: str, timeout_s: float = 120.0, handler: Handler | None = None) -> None:
        self._address, self._name, self._timeout_s, self._handler = address, name, timeout_s, handler
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()

    async def request(self, op: str, /, timeout_s: float | None = None, **args: Any) -> Record:
        """Ask; once more if the server dies meanwhile and comes back: what is asked of it may be asked twice.

        Raises what the server raised, WireError where it stays away or is silent too long.
        """
        deadline = None  # from when it first was away: it may have hung for long before it was killed
        while True:
            try:
                return await self._ask(op, timeout_s or self._timeout_s, args)
            except WireError:
                gone, now = self._channel is None or self._channel.closed, asyncio.get_running_loop().time()
                deadline = now + RESTART_S if deadline is None else deadline
                if not gone or now > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def hello(self, timeout_s: float = 20.0) -> Record:
        """Wait until the server answers "hello". Raises ProcessError when it does not in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self._ask("hello", timeout_s, {})
            except WireError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ProcessError(f"{self._name} did not start within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, op: str, timeout_s: float, args: Record) -> Record:
        async with self._connecting:
            if self._channel is None or self._channel.closed:
                self._channel = None
                self._channel = await connect(self._address, self._handler)
        return await self._channel.request(op, timeout_s, **args)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class BlockingChannel:
    """The asking end for code without an event loop (a training script). One thread at a time."""

    def __init__(self, address: str, timeout_s: float | None = None) -> None:
        kind, target = _split(address)
        self._ids = itertools.count(1)
        try:
            if kind == "unix":
                self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._sock.connect(str(target))
            else:
                self._sock = socket.create_connection(tuple(target), timeout_s)
        except OSError as error:
            raise WireError(f"cannot reach {address}: {error}") from error
        self._sock.settimeout(timeout_s)
        self._file = self._sock.makefile("rb")

    def request(self, op: str, /, **args: Any) -> Record:
        """Ask and wait. Raises what the other end raised, WireError when it is gone."""
        number = next(self._ids)
        try:
            self._send({"id": number, "op": op, **args})
            while line := self._file.readline():
                record = json.loads(line)
                if record.get("re") == number:
                    if "error" in record:
                        raise from_wire(record["error"])
                    return dict(record.get("ok") or {})
        except (OSError, ValueError) as error:
            raise WireError(f"lost the other end while asking {op!r}: {error}") from error
        raise WireError(f"the other end closed the connection while asked {op!r}")

    def notify(self, op: str, /, **args: Any) -> None:
        try:
            self._send({"op": op, **args})
        except OSError as error:
            raise WireError(f"lost the other end while telling {op!r}: {error}") from error

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def _send(self, record: Record) -> None:
        self._sock.sendall(json.dumps({"v": PROTOCOL, **record}, separators=(",", ":")).encode() + b"\n")


def join_host_port(host: str, port: int) -> str:
    """ "host:port", IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Inverse of `join_host_port`. Raises TenplexError on anything else."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise TenplexError(f"{address!r} is not HOST:PORT (IPv6 hosts in brackets)")
    return host.strip("[]"), int(port)


def _split(address: str) -> tuple[str, Any]:
    if address.startswith("unix:"):
        return "unix", address.removeprefix("unix:")
    return "tcp", split_host_port(address)
