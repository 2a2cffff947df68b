"""What every adapter of the Coordination port does, over real servers of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
from stores import Store

from tenplexrun.agent.memory import MemoryCoordination
from tenplexrun.errors import CompareFailedError
from tenplexrun.ports import Coordination, KeyValue

DEADLINE_S = 60.0
Test = Callable[[Coordination, Coordination, str, Callable[[Any], None]], Awaitable[None]]


@pytest.fixture
def check(store: Store) -> Callable[[Test], None]:
    """Runs a test with two clients of one store, a folder of its own, and what lets a lease's holder die."""

    async def bounded(test: Test) -> None:
        one, two = store.connect(), store.connect()
        try:
            await asyncio.wait_for(test(one, two, store.folder(), store.die), DEADLINE_S)
        finally:
            await one.close()
            await two.close()

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
