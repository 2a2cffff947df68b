"""etcd's v2 API, through `python-etcd`. All keys lie below the folder `/tenplexrun`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import etcd
import urllib3

from tenplexrun.agent import etcd as shared
from tenplexrun.agent.etcd import (
    NO_TRUST,
    PLAIN,
    ROOT,
    Access,
    Content,
    Deliver,
    Etcd,
    Grant,
    Unavailable,
    parsed,
    stored,
)
from tenplexrun.channel import join_host_port, split_host_port
from tenplexrun.errors import CompareFailedError, CoordinationError
from tenplexrun.ports import KeyValue

RAFT_ERRORS = (300, 301)  # an internal raft error (a time-out), an election in progress


class EtcdV2(Etcd):
    """Implements `tenplexrun.ports.Coordination`."""

    def __init__(self, endpoints: Sequence[str], access: Access = PLAIN) -> None:
        super().__init__(endpoints, lambda endpoint, timeout_s: V2Server(endpoint, timeout_s, access))


class V2Server:
    """Implements `Server`.

    python-etcd's own list of servers only ever shrinks when it may not ask the cluster for its members' addresses.
    """

    def __init__(self, endpoint: str, timeout_s: float, access: Access) -> None:
        self._endpoint, self._access = endpoint, access
        self._client = _client(endpoint, timeout_s, access)

    def get(self, key: str) -> KeyValue | None:
        with _translated():
            return self._read(key)[0]

    def put(self, new: KeyValue) -> None:
        with _translated():
            self._client.write(ROOT + new.key, stored(new))

    def create(self, new: KeyValue) -> None:
        with _translated():
            self._create(new, None)

    def swap(self, new: KeyValue, token: str) -> None:
        with _translated():
            while True:
                current, index = self._read(new.key)
                if current is not None and current.token == new.token:
                    return  # it was written by an earlier attempt whose answer was lost
                if current is None or current.token != token:
                    raise CompareFailedError(f"somebody else has changed the key {new.key} first")
                with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):  # look again why
                    self._client.write(ROOT + new.key, stored(new), prevIndex=index)
                    return

    def delete(self, key: str, token: str | None) -> None:
        with _translated(), contextlib.suppress(etcd.EtcdKeyNotFound):
            if token is None:
                self._client.delete(ROOT + key)
                return
            while True:
                current, index = self._read(key)
                if current is None:
                    return
                if current.token != token:
                    raise CompareFailedError(f"somebody else has changed the key {key} first")
                with contextlib.suppress(etcd.EtcdCompareFailed):  # for example a refreshed lease
                    self._client.delete(ROOT + key, prevIndex=index)
                    return

    def delete_folder(self, prefix: str) -> None:
        with _translated(), contextlib.suppress(etcd.EtcdKeyNotFound):
            self._client.delete(ROOT + prefix, recursive=True)

    def list(self, prefix: str) -> Content:
        with _translated():
            return self._tree(prefix)[0]

    def hold(self, new: KeyValue, ttl_s: int) -> Grant:
        with _translated():
            self._create(new, ttl_s)
        return Grant(new, "", ttl_s)

    def refresh(self, grant: Grant) -> bool:
        """Only if it is still ours: the key of another holder must not be kept alive by us."""
        key, mine = ROOT + grant.held.key, stored(grant.held)
        with _translated():
            try:
                self._client.write(key, None, ttl=int(grant.ttl_s), refresh=True, prevValue=mine)
                return True
            except (etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed):
                return False

    def release(self, grant: Grant) -> None:
        self.delete(grant.held.key, grant.held.token)

    def follow(self, prefix: str, deliver: Deliver) -> None:
        """An event only says "look again": the history is short and counts the refreshes of all keys, so that a watch
        that is not re-armed from a fresh index goes stale, and is told so ("cleared")."""
        with _translated():
            content, index = self._tree(prefix)
            wait = {"wait": True, "waitIndex": index + 1, "recursive": True, "timeout": shared.WATCH_TIMEOUT_S}
            while deliver(content):
                try:
                    self._client.read(ROOT + prefix, **wait)
                    return
                except etcd.EtcdWatchTimedOut:  # quiet; but a server that is cut off from the others is so, too
                    self._read("quorum")
                except (etcd.EtcdEventIndexCleared, etcd.EtcdWatcherCleared, etcd.EtcdKeyNotFound):
                    return

    def removal(self, key: str) -> dict[str, Any]:
        user, password = self._access.user, self._access.password
        headers = {} if user is None else urllib3.make_headers(basic_auth=_latin(f"{user}:{password}"))
        return self._access.removal(self._endpoint, [["DELETE", f"/v2/keys{ROOT}{quote(key)}", headers, ""]])

    def _read(self, key: str) -> tuple[KeyValue | None, int]:
        """The key and its modified index. Quorum reads: a follower may be behind."""
        try:
            node = self._client.read(ROOT + key, quorum=True)
        except etcd.EtcdKeyNotFound:
            return None, 0
        return (None, 0) if node.dir else (parsed(key, node.value), node.modifiedIndex)

    def _tree(self, prefix: str) -> tuple[Content, int]:
        """All keys below the prefix, and etcd's index when it was read."""
        try:
            result = self._client.read(ROOT + prefix, recursive=True, sorted=True, quorum=True)
        except etcd.EtcdKeyNotFound as error:
            return {}, int(error.payload["index"])
        names = {leaf.key.removeprefix(ROOT): leaf.value for leaf in result.leaves if not leaf.dir}
        return {name: parsed(name, value) for name, value in names.items()}, result.etcd_index

    def _create(self, new: KeyValue, ttl_s: int | None) -> None:
        while True:
            try:
                self._client.write(ROOT + new.key, stored(new), ttl=ttl_s, prevExist=False)
                return
            except etcd.EtcdAlreadyExist:
                current = self._read(new.key)[0]
            if current is not None and current.token == new.token:
                return  # an earlier attempt, whose answer was lost
            if current is not None:  # else it has expired meanwhile
                raise CompareFailedError(f"the key {new.key} exists already") from None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """python-etcd's errors as the port's. The message of a CoordinationError goes on from "the etcd at ... "."""
    try:
        yield
    except etcd.EtcdException as error:
        code = error.payload.get("errorCode") if isinstance(error.payload, dict) else None
        if "SSLError" in str(error):
            raise CoordinationError(f"{NO_TRUST}: {error}") from None
        if isinstance(error, (etcd.EtcdConnectionFailed, etcd.EtcdClusterIdChanged)):
            raise Unavailable from error
        if code in RAFT_ERRORS:
            raise Unavailable(str(error)) from error
        if "404 page not found" in str(error):
            raise CoordinationError(
                "does not serve the v2 API; use --rdzv-backend etcd-v3, or start it with --enable-v2 (before 3.6)"
            ) from error
        if isinstance(error, etcd.EtcdInsufficientPermissions):
            raise CoordinationError(f"refuses this user; check user name, password and role: {error}") from error
        raise CoordinationError(f"refuses: {error}") from error


def _latin(text: str | None) -> str | None:
    """urllib3 encodes logins as Latin-1, etcd reads UTF-8."""
    return text and text.encode().decode("latin-1")


def _client(endpoint: str, timeout_s: float, access: Access) -> etcd.Client:
    host, port = split_host_port(endpoint)
    host = join_host_port(host, port).rpartition(":")[0]  # IPv6 in brackets
    client = etcd.Client(
        host,
        port,
        read_timeout=timeout_s,
        protocol=access.scheme,
        ca_cert=access.ca_cert,
        cert=(access.cert, access.key) if access.cert else None,
        username=_latin(access.user),
        password=_latin(access.password),
    )
    # Or a frozen server costs four time-outs, and requests that "failed" are carried out later.
    client.http.connection_pool_kw["retries"] = urllib3.Retry(0)
    return client
