"""The stores that the contract is run against. A kind is a context manager that serves one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from etcd_servers import EtcdCluster, EtcdServer, scratch

from tenplexrun.agent.embedded import Binary, _version
from tenplexrun.agent.etcd_v2 import EtcdV2
from tenplexrun.agent.etcd_v3 import EtcdV3
from tenplexrun.agent.memory import MemoryCoordination, MemoryStore
from tenplexrun.ports import Coordination


@dataclass(frozen=True)
class Store:
    """`connect` makes a client; `die` lets the holder of a lease fall silent."""

    connect: Callable[[], Coordination]
    die: Callable[[Any], None]

    def folder(self) -> str:
        return uuid.uuid4().hex


def adapter(api: str) -> type[EtcdV2] | type[EtcdV3]:
    return EtcdV2 if api == "v2" else EtcdV3


def _of(api: str, endpoints: Sequence[str]) -> Store:
    return Store(lambda: adapter(api)(endpoints), lambda lease: lease.abandon())


@contextlib.contextmanager
def memory() -> Iterator[Store]:
    shared = MemoryStore()
    yield Store(lambda: MemoryCoordination(shared), lambda lease: shared.expire(lease.key))


def single(api: str, v2: bool, debian: bool = False) -> Callable[[], contextlib.AbstractContextManager[Store]]:
    @contextlib.contextmanager
    def serve() -> Iterator[Store]:
        binary = _debians() if debian else None
        with scratch() as directory:
            server = EtcdServer(directory, v2, binary=binary)
            server.start()
            yield _of(api, [server.endpoint])
            server.kill()

    return serve


def cluster(api: str) -> Callable[[], contextlib.AbstractContextManager[Store]]:
    @contextlib.contextmanager
    def serve() -> Iterator[Store]:
        with scratch() as directory:
            servers = EtcdCluster(directory)
            yield _of(api, servers.endpoints)
            servers.kill()

    return serve


def _debians() -> Binary:
    path = shutil.which("etcd")
    version = (0, 0, 0) if path is None else asyncio.run(_version(path))
    if path is None or version[:2] != (3, 4):
        pytest.skip("no etcd 3.4 on PATH (Debian: apt-get install etcd-server)")
    return Binary(path, version)


KINDS = [
    pytest.param(memory, id="memory"),
    pytest.param(single("v2", v2=True), id="v2"),
    pytest.param(single("v3", v2=False), id="v3"),
    pytest.param(single("v3", v2=True), id="v3-beside-v2", marks=pytest.mark.slow),
    pytest.param(single("v2", v2=True, debian=True), id="v2-of-3.4", marks=pytest.mark.slow),
    pytest.param(single("v3", v2=False, debian=True), id="v3-of-3.4", marks=pytest.mark.slow),
    pytest.param(cluster("v2"), id="v2-of-three", marks=pytest.mark.slow),
    pytest.param(cluster("v3"), id="v3-of-three", marks=pytest.mark.slow),
]
