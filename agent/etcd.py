"""Coordination over etcd: what is the same for both of its APIs (`etcd_v2`, `etcd_v3`).

Every write stores "<nonce> <value>" with a fresh nonce. The nonce is the key's token: unlike etcd's own counters it
survives the refresh of a lease, never comes back when an etcd comes back empty, and tells a write whose answer was
lost from one that somebody else won.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tenplexrun.errors import CompareFailedError, CoordinationError
from tenplexrun.ports import KeyValue

ROOT = "/tenplexrun/"
REQUEST_TIMEOUT_S = 2.0
GIVE_UP_S = 6.0  # several servers, or one that restarts, get that long
WATCH_TIMEOUT_S = 5.0  # a quiet watch may hang on a server that is cut off: look again
RETRY_PAUSE_S = 0.1
BREAK_S = 1.0  # without an answer; less costs no lease, and a busy machine may take that long

Content = Mapping[str, KeyValue]
Deliver = Callable[[Content], bool]  # returns whether to go on
T = TypeVar("T")


class Unavailable(Exception):
    """A server can't be reached or can't answer now; another one, or the same one later, may."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to talk to the servers: TLS or not, its files (PEM; no `ca_cert`: the system's), user and password."""

    tls: bool = False
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str = field(default="", repr=False)

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def tls_options(self) -> dict[str, Any]:
        """Of urllib3's pools."""
        if not self.tls:
            return {}
        return {
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": self.ca_cert,
            "cert_file": self.cert,
            "key_file": self.key,
        }

    def removal(self, endpoint: str, requests: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """What the guardian needs to remove a key: see `guardian.remove_key`."""
        files = {"ca_cert": self.ca_cert, "cert": self.cert, "key": self.key}
        return {"url": f"{self.scheme}://{endpoint}", "tls": files, "requests": requests}


PLAIN = Access()
NO_TRUST = "and this node do not trust each other; check the certificates"


@dataclass(frozen=True, slots=True)
class Grant:
    """A leased key: what was written, the server's number of the lease if it has one, and the granted time."""

    held: KeyValue
    id: str
    ttl_s: float


class Server(Protocol):
    """One server through one API: blocking, thread-safe. All raise Unavailable, CoordinationError where it refuses,
    CompareFailedError as in the port. Repeating a call whose answer was lost is safe."""

    def get(self, key: str) -> KeyValue | None: ...
    def put(self, new: KeyValue) -> None: ...
    def create(self, new: KeyValue) -> None: ...
    def swap(self, new: KeyValue, token: str) -> None: ...
    def delete(self, key: str, token: str | None) -> None: ...
    def delete_folder(self, prefix: str) -> None: ...
    def list(self, prefix: str) -> Content: ...
    def hold(self, new: KeyValue, ttl_s: int) -> Grant: ...
    def refresh(self, grant: Grant) -> bool:
        """Whether the key is still the one that was granted; then it lives on."""

    def release(self, grant: Grant) -> None: ...
    def follow(self, prefix: str, deliver: Deliver) -> None:
        """Deliver the content of the prefix, and again after changes and after each WATCH_TIMEOUT_S of quiet. Returns
        when `deliver` says so, or the content has to be read anew."""

    def removal(self, key: str) -> dict[str, Any]: ...


Connect = Callable[[str, float], Server]  # endpoint, seconds for a request


class Etcd:
    """Implements `tenplexrun.ports.Coordination`. `endpoints` are "host:port" of the cluster's servers; they may be
    changed at any time, at least one has to be left."""

    def __init__(self, endpoints: Sequence[str], connect: Connect) -> None:
        self.endpoints, self._connect = tuple(endpoints), connect
        self._since = self._answered = time.monotonic()
        self._failed = False  # since the last answer
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="etcd")
        self._stop = threading.Event()  # ends the threads of watches and leases
        self._servers = self._to_servers(REQUEST_TIMEOUT_S)

    @property
    def connected_s(self) -> float:
        now = time.monotonic()
        return 0.0 if self._broken(now) else now - self._since

    async def get(self, key: str) -> KeyValue | None:
        return await self._run(lambda server: server.get(key))

    async def put(self, key: str, value: str) -> KeyValue:
        new = _new(key, value)
        await self._run(lambda server: server.put(new))
        return new

    async def create(self, key: str, value: str) -> KeyValue:
        new = _new(key, value)
        await self._run(lambda server: server.create(new))
        return new

    async def swap(self, key: str, value: str, token: str) -> KeyValue:
        new = _new(key, value)
        await self._run(lambda server: server.swap(new, token))
        return new

    async def delete(self, key: str, token: str | None = None) -> None:
        await self._run(lambda server: server.delete(key, token))

    async def delete_folder(self, prefix: str) -> None:
        await self._run(lambda server: server.delete_folder(prefix))

    async def list(self, prefix: str) -> Content:
        return await self._run(lambda server: server.list(prefix))

    async def hold(self, key: str, value: str, ttl_s: float) -> EtcdLease:
        """As in the port. etcd counts whole seconds: `ttl_s` is rounded up."""
        new, whole_s = _new(key, value), max(1, math.ceil(ttl_s))
        grant = await self._run(lambda server: server.hold(new, whole_s))
        lease = EtcdLease(self, grant)
        servers = self._to_servers(max(0.5, grant.ttl_s / 4))
        arguments = (servers, self._stop)
        threading.Thread(target=lease.refresh, args=arguments, name=f"lease {key}", daemon=True).start()
        return lease

    async def watch(self, prefix: str) -> AsyncIterator[Content]:
        loop, changed, stop = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        latest: list[Content] = []

        def stopped() -> bool:
            return stop.is_set() or self._stop.is_set()

        def deliver(content: Content) -> bool:
            if latest[-1:] != [content]:
                latest[:] = [content]
                with contextlib.suppress(RuntimeError):  # the loop has gone, and with it whoever watched
                    loop.call_soon_threadsafe(changed.set)
            return not stopped()

        arguments = (self._to_servers(REQUEST_TIMEOUT_S), prefix, deliver, stopped)
        threading.Thread(target=_watch, args=arguments, name=f"watch {prefix}", daemon=True).start()
        try:
            while True:
                await changed.wait()
                changed.clear()
                yield latest[0]
        finally:
            stop.set()

    async def close(self) -> None:
        """Stop watching and refreshing. Leased keys stay until they expire; `release` deletes them at once."""
        self._stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def removals(self, key: str) -> Sequence[dict[str, Any]]:
        """What removes the key with plain HTTP at one of the servers (the guardian does it for a dead agent)."""
        return [self._connect(endpoint, REQUEST_TIMEOUT_S).removal(key) for endpoint in self.endpoints]

    async def _run(self, operation: Callable[[Server], T]) -> T:
        call = self._servers.call
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(operation, GIVE_UP_S))

    def _to_servers(self, timeout_s: float) -> Servers:
        def connect(endpoint: str) -> Server:
            return self._connect(endpoint, timeout_s)

        return Servers(lambda: self.endpoints, connect, self._noticed, self._stop)

    def _noticed(self, answered: bool) -> None:
        """Called after each request, from any thread."""
        now = time.monotonic()
        if not answered:
            self._failed = True
            return
        if self._broken(now):
            self._since = now
        self._answered, self._failed = now, False

    def _broken(self, now: float) -> bool:
        return self._failed and now - self._answered > BREAK_S


class EtcdLease:
    """Implements `tenplexrun.ports.Lease`."""

    def __init__(self, coordination: Etcd, grant: Grant) -> None:
        self.lost = asyncio.Event()
        self._coordination, self._grant = coordination, grant
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()

    @property
    def key(self) -> str:
        return self._grant.held.key

    async def release(self) -> None:
        self._stop.set()
        with contextlib.suppress(CompareFailedError):  # lost already, and somebody else's by now
            await self._coordination._run(lambda server: server.release(self._grant))

    def abandon(self) -> None:
        """Stop refreshing and let it expire, as a holder that died would."""
        self._stop.set()

    def refresh(self, servers: Servers, closed: threading.Event) -> None:
        """The lease's own thread. A loop or an executor that is blocked must not lose a lease."""
        pause_s = self._grant.ttl_s / 3
        while not self._stop.wait(pause_s) and not closed.is_set():
            pause_s = self._grant.ttl_s / 3
            try:
                if not servers.call(lambda server: server.refresh(self._grant)):
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(self.lost.set)
                    return
            except CoordinationError:
                pause_s = RETRY_PAUSE_S  # only the store itself may say that the lease is lost


class Servers:
    """A cluster's servers, one tried after the other. Thread-safe. `endpoints`: those of now."""

    def __init__(
        self,
        endpoints: Callable[[], tuple[str, ...]],
        connect: Callable[[str], Server],
        noticed: Callable[[bool], None],
        closed: threading.Event,
    ) -> None:
        self._endpoints, self._connect, self._noticed, self._closed = endpoints, connect, noticed, closed
        self._servers: dict[str, Server] = {}
        self._current = ""

    def call(self, operation: Callable[[Server], T], give_up_s: float = 0.0) -> T:
        """Run it, again while servers are unavailable. Raises CoordinationError when that lasts, or they refuse."""
        end = time.monotonic() + give_up_s
        while True:
            endpoint = self._choose()
            try:
                result = operation(self._server(endpoint))
            except Unavailable as error:
                self._noticed(False)
                self._choose(after=endpoint)
                if time.monotonic() >= end or self._closed.is_set():
                    raise CoordinationError(self._explain(error)) from error
            except CompareFailedError:
                raise
            except CoordinationError as error:
                raise CoordinationError(f"the etcd at {', '.join(self._endpoints())} {error}") from error
            else:
                self._noticed(True)
                return result
            time.sleep(RETRY_PAUSE_S)

    def _choose(self, after: str | None = None) -> str:
        """The server to ask: the last one while it is one of them, else the first; or the next `after` one."""
        known, current = self._endpoints(), self._current
        if after in known:
            current = known[(known.index(after) + 1) % len(known)]
        self._current = current if current in known else known[0]
        return self._current

    def _server(self, endpoint: str) -> Server:
        if endpoint not in self._servers:
            self._servers[endpoint] = self._connect(endpoint)
        return self._servers[endpoint]

    def _explain(self, error: Unavailable) -> str:
        names = ", ".join(self._endpoints())
        if str(error):
            return f"the etcd at {names} cannot answer ({error}); do most of its servers run?"
        return f"cannot reach etcd at {names}; is it running, and reachable from here?"


def _watch(servers: Servers, prefix: str, deliver: Deliver, stopped: Callable[[], bool]) -> None:
    """The watch's own thread. Each turn reads all and then waits for changes: a history that was cleared, an outage
    or a replaced store needs no special case."""
    while not stopped():
        try:
            servers.call(lambda server: server.follow(prefix, deliver))
        except CoordinationError:
            time.sleep(RETRY_PAUSE_S)


def _new(key: str, value: str) -> KeyValue:
    return KeyValue(key, value, uuid.uuid4().hex)


def stored(item: KeyValue) -> str:
    return f"{item.token} {item.value}"


def parsed(key: str, text: str) -> KeyValue:
    token, _, value = text.partition(" ")
    return KeyValue(key, value, token)
