"""The agent that decides: holds the `decider` lease, shows `core.membership` what is written, writes what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import replace
from typing import Any

from tenplexrun.agent.durable import Collector
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.steward import Steward
from tenplexrun.core import membership, rounds
from tenplexrun.core.durable import Found
from tenplexrun.core.forbearance import Forbearance
from tenplexrun.core.hosting import Candidate
from tenplexrun.core.layout import Layout
from tenplexrun.core.membership import Decision, Settings, View
from tenplexrun.core.outlook import Outlook
from tenplexrun.core.rounds import Round
from tenplexrun.errors import CheckpointError, CompareFailedError, CoordinationError, TenplexError
from tenplexrun.ports import CheckpointClient, Coordination, Lease

FetchLayout = Callable[[str, Sequence[str]], Awaitable[dict[str, Any]]]
RETRY_S = 0.5
LOOK_S = 1.0  # links come and go without news from the store
RELEASE_S = 3.0


class Decider:
    """Campaigns for the lease; while it has it, decides. `link` is where this agent's link listens, `linked` who has a
    link to it."""

    def __init__(
        self,
        coordination: Coordination,
        folder: str,
        settings: Settings,
        fetch_layout: FetchLayout,
        events: EventLog,
        lease_s: float,
        linked: Callable[[], Container[str]],
        checkpoints: CheckpointClient | None = None,
        collector: Collector | None = None,
    ) -> None:
        self._coordination, self._folder, self._settings = coordination, folder, settings
        self._fetch_layout, self._events, self._lease_s = fetch_layout, events, lease_s
        self._linked, self._checkpoints, self._collector = linked, checkpoints, collector
        if collector is not None:
            collector.confirm = self.confirm
        self.steward: Steward | None = None  # where nodes of the run host the etcd
        self._outlook = Outlook(folder)
        self._news = asyncio.Event()
        self._reason = ""
        self._view: View | None = None
        self.forbearance = Forbearance(lease_s)  # the agent tells it what it has seen of round and lease
        self._node = ""

    async def run(self, node: str, link: str) -> None:
        """Until cancelled."""
        self._node = node
        while True:
            try:
                lease = await self._campaign(node, link)
                try:
                    resigned = await self._reign(lease, link)
                finally:
                    with contextlib.suppress(
                        CoordinationError, asyncio.TimeoutError
                    ):  # a cancellation must not be lost
                        await asyncio.wait_for(lease.release(), RELEASE_S)
                if resigned:
                    await asyncio.sleep(2 * self._lease_s)  # the others' turn
            except CoordinationError as error:
                self._events.emit("decider_trouble", message=str(error))
                await asyncio.sleep(RETRY_S)

    async def _campaign(self, node: str, link: str) -> Lease:
        key = f"{self._folder}/decider"
        document = json.dumps({"node": node, "link": link})
        async for content in self._coordination.watch(key):
            if content:
                continue
            with contextlib.suppress(CompareFailedError):
                return await self._coordination.hold(key, document, self._lease_s)
        raise CoordinationError("the watch of the decider's key ended")

    async def _reign(self, lease: Lease, link: str) -> bool:
        """Decide until the lease is lost. Returns whether it is given up instead."""
        self._events.emit("decider", link=link)
        self._outlook = Outlook(self._folder, self._outlook.layouts)  # times of an earlier reign mean nothing now
        self._news.clear()
        watcher = asyncio.ensure_future(self._follow())
        lost = asyncio.ensure_future(lease.lost.wait())
        tending = None if self.steward is None else asyncio.ensure_future(self.steward.run(self._hosts))
        try:
            await self._news.wait()
            while not lost.done() and not watcher.done():
                self._news.clear()
                decision = await self._decide_once(link)
                if decision.resign:
                    return True
                wake_at = decision.wake_at
                timeout = LOOK_S if wake_at is None else min(LOOK_S, max(0.0, wake_at - time.monotonic()))
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({news, lost, watcher}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        finally:
            watcher.cancel()
            lost.cancel()
            if tending is not None:
                tending.cancel()
        return False

    def _hosts(self) -> list[Candidate]:
        """Who may host the etcd, those that have been there longest first; none before the first round has formed."""
        view, linked = self._view, self._linked()
        if view is None or view.round is None or not view.round.participants or view.round.phase == "ended":
            return []
        round_ = view.round
        here = [member for member in view.members.values() if member.node not in round_.evicted]
        here.sort(key=lambda member: (member.node not in round_.nodes, view.seen[member.node]))
        return [Candidate(member.link, member.host, member.node in linked) for member in here]

    async def _follow(self) -> None:
        async for content in self._coordination.watch(self._folder):
            self._outlook.observe(content)
            self._news.set()

    async def _decide_once(self, link: str) -> Decision:
        """Decide on what is known, and act."""
        now = time.monotonic()
        writing = self._collector is not None and self._collector.busy
        view = self._outlook.view(link, now, time.time(), self._linked(), writing)
        self._view = view
        decision = self.forbearance.decide(view, self._node, self._coordination.connected_s, now)
        decision = decision or membership.decide(view, self._settings, now)
        if self._collector is not None and membership.may_wait(decision, view) and self._collector.wind_up(now):
            decision = Decision("the job is told to end: a last checkpoint is written first", tell=True)
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._events.emit("decision", reason=decision.reason)
            if decision.tell:
                self._events.say(decision.reason)
        try:
            await self._act(decision, view)
        except CompareFailedError:
            pass  # somebody wrote meanwhile: the watch brings it
        except TenplexError as error:
            self._events.emit("decider_trouble", message=str(error))
            return replace(decision, wake_at=now + RETRY_S)
        return decision

    async def _act(self, decision: Decision, view: View) -> None:
        if decision.round is not None:
            await self._write(decision.round)
        for request, answer in (decision.answers or {}).items():
            await self._coordination.put(f"{self._folder}/answers/{request}", answer)
            await self._coordination.delete(f"{self._folder}/requests/{request}")
        for key in self._outlook.condemned:
            await self._coordination.delete(key)
        for digest in decision.need_layouts:
            holders = [
                view.members[node].store
                for node, ack in view.acks.items()
                if node in view.members and any(holding.snapshot.digest == digest for holding in ack.holdings)
            ]
            self._outlook.layouts[digest] = Layout.from_json(await self._fetch_layout(digest, holders))
        if decision.look_for is not None:
            self._outlook.found = await self._look_for(decision.look_for)
        if decision.need_layouts or decision.look_for is not None:
            self._news.set()

    async def _look_for(self, found: Found) -> Found:
        assert self._checkpoints is not None
        try:
            checkpoint, notes = await self._checkpoints.newest(found.refused)
        except CheckpointError as error:
            return replace(found, error=str(error))
        for note in notes:
            self._events.say(note)
        return replace(found, checkpoint=checkpoint)

    async def confirm(self, round_number: int, step: int) -> None:
        """Prove, by writing `saved`, that the round still runs and that this agent still decides it.

        Raises CompareFailedError when that is not so, CoordinationError.
        """
        current, round_ = self._outlook.current, self._outlook.round
        if current is None or round_ is None or (round_.number, round_.phase) != (round_number, "running"):
            raise CompareFailedError(f"round {round_number} has ended")
        text = json.dumps(rounds.to_json(replace(round_, saved=step)))
        key = f"{self._folder}/round"
        self._outlook.wrote(current.token, await self._coordination.swap(key, text, current.token))

    async def _write(self, document: Round) -> None:
        key, text = f"{self._folder}/round", json.dumps(rounds.to_json(document))
        current = self._outlook.current
        if current is None:
            self._outlook.wrote(None, await self._coordination.create(key, text))
        else:
            self._outlook.wrote(current.token, await self._coordination.swap(key, text, current.token))
        self._events.emit(
            "round",
            number=document.number,
            phase=document.phase,
            cause=document.cause.kind,
            detail=document.cause.detail,
            noticed=document.cause.at,
            parallel=document.parallel.to_json(),
            nodes=list(document.nodes),
            step=document.start_step,
            checkpoint=document.checkpoint and document.checkpoint.url,
            hold=document.stop.hold,
        )
        self._news.set()
