"""The etcd that nodes host: from one server to three, and back to three when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from cluster import descendants

from tenplexrun.agent import meeting
from tenplexrun.agent.etcd_members import Listed, Members
from tenplexrun.agent.etcd_v3 import EtcdV3
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.hosting import Hosting
from tenplexrun.agent.meeting import find_meeting
from tenplexrun.agent.processes import Processes
from tenplexrun.agent.steward import Steward
from tenplexrun.agent.sweep import make_node_dir
from tenplexrun.core.hosting import Candidate
from tenplexrun.errors import CoordinationError
from tenplexrun.rdzv import Meeting

DEADLINE_S = 120.0
PORT = 29_417  # not the default one: a test of addresses takes that away from everybody for a while
# Addresses that no other test run has.
NET = f"127.{os.getpid() >> 8 & 127 | 64}.{os.getpid() & 255}"


class Nodes:
    """Nodes that only host, and a steward. `living` are those that it takes for members of the run."""

    def __init__(self) -> None:
        self.all: dict[str, Hosting] = {}
        self.processes: dict[str, Processes] = {}
        self.living: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._of: dict[str, list[asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Nodes:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks, *itertools.chain(*self._of.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for hosting in self.all.values():
            if hosting.members is not None:
                await hosting.members.etcd.close()
        for processes in reversed(self.processes.values()):  # each knows those before it
            await processes.close()

    async def add(self, name: str, endpoint: str | None = None) -> Hosting:
        """A node; without an endpoint it starts the first server."""
        node_dir = make_node_dir(uuid.uuid4().hex[:8])
        processes = self.processes[name] = await Processes.start(node_dir)
        host = f"{NET}.{ord(name)}"
        hosting = self.all[name] = Hosting(processes, node_dir, EventLog(name, None), host, growing=True)
        hosting.name = f"{host}:1"
        endpoint = endpoint or await hosting.start(host, 0)
        hosting.members = Members(EtcdV3([endpoint]))
        self.living.append(name)
        self._of[name] = [asyncio.ensure_future(self._refresh(hosting)), asyncio.ensure_future(self._exits(name))]
        return hosting

    def steward(self, name: str) -> asyncio.Task[None]:
        members = self.all[name].members
        assert members is not None
        task = asyncio.ensure_future(Steward(members, self._invite, EventLog(name, None)).run(self._look))
        self._tasks.append(task)
        return task

    def _look(self) -> Sequence[Candidate]:
        return [Candidate(self.all[name].name, self.all[name].host) for name in self.living]

    async def _invite(self, link: str, learner: bool) -> None:
        await next(hosting for hosting in self.all.values() if hosting.name == link).join(learner)

    async def _refresh(self, hosting: Hosting) -> None:
        while True:
            with contextlib.suppress(CoordinationError):
                await hosting.refresh()
            await asyncio.sleep(0.5)

    async def _exits(self, name: str) -> None:
        while True:
            ended = await self.processes[name].exits.get()
            assert self.all[name].ended(ended.pid, ended.code) is None

    async def lose(self, name: str) -> None:
        """kill -9. (The guardians of several nodes cannot be ended one by one in one process.)"""
        self.living.remove(name)
        hosting = self.all.pop(name)
        for task in self._of.pop(name):
            task.cancel()
        hosting.stop()
        assert hosting.members is not None
        await hosting.members.etcd.close()

    async def servers(self, by: str) -> list[Listed]:
        members = self.all[by].members
        assert members is not None
        with contextlib.suppress(CoordinationError):
            return await members.list()
        return []

    async def until_hosted_by(self, names: str, by: str) -> None:
        """Until these nodes, and no others, have a server with a vote, and all know of it."""
        wanted = {self.all[name].name for name in names}
        while True:
            found = await self.servers(by)
            if {each.name for each in found if each.voter} == wanted and len(found) == len(wanted):
                known = {hosting.members.etcd.endpoints for hosting in self.all.values() if hosting.members}
                if known == {tuple(sorted(str(each.endpoint) for each in found))}:
                    return
            await asyncio.sleep(0.2)

    async def meets(self, name: str, named: str) -> bool:
        """Whether a node whose command line names these nodes hosts an etcd, once it has one."""
        node_dir = make_node_dir(uuid.uuid4().hex[:8])
        processes = self.processes[name] = await Processes.start(node_dir)
        host = f"{NET}.{ord(name)}"
        hosting = self.all[name] = Hosting(processes, node_dir, EventLog(name, None), host, growing=True)
        hosting.name = f"{host}:1"
        wanted = Meeting(tuple(f"{NET}.{ord(each)}:{PORT}" for each in named), hosted=True)
        await find_meeting(wanted, host, hosting)
        return hosting.active


Test = Callable[[Nodes], Awaitable[None]]


def check(test: Test) -> None:
    async def bounded() -> None:
        async with Nodes() as nodes:
            await asyncio.wait_for(test(nodes), DEADLINE_S)

    asyncio.run(bounded())


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def client(nodes: Nodes, name: str) -> EtcdV3:
    members = nodes.all[name].members
    assert members is not None
    return members.etcd


@pytest.mark.slow
def test_one_becomes_three_and_any_may_be_lost() -> None:
    async def test(nodes: Nodes) -> None:
        first = await nodes.add("a")
        endpoint = client(nodes, "a").endpoints[0]
        steward = nodes.steward("a")
        await client(nodes, "a").put("k", "1")
        await nodes.add("b", endpoint)
        await asyncio.sleep(3)
        assert first.sole, "two nodes are too few"
        await nodes.add("c", endpoint)
        await nodes.add("d", endpoint)
        lease = await client(nodes, "b").hold("mine", "b", 5)
        await nodes.until_hosted_by("abc", "d")
        assert not first.sole
        assert not nodes.all["d"].active
        steward.cancel()
        await nodes.lose("a")
        nodes.steward("d")
        assert (await client(nodes, "d").get("k") or lease).value == "1"
        await nodes.until_hosted_by("bcd", "d")
        assert not lease.lost.is_set()
        await nodes.lose("b")
        assert (await client(nodes, "d").get("k") or lease).value == "1"
        while {each.name for each in await nodes.servers("c")} not in [{nodes.all[n].name} for n in "cd"]:
            await asyncio.sleep(0.2)
        await client(nodes, "c").put("k", "2")
        [name] = [name for name in "cd" if nodes.all[name].active]
        await nodes.until_hosted_by(name, "cd".replace(name, ""))
        assert nodes.all[name].sole

    check(test)


def test_of_several_named_nodes_the_first_that_is_there_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(nodes: Nodes) -> None:
        monkeypatch.setattr(meeting, "SUCCESSION_S", 1.0)
        waiting = [asyncio.ensure_future(nodes.meets(name, "abc")) for name in "cd"]
        assert [await each for each in waiting] == [True, False], "c, as a and b do not come"
        assert not await nodes.meets("a", "abc"), "there is one"

    check(test)


def test_who_is_named_first_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(nodes: Nodes) -> None:
        later = asyncio.ensure_future(nodes.meets("b", "ab"))
        await asyncio.sleep(1.0)
        assert await nodes.meets("a", "ab")
        assert not await later

    check(test)


@pytest.mark.slow
def test_the_second_server_may_be_lost_before_there_is_a_third() -> None:
    async def test(nodes: Nodes) -> None:
        await nodes.add("a")
        nodes.steward("a")
        for name in "bcd":
            await nodes.add(name, client(nodes, "a").endpoints[0])
        while not nodes.all["b"].active:
            await asyncio.sleep(0.05)
        await nodes.lose("b")
        await client(nodes, "d").put("k", "1")
        await nodes.until_hosted_by("acd", "d")

    check(test)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_alone_is_replaced_by_a_new_one(fault: signal.Signals) -> None:
    """Its node lives on, and withdraws it; its data is never used again."""

    async def test(nodes: Nodes) -> None:
        await nodes.add("a")
        nodes.steward("a")
        for name in "bc":
            await nodes.add(name, client(nodes, "a").endpoints[0])
        await nodes.until_hosted_by("abc", "c")
        before = {each.id for each in await nodes.servers("a")}
        [pid] = [pid for pid in descendants(nodes.processes["b"]._process.pid) if name_of(pid) == "etcd"]
        os.kill(pid, fault)
        while len(before & {each.id for each in await nodes.servers("a")}) == 3:
            await asyncio.sleep(0.2)
        await nodes.until_hosted_by("abc", "c")
        assert len(before & {each.id for each in await nodes.servers("a")}) == 2

    check(test)
