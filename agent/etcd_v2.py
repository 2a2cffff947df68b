"""Coordination over etcd's v2 API, through `python-etcd`. All keys lie below the folder `/tenplexrun`.

Every write stores "<nonce> <value>" with a fresh nonce. The nonce is the key's token: unlike etcd's modified index it
survives the refresh of a lease, and it tells a write whose answer was lost (python-etcd then reports a false
`EtcdAlreadyExist` or `EtcdCompareFailed`) from one that somebody else won.
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
from typing import Any, TypeVar
from urllib.parse import quote

import etcd
import urllib3

from tenplexrun.channel import join_host_port, split_host_port
from tenplexrun.errors import CompareFailedError, CoordinationError
from tenplexrun.ports import KeyValue

ROOT = "/tenplexrun/"
REQUEST_TIMEOUT_S = 2.0
GIVE_UP_S = 6.0  # several servers, or one that restarts, get that long
WATCH_TIMEOUT_S = 5.0  # a watch can't be cancelled, and a quiet one goes stale
RETRY_PAUSE_S = 0.1
RAFT_ERRORS = (300, 301)  # an internal raft error (a time-out), an election in progress

T = TypeVar("T")


class EtcdV2:
    """Implements `tenplexrun.ports.Coordination`. `endpoints` are "host:port" of the cluster's servers.

    `options` go to `etcd.Client`: protocol, username, password, ca_cert, cert.
    """

    def __init__(self, endpoints: Sequence[str], **options: Any) -> None:
        self._endpoints, self._options = tuple(endpoints), options
        self._servers = Servers(endpoints, REQUEST_TIMEOUT_S, options)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="etcd")
        self._stop = threading.Event()  # ends the threads of watches and leases

    async def get(self, key: str) -> KeyValue | None:
        return await self._run(lambda client: _get(client, key))

    async def put(self, key: str, value: str) -> KeyValue:
        new = _new(key, value)
        await self._run(lambda client: client.write(ROOT + key, _stored(new)))
        return new

    async def create(self, key: str, value: str) -> KeyValue:
        new = _new(key, value)
        await self._run(lambda client: _create(client, new, None))
        return new

    async def swap(self, key: str, value: str, token: str) -> KeyValue:
        new = _new(key, value)
        await self._run(lambda client: _swap(client, new, token))
        return new

    async def delete(self, key: str, token: str | None = None) -> None:
        await self._run(lambda client: _delete(client, key, token))

    async def delete_folder(self, prefix: str) -> None:
        await self._run(lambda client: _delete_folder(client, prefix))

    async def list(self, prefix: str) -> Mapping[str, KeyValue]:
        return (await self._run(lambda client: _tree(client, prefix)))[0]

    async def hold(self, key: str, value: str, ttl_s: float) -> EtcdLease:
        """As in the port. etcd counts whole seconds: `ttl_s` is rounded up."""
        new, ttl_s = _new(key, value), max(1, math.ceil(ttl_s))
        await self._run(lambda client: _create(client, new, ttl_s))
        servers = Servers(self._endpoints, max(0.5, ttl_s / 4), self._options)
        lease = EtcdLease(self, new)
        threading.Thread(target=lease.refresh, args=(servers, ttl_s), name=f"lease {key}", daemon=True).start()
        return lease

    async def watch(self, prefix: str) -> AsyncIterator[Mapping[str, KeyValue]]:
        loop, changed, stop = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        latest: list[Mapping[str, KeyValue]] = [{}]

        def deliver(content: Mapping[str, KeyValue]) -> None:
            latest[0] = content
            with contextlib.suppress(RuntimeError):  # the loop has gone, and with it whoever watched
                loop.call_soon_threadsafe(changed.set)

        def stopped() -> bool:
            return stop.is_set() or self._stop.is_set()

        servers = Servers(self._endpoints, REQUEST_TIMEOUT_S, self._options)
        arguments = (servers, prefix, deliver, stopped)
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

    def delete_urls(self, key: str) -> Sequence[str]:
        """URLs at any of which a plain HTTP DELETE removes the key (what the guardian does for a dead agent)."""
        login = ""
        if self._options.get("username"):
            name, password = self._options["username"], self._options.get("password", "")
            login = f"{quote(name, safe='')}:{quote(password, safe='')}@"
        protocol = self._options.get("protocol", "http")
        return [f"{protocol}://{login}{endpoint}/v2/keys{ROOT}{quote(key)}" for endpoint in self._endpoints]

    async def _run(self, operation: Callable[[etcd.Client], T]) -> T:
        call = self._servers.call
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(operation, GIVE_UP_S))


class EtcdLease:
    """Implements `tenplexrun.ports.Lease`."""

    def __init__(self, coordination: EtcdV2, held: KeyValue) -> None:
        self.lost = asyncio.Event()
        self._coordination, self._held = coordination, held
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()

    @property
    def key(self) -> str:
        return self._held.key

    async def release(self) -> None:
        self._stop.set()
        with contextlib.suppress(CompareFailedError):  # lost already, and somebody else's by now
            await self._coordination.delete(self.key, self._held.token)

    def abandon(self) -> None:
        """Stop refreshing and let it expire, as a holder that died would."""
        self._stop.set()

    def refresh(self, servers: Servers, ttl_s: int) -> None:
        """The lease's own thread. A loop or an executor that is blocked must not lose a lease."""
        stopped, pause_s = self._coordination._stop, ttl_s / 3
        while not self._stop.wait(pause_s) and not stopped.is_set():
            pause_s = ttl_s / 3
            try:
                # Only if it is still ours: the key of another holder must not be kept alive by us.
                servers.call(
                    lambda client: client.write(
                        ROOT + self.key, None, ttl=ttl_s, refresh=True, prevValue=_stored(self._held)
                    )
                )
            except (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed):
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self.lost.set)
                return
            except CoordinationError:
                pause_s = RETRY_PAUSE_S  # only the store itself may say that the lease is lost


class Servers:
    """Clients of a cluster's servers, one tried after the other. Thread-safe.

    python-etcd's own list of servers only ever shrinks when it may not ask the cluster for its members' addresses.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float, options: Mapping[str, Any]) -> None:
        self._names = ", ".join(endpoints)
        self._clients = [_client(endpoint, timeout_s, options) for endpoint in endpoints]
        self._current = 0

    def call(self, operation: Callable[[etcd.Client], T], give_up_s: float = 0.0) -> T:
        """Run it, again while servers can't be reached. Raises CoordinationError when that lasts, or they refuse."""
        end = time.monotonic() + give_up_s
        while True:
            current = self._current
            try:
                return operation(self._clients[current])
            except (etcd.EtcdWatchTimedOut, etcd.EtcdEventIndexCleared, etcd.EtcdWatcherCleared):
                raise
            except (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist):
                raise
            except etcd.EtcdException as error:
                if not _may_pass(error):
                    raise CoordinationError(self._explain(error)) from error
                self._current = (current + 1) % len(self._clients)
                if time.monotonic() >= end:
                    raise CoordinationError(self._explain(error)) from error
            time.sleep(RETRY_PAUSE_S)

    def _explain(self, error: etcd.EtcdException) -> str:
        if "404 page not found" in str(error):
            return f"the etcd at {self._names} does not serve the v2 API; start it with --enable-v2 (etcd before 3.6)"
        if isinstance(error, etcd.EtcdInsufficientPermissions):
            return f"the etcd at {self._names} refuses this user; check user name, password and role: {error}"
        if _may_pass(error):
            return f"cannot reach etcd at {self._names}; is it running, and reachable from here?"
        return f"the etcd at {self._names} refuses: {error}"


def _may_pass(error: etcd.EtcdException) -> bool:
    if isinstance(error, (etcd.EtcdConnectionFailed, etcd.EtcdClusterIdChanged)):
        return True
    return isinstance(error.payload, dict) and error.payload.get("errorCode") in RAFT_ERRORS


def _client(endpoint: str, timeout_s: float, options: Mapping[str, Any]) -> etcd.Client:
    host, port = split_host_port(endpoint)
    host = join_host_port(host, port).rpartition(":")[0]  # IPv6 in brackets
    client = etcd.Client(host, port, read_timeout=timeout_s, **options)
    # Or a frozen server costs four time-outs, and requests that "failed" are carried out later.
    client.http.connection_pool_kw["retries"] = urllib3.Retry(0)
    return client


def _new(key: str, value: str) -> KeyValue:
    return KeyValue(key, value, uuid.uuid4().hex)


def _stored(item: KeyValue) -> str:
    return f"{item.token} {item.value}"


def _parsed(key: str, stored: str) -> KeyValue:
    token, _, value = stored.partition(" ")
    return KeyValue(key, value, token)


def _read(client: etcd.Client, key: str) -> tuple[KeyValue | None, int]:
    """The key and its modified index. Quorum reads: a follower may be behind."""
    try:
        node = client.read(ROOT + key, quorum=True)
    except etcd.EtcdKeyNotFound:
        return None, 0
    return (None, 0) if node.dir else (_parsed(key, node.value), node.modifiedIndex)


def _get(client: etcd.Client, key: str) -> KeyValue | None:
    return _read(client, key)[0]


def _tree(client: etcd.Client, prefix: str) -> tuple[Mapping[str, KeyValue], int]:
    """All keys below the prefix, and etcd's index when it was read."""
    try:
        result = client.read(ROOT + prefix, recursive=True, sorted=True, quorum=True)
    except etcd.EtcdKeyNotFound as error:
        return {}, int(error.payload["index"])
    names = {leaf.key.removeprefix(ROOT): leaf.value for leaf in result.leaves if not leaf.dir}
    return {name: _parsed(name, value) for name, value in names.items()}, result.etcd_index


def _create(client: etcd.Client, new: KeyValue, ttl_s: int | None) -> None:
    try:
        client.write(ROOT + new.key, _stored(new), ttl=ttl_s, prevExist=False)
    except etcd.EtcdAlreadyExist:
        current = _get(client, new.key)
        if current is None:  # expired meanwhile
            _create(client, new, ttl_s)
        elif current.token != new.token:
            raise CompareFailedError(f"the key {new.key} exists already") from None


def _swap(client: etcd.Client, new: KeyValue, token: str) -> None:
    while True:
        current, index = _read(client, new.key)
        if current is not None and current.token == new.token:
            return  # it was written by an earlier attempt whose answer was lost
        if current is None or current.token != token:
            raise CompareFailedError(f"somebody else has changed the key {new.key} first")
        with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):  # look again why
            client.write(ROOT + new.key, _stored(new), prevIndex=index)
            return


def _delete(client: etcd.Client, key: str, token: str | None) -> None:
    with contextlib.suppress(etcd.EtcdKeyNotFound):
        if token is None:
            client.delete(ROOT + key)
            return
        while True:
            current, index = _read(client, key)
            if current is None:
                return
            if current.token != token:
                raise CompareFailedError(f"somebody else has changed the key {key} first")
            with contextlib.suppress(etcd.EtcdCompareFailed):  # for example a refreshed lease
                client.delete(ROOT + key, prevIndex=index)
                return


def _delete_folder(client: etcd.Client, prefix: str) -> None:
    with contextlib.suppress(etcd.EtcdKeyNotFound):
        client.delete(ROOT + prefix, recursive=True)


def _watch(
    servers: Servers,
    prefix: str,
    deliver: Callable[[Mapping[str, KeyValue]], None],
    stopped: Callable[[], bool],
) -> None:
    """The watch's own thread: read all, then wait for any change after that. An event only says "look again":
    so bursts merge, and a history that was cleared, an outage or a replaced store needs no special case."""
    seen: Mapping[str, KeyValue] | None = None
    while not stopped():
        try:
            content, index = servers.call(lambda client: _tree(client, prefix))
            if content != seen:
                seen = content
                deliver(content)
            wait = {"wait": True, "waitIndex": index + 1, "recursive": True, "timeout": WATCH_TIMEOUT_S}
            servers.call(lambda client, wait=wait: client.read(ROOT + prefix, **wait))  # type: ignore[misc]
        except etcd.EtcdException:
            pass  # timed out, or the history was cleared
        except CoordinationError:
            time.sleep(RETRY_PAUSE_S)
