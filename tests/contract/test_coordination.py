"""What every adapter of the Coordination port does, and what each trap of etcd's v2 API must not do to us."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import etcd
import pytest

from tenplexrun.agent import etcd_v2
from tenplexrun.agent.embedded import reachable
from tenplexrun.agent.etcd_v2 import ROOT, EtcdV2
from tenplexrun.agent.memory import MemoryCoordination, MemoryStore
from tenplexrun.errors import CompareFailedError, CoordinationError
from tenplexrun.ports import Coordination, KeyValue

DEADLINE_S = 30.0
Test = Callable[[Coordination, Coordination, str, Callable[[Any], None]], Awaitable[None]]


@pytest.fixture(params=["memory", "etcd_v2"])
def check(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    """Runs a test with two clients of one store, a folder of its own, and what lets a lease's holder die."""

    def memory(test: Test) -> Awaitable[None]:
        store = MemoryStore()
        return test(
            MemoryCoordination(store), MemoryCoordination(store), "folder", lambda lease: store.expire(lease.key)
        )

    endpoint = request.getfixturevalue("etcd_server").endpoint if request.param == "etcd_v2" else ""

    async def etcd_v2_(test: Test) -> None:
        one, two = EtcdV2([endpoint]), EtcdV2([endpoint])
        try:
            await test(one, two, uuid.uuid4().hex, lambda lease: lease.abandon())
        finally:
            await one.close()
            await two.close()

    adapter = memory if request.param == "memory" else etcd_v2_

    async def bounded(test: Test) -> None:
        await asyncio.wait_for(adapter(test), DEADLINE_S)

    return lambda test: asyncio.run(bounded(test))


def values(content: Mapping[str, KeyValue]) -> dict[str, str]:
    return {key: item.value for key, item in content.items()}


async def until(watch: AsyncIterator[Mapping[str, KeyValue]], wanted: dict[str, str]) -> None:
    async for content in watch:
        if values(content) == wanted:
            return


def test_put_get_delete(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        key = f"{folder}/a key"
        assert await one.get(key) is None
        value = 'ünïcode "quotes" &=%+ \n line ' + "x" * 100_000
        written = await one.put(key, value)
        assert await two.get(key) == written == KeyValue(key, value, written.token)
        await two.put(key, "")
        assert (await one.get(key) or written).value == ""
        await one.delete(key)
        assert await two.get(key) is None
        await one.delete(key)

    check(test)


def test_create_only_once(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        created = await one.create(f"{folder}/k", "1")
        with pytest.raises(CompareFailedError, match="exists already"):
            await two.create(f"{folder}/k", "2")
        assert await two.get(f"{folder}/k") == created

    check(test)


def test_swap_needs_the_token_and_tokens_never_return(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        key = f"{folder}/k"
        with pytest.raises(CompareFailedError):
            await one.swap(key, "v", "no such token")
        first = await one.put(key, "same")
        second = await two.swap(key, "same", first.token)
        assert second.token != first.token
        with pytest.raises(CompareFailedError):
            await one.swap(key, "late", first.token)
        with pytest.raises(CompareFailedError):
            await one.delete(key, first.token)
        await one.delete(key, second.token)
        recreated = await one.create(key, "same")
        assert recreated.token not in (first.token, second.token)

    check(test)


def test_one_of_many_swaps_wins(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        key = f"{folder}/k"
        token = (await one.put(key, "start")).token
        tries = [client.swap(key, str(n), token) for n in range(8) for client in (one, two)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        winners = [result for result in results if isinstance(result, KeyValue)]
        assert len(winners) == 1
        assert all(isinstance(result, (KeyValue, CompareFailedError)) for result in results)
        assert await one.get(key) == winners[0]

    check(test)


def test_list_is_recursive_and_bounded_by_the_folder(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        assert await one.list(folder) == {}
        for name in ("a/x", "a/deep/y", "ab/z"):
            await one.put(f"{folder}/{name}", name)
        assert values(await two.list(f"{folder}/a")) == {f"{folder}/a/x": "a/x", f"{folder}/a/deep/y": "a/deep/y"}
        await one.delete(f"{folder}/ab/z")
        assert await two.list(f"{folder}/ab") == {}  # etcd keeps the empty folder; nobody sees it

    check(test)


def test_delete_folder(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        await one.delete_folder(f"{folder}/a")
        for name in ("a/x", "a/deep/y", "ab/z"):
            await one.put(f"{folder}/{name}", name)
        lease = await one.hold(f"{folder}/a/members/n", "me", 1)
        await two.delete_folder(f"{folder}/a")
        assert values(await one.list(folder)) == {f"{folder}/ab/z": "ab/z"}
        await asyncio.wait_for(lease.lost.wait(), 10)

    check(test)


def test_watch_shows_all_now_and_after_each_change(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        watch = two.watch(f"{folder}/w")
        assert values(await anext(watch)) == {}
        await one.put(f"{folder}/w/a", "1")
        assert values(await anext(watch)) == {f"{folder}/w/a": "1"}
        await one.put(f"{folder}/elsewhere", "1")
        for number in range(50):
            await one.put(f"{folder}/w/n", str(number))
        await until(watch, {f"{folder}/w/a": "1", f"{folder}/w/n": "49"})
        await one.delete(f"{folder}/w/a")
        await until(watch, {f"{folder}/w/n": "49"})
        await watch.aclose()  # type: ignore[attr-defined]

    check(test)


def test_watch_of_a_single_key(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        key = f"{folder}/round"
        await one.put(key, "1")
        watch = two.watch(key)
        assert values(await anext(watch)) == {key: "1"}
        await one.put(key, "2")
        await until(watch, {key: "2"})
        await one.delete(key)
        await until(watch, {})

    check(test)


def test_lease_lives_until_released(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        key = f"{folder}/members/n"
        lease = await one.hold(key, "me", 1)
        assert lease.key == key
        held = await two.get(key)
        assert held is not None
        with pytest.raises(CompareFailedError):
            await two.hold(key, "not me", 1)
        await asyncio.sleep(0 if isinstance(one, MemoryCoordination) else 2.5)
        assert await two.get(key) == held, "refreshes change neither value nor token, and keep it"
        assert not lease.lost.is_set()
        await lease.release()
        assert await two.get(key) is None
        assert not lease.lost.is_set() or isinstance(one, MemoryCoordination)

    check(test)


def test_lease_of_a_dead_holder_expires(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, die: Callable[[Any], None]) -> None:
        watch = two.watch(f"{folder}/members")
        lease = await one.hold(f"{folder}/members/n", "me", 1)
        await until(watch, {f"{folder}/members/n": "me"})
        die(lease)
        await until(watch, {})
        await two.hold(f"{folder}/members/n", "another", 1)
        await lease.release()
        assert await two.get(f"{folder}/members/n") is not None, "a lost lease does not release another's"

    check(test)


def test_holder_learns_that_its_key_was_removed(check: Callable[[Test], None]) -> None:
    async def test(one: Coordination, two: Coordination, folder: str, _: object) -> None:
        key = f"{folder}/members/n"
        lease = await one.hold(key, "me", 1)
        seen = await two.get(key)
        assert seen is not None
        await asyncio.sleep(0.8)  # at least one refresh
        await two.delete(key, seen.token)
        await two.put(key, "somebody else's")
        await asyncio.wait_for(lease.lost.wait(), 10)
        assert (await two.get(key) or seen).value == "somebody else's"

    check(test)


# --- etcd's v2 API only ---


def run(test: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE_S))  # type: ignore[arg-type]


def test_false_already_exist_after_a_lost_answer(etcd_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is carried out, its answer is lost, python-etcd or we send it again."""
    lose = {"create": 1, "swap": 1}
    original = etcd.Client.write

    def write(self: etcd.Client, key: str, *args: Any, **kwargs: Any) -> Any:
        result = original(self, key, *args, **kwargs)
        kind = "create" if kwargs.get("prevExist") is False else "swap"
        if lose[kind]:
            lose[kind] -= 1
            raise etcd.EtcdConnectionFailed("answer lost")
        return result

    async def test() -> None:
        client, key = EtcdV2([etcd_server.endpoint]), uuid.uuid4().hex
        created = await client.create(key, "1")
        swapped = await client.swap(key, "2", created.token)
        assert lose == {"create": 0, "swap": 0}
        assert await client.get(key) == swapped
        await client.close()

    monkeypatch.setattr(etcd.Client, "write", write)
    run(test())


def test_watch_survives_a_cleared_history(etcd_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 1,000 events pass elsewhere while a watch is between two requests."""
    monkeypatch.setattr(etcd_v2, "WATCH_TIMEOUT_S", 0.5)
    gate = {"pass": True, "cleared": False}
    original, read = etcd_v2._tree, etcd.Client.read

    def spying_read(self: etcd.Client, key: str, **options: Any) -> Any:
        try:
            return read(self, key, **options)
        except etcd.EtcdEventIndexCleared:
            gate["cleared"] = True
            raise

    def tree(client: etcd.Client, prefix: str) -> Any:
        result = original(client, prefix)
        while not gate["pass"]:
            time.sleep(0.01)
        return result

    monkeypatch.setattr(etcd_v2, "_tree", tree)
    monkeypatch.setattr(etcd.Client, "read", spying_read)

    async def test() -> None:
        client, folder = EtcdV2([etcd_server.endpoint]), uuid.uuid4().hex
        watch = client.watch(folder)
        assert await anext(watch) == {}
        gate["pass"] = False
        await client.put(f"{folder}/k", "before")  # wakes the watch, which then stands at the gate
        await asyncio.sleep(0.6)
        raw = etcd.Client("127.0.0.1", etcd_server.port)
        await asyncio.to_thread(lambda: [raw.write(f"/other/{folder}", str(n)) for n in range(1100)])
        await client.put(f"{folder}/k", "after")
        gate["pass"] = True
        await until(watch, {f"{folder}/k": "after"})
        assert gate["cleared"]
        await client.close()

    run(test())


def test_outage_is_waited_out(own_etcd: Any) -> None:
    async def test() -> None:
        client = EtcdV2([own_etcd.endpoint])
        watch = client.watch("w")
        lease = await client.hold("members/n", "me", 60)
        assert await anext(watch) == {}
        own_etcd.kill()
        pending = asyncio.ensure_future(client.put("w/k", "written when it is back"))
        await asyncio.sleep(1)
        own_etcd.start()
        await pending
        await until(watch, {"w/k": "written when it is back"})
        assert not lease.lost.is_set()
        await lease.release()
        await client.close()

    run(test())


def test_unreachable_in_bounded_time(own_etcd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_v2, "GIVE_UP_S", 1.0)
    monkeypatch.setattr(etcd_v2, "REQUEST_TIMEOUT_S", 0.5)

    async def test() -> None:
        client = EtcdV2([own_etcd.endpoint])
        own_etcd.signal(signal.SIGSTOP)
        with pytest.raises(CoordinationError, match="cannot reach etcd"):
            await client.get("k")
        own_etcd.signal(signal.SIGCONT)
        assert await client.get("k") is None
        own_etcd.kill()
        with pytest.raises(CoordinationError, match="cannot reach etcd"):
            await client.create("k", "v")
        assert not await reachable(own_etcd.endpoint)
        await client.close()

    run(test())


def test_another_server_is_tried(etcd_server: Any) -> None:
    async def test() -> None:
        client, key = EtcdV2(["127.0.0.1:1", etcd_server.endpoint, "127.0.0.1:2"]), uuid.uuid4().hex
        for number in range(5):
            await client.put(key, str(number))
        assert await reachable(etcd_server.endpoint)
        await client.close()

    run(test())


def test_a_blocked_loop_does_not_lose_a_lease(etcd_server: Any) -> None:
    async def test() -> None:
        client, key = EtcdV2([etcd_server.endpoint]), uuid.uuid4().hex
        watches = [client.watch(f"{key}/{n}") for n in range(8)]
        for watch in watches:
            await anext(watch)
        lease = await client.hold(key, "me", 1)
        time.sleep(3)
        assert await client.get(key) is not None
        assert not lease.lost.is_set()
        await lease.release()
        await client.close()

    run(test())


def test_delete_urls_are_what_the_guardian_needs(etcd_server: Any) -> None:
    async def test() -> None:
        client, key = EtcdV2([etcd_server.endpoint]), f"{uuid.uuid4().hex}/a b/ü"
        await client.put(key, "v")
        for url in client.delete_urls(key):
            request = urllib.request.Request(url, method="DELETE")
            await asyncio.to_thread(lambda request=request: urllib.request.urlopen(request).close())
        assert await client.get(key) is None
        await client.close()

    run(test())


def test_foreign_keys_stay_outside(etcd_server: Any) -> None:
    async def test() -> None:
        client, key = EtcdV2([etcd_server.endpoint]), uuid.uuid4().hex
        await client.put(key, "v")
        raw = etcd.Client("127.0.0.1", etcd_server.port)
        assert await asyncio.to_thread(lambda: raw.read(ROOT + key).value.endswith(" v"))
        await client.close()

    run(test())
