"""The agent that decides: holds the `decider` lease, shows `core.membership` what is written, writes what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tenplexrun.agent.events import EventLog
from tenplexrun.core import membership, rounds
from tenplexrun.core.layout import Layout
from tenplexrun.core.membership import Decision, Settings, View
from tenplexrun.core.rounds import Round
from tenplexrun.errors import CompareFailedError, CoordinationError, TenplexError
from tenplexrun.ports import Coordination, KeyValue, Lease

FetchLayout = Callable[[str, Sequence[str]], Awaitable[dict[str, Any]]]
RETRY_S = 0.5
RELEASE_S = 3.0


class Decider:
    """Campaigns for the lease; while it has it, decides. `link` is where this agent's link listens."""

    def __init__(
        self,
        coordination: Coordination,
        folder: str,
        settings: Settings,
        fetch_layout: FetchLayout,
        events: EventLog,
        lease_s: float,
    ) -> None:
        self._coordination, self._folder, self._settings = coordination, folder, settings
        self._fetch_layout, self._events, self._lease_s = fetch_layout, events, lease_s
        self._content: Mapping[str, KeyValue] = {}
        self._news = asyncio.Event()
        self._written: tuple[str | None, KeyValue] | None = None  # token that we replaced, and what by
        self._seen: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._since: tuple[object, float] = (None, 0.0)
        self._layouts: dict[str, Layout] = {}
        self._reason = ""

    async def run(self, node: str, link: str) -> None:
        """Until cancelled."""
        while True:
            try:
                lease = await self._campaign(node, link)
                try:
                    await self._reign(lease, link)
                finally:
                    with contextlib.suppress(
                        CoordinationError, asyncio.TimeoutError
                    ):  # a cancellation must not be lost
                        await asyncio.wait_for(lease.release(), RELEASE_S)
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

    async def _reign(self, lease: Lease, link: str) -> None:
        self._events.emit("decider", link=link)
        self._news.clear()
        watcher = asyncio.ensure_future(self._follow())
        lost = asyncio.ensure_future(lease.lost.wait())
        try:
            await self._news.wait()
            while not lost.done() and not watcher.done():
                self._news.clear()
                wake_at = await self._decide_once(link)
                timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({news, lost, watcher}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        finally:
            watcher.cancel()
            lost.cancel()

    async def _follow(self) -> None:
        async for content in self._coordination.watch(self._folder):
            self._content = content
            self._news.set()

    async def _decide_once(self, link: str) -> float | None:
        """Decide on what is known, and act. Returns when to decide again at the latest."""
        now = time.monotonic()
        view = self._view(link, now)
        decision = membership.decide(view, self._settings, now)
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
            return now + RETRY_S
        return decision.wake_at

    async def _act(self, decision: Decision, view: View) -> None:
        if decision.round is not None:
            await self._write(decision.round)
        for request, answer in (decision.answers or {}).items():
            await self._coordination.put(f"{self._folder}/answers/{request}", answer)
            await self._coordination.delete(f"{self._folder}/requests/{request}")
        for node in decision.evict:
            await self.evict(node)
        for digest in decision.need_layouts:
            holders = [
                view.members[node].store
                for node, ack in view.acks.items()
                if node in view.members and any(holding.snapshot.digest == digest for holding in ack.holdings)
            ]
            self._layouts[digest] = Layout.from_json(await self._fetch_layout(digest, holders))
        if decision.need_layouts or decision.evict:
            self._news.set()

    async def evict(self, node: str) -> None:
        """Remove a member that is known to be gone; a node removed by mistake fences itself."""
        member = self._content.get(f"{self._folder}/members/{node}")
        if member is not None:
            await self._coordination.delete(member.key)

    async def _write(self, document: Round) -> None:
        key, text = f"{self._folder}/round", json.dumps(rounds.to_json(document))
        current = self._current()
        if current is None:
            self._written = (None, await self._coordination.create(key, text))
        else:
            self._written = (current.token, await self._coordination.swap(key, text, current.token))
        self._events.emit(
            "round",
            number=document.number,
            phase=document.phase,
            cause=document.cause.kind,
            detail=document.cause.detail,
            noticed=document.cause.at,
            parallel=document.parallel.to_json(),
            nodes=list(document.nodes),
            step=document.snapshot.step if document.snapshot else 0,
            hold=document.stop.hold,
        )
        self._news.set()

    def _current(self) -> KeyValue | None:
        """The round document: as watched, or as written by us if the watch is behind."""
        watched = self._content.get(f"{self._folder}/round")
        if self._written is not None:
            replaced, written = self._written
            if replaced == (watched.token if watched else None):
                return written
        return watched

    def _view(self, link: str, now: float) -> View:
        current = self._current()
        round_ = None if current is None else rounds.round_from_json(json.loads(current.value))
        members = {member.node: member for member in map(rounds.member_from_json, self._documents("members").values())}
        self._seen = {node: self._seen.get(node, now) for node in members}
        requests = tuple(map(rounds.request_from_json, self._documents("requests").values()))
        self._asked = {request.id: self._asked.get(request.id, now) for request in requests}
        state = None if round_ is None else (round_.number, round_.phase, round_.stop)
        if self._since[1] == 0.0 or self._since[0] != state:
            self._since = (state, now)
        acks = {} if round_ is None else self._documents(f"acks/{round_.number}")
        return View(
            decider=link,
            members=members,
            seen=self._seen,
            round=round_,
            acks={node: rounds.ack_from_json(ack) for node, ack in acks.items()},
            requests=requests,
            layouts=self._layouts,
            since=self._since[1],
            wall=time.time(),
            asked=self._asked,
        )

    def _documents(self, kind: str) -> dict[str, dict[str, Any]]:
        prefix = f"{self._folder}/{kind}/"
        return {
            key.removeprefix(prefix): json.loads(found.value)
            for key, found in sorted(self._content.items())
            if key.startswith(prefix)
        }
