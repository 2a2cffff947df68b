"""Links between agents: commits go out when all have sealed, and a dead agent is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tenplexrun import channel
from tenplexrun.agent.links import Links
from tenplexrun.errors import WireError

DEADLINE_S = 30.0


class Node:
    def __init__(self, name: str, token: str = "token") -> None:
        self.links = Links(name, token)
        self.commits: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.links.bind(self._commit, self._lost)

    async def _commit(self, round_number: int, step: int, _checkpoint: str | None) -> None:
        self.commits.put_nowait((round_number, step))

    async def _lost(self, node: str, _link: str) -> None:
        self.lost.put_nowait(node)


def play(story: Callable[[Node, Node], Awaitable[None]]) -> None:
    async def run() -> None:
        a, b = Node("a"), Node("b")
        address = await a.links.start("127.0.0.1")
        await b.links.start("127.0.0.1")
        for node in (a, b):
            node.links.follow(address)
        try:
            await asyncio.wait_for(story(a, b), DEADLINE_S)
        finally:
            await a.links.close()
            await b.links.close()

    asyncio.run(run())


def test_a_commit_reaches_all_once_all_have_sealed() -> None:
    async def story(a: Node, b: Node) -> None:
        a.links.expect(1, ["a", "b"])
        a.links.report(1, 5)
        b.links.report(1, 5)
        assert await a.commits.get() == (1, 5)
        assert await b.commits.get() == (1, 5)

    play(story)


def test_what_was_reported_before_the_decider_was_there_is_said_again() -> None:
    async def run() -> None:
        a, b = Node("a"), Node("b")
        address = await a.links.start("127.0.0.1")
        await b.links.start("127.0.0.1")
        b.links.report(1, 5)
        b.links.follow(address)
        a.links.expect(1, ["b"])
        assert await asyncio.wait_for(b.commits.get(), DEADLINE_S) == (1, 5)
        await b.links.close()
        await a.links.close()

    asyncio.run(run())


def test_both_ends_notice_an_agent_that_is_gone() -> None:
    async def story(a: Node, b: Node) -> None:
        a.links.expect(1, ["b"])
        b.links.report(1, 1)
        await b.commits.get()  # the link stands
        await b.links.close()
        assert await a.lost.get() == "b"

    play(story)

    async def other_way(a: Node, b: Node) -> None:
        a.links.expect(1, ["b"])
        b.links.report(1, 1)
        await b.commits.get()
        await a.links.close()
        assert await b.lost.get() == "a"

    play(other_way)


def test_without_the_jobs_token_nothing_is_heard() -> None:
    async def run() -> None:
        a = Node("a")
        address = await a.links.start("127.0.0.1")
        stranger = await channel.connect(address)
        with pytest.raises(WireError, match="token"):
            await stranger.request("hello", 10, token="wrong", node="x", link="127.0.0.1:1")
        stranger.notify("sealed", round=1, step=5)
        a.links.expect(1, ["x"])
        await asyncio.sleep(0.1)
        assert a.commits.empty()
        await stranger.close()
        await a.links.close()

    asyncio.run(run())


def test_a_port_that_still_answers_when_the_link_breaks_is_asked_again() -> None:
    """A process that dies closes its sockets one after the other."""

    async def run() -> None:
        a = Node("a")
        address = await a.links.start("127.0.0.1")
        port = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        host = "127.0.0.1:" + str(port.sockets[0].getsockname()[1])
        dying = await channel.connect(address)
        await dying.request("hello", 10, token="token", node="b", link=host)
        await dying.close()
        await asyncio.sleep(0.05)
        assert a.lost.empty()
        port.close()
        assert await asyncio.wait_for(a.lost.get(), DEADLINE_S) == "b"
        await a.links.close()

    asyncio.run(run())


def test_what_an_earlier_decider_has_committed_is_not_made_a_checkpoint_again() -> None:
    """Its nodes have heard of that commit before, and would write nothing."""

    async def run() -> None:
        begun: list[int] = []

        class Written:  # of a Collector only what links ask for: the real one would begin each step but once
            def expect(self, *_: object) -> None: ...
            def lost(self, *_: object) -> None: ...
            def begin(self, _round: int, step: int, linked: set[str]) -> str:
                assert linked >= {"a", "b"}
                begun.append(step)
                return "0a1b2c3d"

        b, successor = Node("b"), Node("a")
        await b.links.start("127.0.0.1")
        successor.links.bind(successor._commit, successor._lost, Written())  # type: ignore[arg-type]
        address = await successor.links.start("127.0.0.1")
        b.links._committed = (1, 5)
        b.links.report(1, 5)
        for node in (b, successor):
            node.links.follow(address)
        successor.links.expect(1, ["b", "a"])
        successor.links.report(1, 5)
        assert await asyncio.wait_for(b.commits.get(), DEADLINE_S) == (1, 5)
        assert begun == []
        for node in (b, successor):
            node.links.report(1, 6)
        while await asyncio.wait_for(b.commits.get(), DEADLINE_S) != (1, 6):
            pass  # what is said again
        assert begun == [6]
        for node in (b, successor):
            await node.links.close()

    asyncio.run(run())
