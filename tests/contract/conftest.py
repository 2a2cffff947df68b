from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_servers import EtcdServer, scratch

sys.path.insert(0, str(Path(__file__).parent))

from stores import KINDS, Store


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with request.param() as store:
        yield store


@pytest.fixture(params=["v2", "v3"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def own_etcd(api: str) -> Iterator[EtcdServer]:
    """One that the test may mistreat."""
    with scratch() as directory:
        server = EtcdServer(directory, v2=api == "v2")
        server.start()
        yield server
        server.kill()
