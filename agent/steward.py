"""Keeps the run's etcd on as many nodes as it should be on. Runs where the decider is; see `core.hosting`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import replace

from tenplexrun.agent.etcd_members import Members
from tenplexrun.agent.events import EventLog
from tenplexrun.core import hosting
from tenplexrun.core.hosting import Candidate, Invite, Promote, Remove, Server, Step
from tenplexrun.errors import TenplexError

LOOK_S = 1.0
REFUSED_S = 60.0

Look = Callable[[], Sequence[Candidate]]
Ask = Callable[[str, bool], Awaitable[None]]  # the link of a node, learner: have it host


class Steward:
    """All that it knows is read anew each time, from etcd's own list and the decider's view: another one may go on.

    `named`: addresses in --rdzv-endpoint.
    """

    def __init__(self, members: Members, ask: Ask, events: EventLog, named: Container[str] = ()) -> None:
        self._members, self._ask, self._events, self._named = members, ask, events, named
        self._seen: dict[tuple[str, str, bool], float] = {}
        self._refused: dict[str, float] = {}

    async def run(self, look: Look) -> None:
        """Until cancelled. `look`: the nodes that live, the oldest first; none while it is no time for changes."""
        while True:
            try:
                nodes = look()
                if nodes:
                    await self._tend(nodes)
            except TenplexError as error:
                self._events.emit("steward_trouble", message=str(error))
            await asyncio.sleep(LOOK_S)

    async def _tend(self, nodes: Sequence[Candidate]) -> None:
        now = time.monotonic()
        listed = await self._members.list()
        keys = [(each.id, each.name, each.voter) for each in listed]
        self._seen = {key: self._seen.get(key, now) for key in keys}
        nodes = [replace(node, named=node.host in self._named) for node in nodes]
        servers = [Server(*key, since) for key, since in self._seen.items()]
        self._refused = {link: until for link, until in self._refused.items() if until > now}
        step = hosting.next_step(servers, await self._members.leader(), nodes, self._refused, now)
        if step is not None:
            await self._do(step)

    async def _do(self, step: Step) -> None:
        self._events.emit("steward", step=repr(step))
        if isinstance(step, Invite):
            await self._invite(step)
        elif isinstance(step, Promote):
            await self._members.promote(step.id)
            await self._invite(step.then)
        elif isinstance(step, Remove):
            await self._members.remove(step.id)
        else:
            await self._members.transfer(step.to)

    async def _invite(self, invite: Invite) -> None:
        try:
            await self._ask(invite.link, invite.learner)
        except TenplexError:
            self._refused[invite.link] = time.monotonic() + REFUSED_S
            raise
