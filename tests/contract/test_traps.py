"""Each trap of etcd and its clients that has bitten somebody, for both APIs."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import uuid
from collections.abc import Awaitable, Iterator
from typing import Any

import etcd
import pytest
import urllib3
from etcd_servers import EtcdCluster, EtcdServer, scratch
from stores import adapter
from test_coordination import until, values

from tenplexrun.agent import etcd as shared
from tenplexrun.agent.etcd import ROOT
from tenplexrun.agent.etcd_v2 import EtcdV2, V2Server
from tenplexrun.agent.etcd_v3 import EtcdV3, V3Server
from tenplexrun.agent.guardian import remove_key
from tenplexrun.agent.probing import served_api
from tenplexrun.errors import CompareFailedError, CoordinationError

DEADLINE_S = 60.0


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE_S))  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def both_apis() -> Iterator[EtcdServer]:
    """One that all share, and that is only read and written."""
    with scratch() as directory:
        server = EtcdServer(directory)
        server.start()
        yield server
        server.kill()


def test_an_outage_is_waited_out(own_etcd: EtcdServer, api: str) -> None:
    """A watch that hangs silently after a restart of the server is the known sin of etcd3gw."""

    async def test() -> None:
        client = adapter(api)([own_etcd.endpoint])
        watch = client.watch("w")
        lease = await client.hold("members/n", "me", 60)
        assert await anext(watch) == {}
        own_etcd.kill()
        pending = asyncio.ensure_future(client.put("w/k", "written when it is back"))
        await asyncio.sleep(1.2)
        assert client.connected_s == 0
        own_etcd.start()
        await pending
        await until(watch, {"w/k": "written when it is back"})
        assert client.connected_s > 0
        assert not lease.lost.is_set()
        await lease.release()
        await client.close()

    run(test())


def test_unreachable_in_bounded_time(own_etcd: EtcdServer, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "GIVE_UP_S", 1.0)
    monkeypatch.setattr(shared, "REQUEST_TIMEOUT_S", 0.5)

    async def test() -> None:
        client = adapter(api)([own_etcd.endpoint])
        own_etcd.signal(signal.SIGSTOP)
        with pytest.raises(CoordinationError, match="cannot reach etcd"):
            await client.get("k")
        own_etcd.signal(signal.SIGCONT)
        assert await client.get("k") is None
        own_etcd.kill()
        with pytest.raises(CoordinationError, match="cannot reach etcd"):
            await client.create("k", "v")
        assert not await served_api([own_etcd.endpoint])
        await client.close()

    run(test())


def test_a_frozen_server_is_noticed_by_a_quiet_watch(
    own_etcd: EtcdServer, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing closes the connection: only time tells."""
    monkeypatch.setattr(shared, "WATCH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(shared, "REQUEST_TIMEOUT_S", 0.5)

    async def test() -> None:
        client = adapter(api)([own_etcd.endpoint])
        watch = client.watch("w")
        await anext(watch)
        own_etcd.signal(signal.SIGSTOP)
        while client.connected_s > 0:
            await asyncio.sleep(0.05)
        own_etcd.signal(signal.SIGCONT)
        await client.put("w/k", "v")
        await until(watch, {"w/k": "v"})
        await client.close()

    run(test())


def test_an_etcd_that_comes_back_empty(own_etcd: EtcdServer, api: str) -> None:
    """Its counters begin anew: no token of before may fit, no watch may wait for a number that is far away."""

    async def test() -> None:
        client = adapter(api)([own_etcd.endpoint])
        for number in range(20):
            old = await client.put("w/k", str(number))
        watch = client.watch("w")
        await until(watch, {"w/k": "19"})
        own_etcd.kill()
        own_etcd.empty()
        own_etcd.start()
        await until(watch, {})
        for _ in range(20):
            assert (await client.put("w/k", "19")).token != old.token
        with pytest.raises(CompareFailedError):
            await client.swap("w/k", "late", old.token)
        await until(watch, {"w/k": "19"})
        await client.close()

    run(test())


def test_a_lease_that_an_empty_etcd_does_not_know_is_lost(own_etcd: EtcdServer, api: str) -> None:
    async def test() -> None:
        client = adapter(api)([own_etcd.endpoint])
        lease = await client.hold("members/n", "me", 1)
        own_etcd.kill()
        own_etcd.empty()
        own_etcd.start()
        await lease.lost.wait()
        await lease.release()
        await client.close()

    run(test())


def test_another_server_is_tried(both_apis: EtcdServer, api: str) -> None:
    async def test() -> None:
        client, key = adapter(api)(["127.0.0.1:1", both_apis.endpoint, "127.0.0.1:2"]), uuid.uuid4().hex
        for number in range(5):
            await client.put(key, str(number))
        lease = await client.hold(f"{key}-leased", "me", 1)
        watch = client.watch(key)
        assert values(await anext(watch)) == {key: "4"}
        await lease.release()
        await client.close()

    run(test())


def test_a_blocked_loop_does_not_lose_a_lease(both_apis: EtcdServer, api: str) -> None:
    async def test() -> None:
        client, key = adapter(api)([both_apis.endpoint]), uuid.uuid4().hex
        watches = [client.watch(f"{key}/{n}") for n in range(8)]
        for watch in watches:
            await anext(watch)
        lease = await client.hold(key, "me", 2)
        time.sleep(3)
        assert await client.get(key) is not None
        assert not lease.lost.is_set()
        await lease.release()
        await client.close()

    run(test())


def test_the_guardian_can_remove_a_key(both_apis: EtcdServer, api: str) -> None:
    async def test() -> None:
        client, key = adapter(api)(["127.0.0.1:1", both_apis.endpoint]), f"{uuid.uuid4().hex}/a b/ü"
        await client.put(key, "v")
        assert await asyncio.to_thread(remove_key, json.loads(json.dumps(client.removals(key))))
        assert await client.get(key) is None
        assert not await asyncio.to_thread(remove_key, client.removals(key)[:1])
        await client.close()

    run(test())


def test_the_two_apis_do_not_see_each_other(both_apis: EtcdServer) -> None:
    """Which is why all nodes of a job have to find out the same."""

    async def test() -> None:
        two, three, key = EtcdV2([both_apis.endpoint]), EtcdV3([both_apis.endpoint]), uuid.uuid4().hex
        await two.put(key, "v")
        assert await three.get(key) is None
        await two.close()
        await three.close()

    run(test())


def test_a_lost_answer_is_recognised_v2(both_apis: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is carried out, its answer is lost, and the second one is told "exists already"."""
    lose = {"create": 1, "swap": 1}
    original = etcd.Client.write

    def write(self: etcd.Client, key: str, *args: Any, **kwargs: Any) -> Any:
        result = original(self, key, *args, **kwargs)
        kind = "create" if kwargs.get("prevExist") is False else "swap"
        if lose[kind]:
            lose[kind] -= 1
            raise etcd.EtcdConnectionFailed("answer lost")
        return result

    monkeypatch.setattr(etcd.Client, "write", write)
    run(_create_and_swap(EtcdV2([both_apis.endpoint])))
    assert lose == {"create": 0, "swap": 0}


def test_a_lost_answer_is_recognised_v3(both_apis: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lose, original = {"kv/txn": 4}, V3Server.call

    def call(self: V3Server, path: str, body: Any) -> Any:
        answer = original(self, path, body)
        if lose.get(path, 0):
            lose[path] -= 1
            if lose[path] % 2:  # each first try
                raise shared.Unavailable
        return answer

    async def test() -> None:
        client, key = EtcdV3([both_apis.endpoint]), uuid.uuid4().hex
        await _create_and_swap(client)
        assert lose == {"kv/txn": 0}
        lose["kv/txn"] = 2
        client = EtcdV3([both_apis.endpoint])
        lease = await client.hold(key, "me", 2)
        await asyncio.sleep(3)  # the first try's lease has to be the one that is refreshed
        assert await client.get(key) is not None
        await lease.release()
        assert await client.get(key) is None
        await client.close()

    monkeypatch.setattr(V3Server, "call", call)
    run(test())


async def _create_and_swap(client: EtcdV2 | EtcdV3) -> None:
    key = uuid.uuid4().hex
    created = await client.create(key, "1")
    swapped = await client.swap(key, "2", created.token)
    assert await client.get(key) == swapped
    await client.close()


def test_a_watch_survives_a_cleared_history_v2(both_apis: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 1,000 events pass elsewhere while a watch is between two requests."""
    monkeypatch.setattr(shared, "WATCH_TIMEOUT_S", 0.5)
    gate = {"pass": True, "cleared": False}
    original, read = V2Server._tree, etcd.Client.read

    def spying_read(self: etcd.Client, key: str, **options: Any) -> Any:
        try:
            return read(self, key, **options)
        except etcd.EtcdEventIndexCleared:
            gate["cleared"] = True
            raise

    def tree(self: V2Server, prefix: str) -> Any:
        result = original(self, prefix)
        while not gate["pass"]:
            time.sleep(0.01)
        return result

    monkeypatch.setattr(V2Server, "_tree", tree)
    monkeypatch.setattr(etcd.Client, "read", spying_read)

    async def test() -> None:
        client, folder = EtcdV2([both_apis.endpoint]), uuid.uuid4().hex
        watch = client.watch(folder)
        assert await anext(watch) == {}
        gate["pass"] = False
        await client.put(f"{folder}/k", "before")  # wakes the watch, which then stands at the gate
        await asyncio.sleep(0.6)
        host, _, port = both_apis.endpoint.rpartition(":")
        raw = etcd.Client(host, int(port))
        await asyncio.to_thread(lambda: [raw.write(f"/other/{folder}", str(n)) for n in range(1100)])
        await client.put(f"{folder}/k", "after")
        gate["pass"] = True
        await until(watch, {f"{folder}/k": "after"})
        assert gate["cleared"]
        await client.close()

    run(test())


def test_a_watch_survives_a_compaction_v3(both_apis: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have to see first is gone when it begins."""
    gate = {"pass": True, "cancelled": 0}
    stream = V3Server._stream

    def spying_stream(self: V3Server, path: str, body: Any) -> Iterator[Any]:
        while not gate["pass"]:
            time.sleep(0.01)
        for message in stream(self, path, body):
            gate["cancelled"] += "compact_revision" in message
            yield message

    monkeypatch.setattr(shared, "WATCH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(V3Server, "_stream", spying_stream)

    async def test() -> None:
        client, folder = EtcdV3([both_apis.endpoint]), uuid.uuid4().hex
        watch = client.watch(folder)
        assert await anext(watch) == {}
        gate["pass"] = False
        await asyncio.sleep(0.7)  # quiet: it begins again where it was, and stands at the gate
        for number in range(5):
            await client.put(f"{folder}/k", str(number))
        url = f"http://{both_apis.endpoint}/v3/kv/"
        answer = await asyncio.to_thread(urllib3.request, "POST", f"{url}range", json={"key": "eA=="})
        body = {"revision": answer.json()["header"]["revision"]}
        assert (await asyncio.to_thread(urllib3.request, "POST", f"{url}compaction", json=body)).status == 200
        gate["pass"] = True
        await until(watch, {f"{folder}/k": "4"})
        assert gate["cancelled"]
        await client.close()

    run(test())


def test_keys_lie_below_one_folder(both_apis: EtcdServer) -> None:
    async def test() -> None:
        client, key = EtcdV2([both_apis.endpoint]), uuid.uuid4().hex
        await client.put(key, "v")
        url = f"http://{both_apis.endpoint}/v2/keys{ROOT}{key}"
        answer = await asyncio.to_thread(urllib3.request, "GET", url)
        assert answer.json()["node"]["value"].endswith(" v")
        await client.close()

    run(test())


@pytest.mark.slow
def test_a_cluster_that_loses_its_leader(api: str) -> None:
    """No lease is lost, no watch goes blind, and what is asked meanwhile is answered after the election."""

    async def test(servers: EtcdCluster) -> None:
        client, other = adapter(api)(servers.endpoints), adapter(api)(servers.endpoints[::-1])
        lease, watch = await client.hold("members/n", "me", 5), other.watch("w")
        await anext(watch)
        leader = await asyncio.to_thread(servers.leader)
        leader.kill()
        for number in range(3):
            await client.put("w/k", str(number))
        await until(watch, {"w/k": "2"})
        await asyncio.sleep(8)
        assert not lease.lost.is_set()
        assert await other.get("members/n") is not None
        leader.start()
        await asyncio.to_thread(servers.leader)
        await client.put("w/k", "3")
        await until(watch, {"w/k": "3"})
        await lease.release()
        await client.close()
        await other.close()

    with scratch() as directory:
        servers = EtcdCluster(directory, v2=api == "v2")
        try:
            run(test(servers))
        finally:
            servers.kill()


@pytest.mark.slow
def test_a_server_without_a_majority_is_left(api: str) -> None:
    """It still listens, and a watch there would stay quiet for ever."""

    async def test(servers: EtcdCluster) -> None:
        cut_off, *others = servers.servers
        for server in others:
            server.signal(signal.SIGSTOP)
        client = adapter(api)([cut_off.endpoint])
        with pytest.raises(CoordinationError, match=r"cannot answer|cannot reach"):
            await client.get("k")
        watch = client.watch("w")
        for server in others:
            server.signal(signal.SIGCONT)
        assert await anext(watch) == {}
        await client.put("w/k", "v")
        await until(watch, {"w/k": "v"})
        await client.close()

    with scratch() as directory:
        servers = EtcdCluster(directory, v2=api == "v2")
        try:
            run(test(servers))
        finally:
            servers.kill()
