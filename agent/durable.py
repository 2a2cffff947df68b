"""Durable checkpoints: each node's part of one, and, on the node that decides, when one is due and when it is whole.

decider: committed {step, checkpoint: tag}  ->  every node copies its share of that snapshot, then writes it
node:    written {step, part | error}       ->  the decider prepares the metadata, proves by a compare-and-swap of
                                                the round that it has not moved on, and publishes
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenplexrun.agent.events import EventLog
from tenplexrun.core.durable import Cadence
from tenplexrun.core.pace import Interval
from tenplexrun.core.rounds import Round
from tenplexrun.errors import CompareFailedError, TenplexError
from tenplexrun.ports import CheckpointClient
from tenplexrun.tasks import end

Record = dict[str, Any]
CANCEL_S = 1.0
LONGEST_S = 3600.0
"""A job's end waits no longer for its last checkpoint."""

Report = Callable[[int, int, Record], None]
"""round, step, and {"part"} or {"error"}."""
Confirm = Callable[[int, int], Awaitable[None]]
"""round, step: raises CompareFailedError when the round has moved on."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What the workers of a node have declared: the layout and the optimizer's param groups."""

    layout: Record
    groups: Mapping[str, int]


class PartWriter:
    """This node's parts of the checkpoints of one round, one at a time."""

    def __init__(self, client: CheckpointClient, round_: Round, node: str, report: Report, events: EventLog) -> None:
        self._client, self._round, self._report, self._events = client, round_, report, events
        self._number = round_.nodes.index(node)
        self._task: asyncio.Task[None] | None = None

    def begin(self, step: int, tag: str, index: str, declared: Declared, unpin: Callable[[], None]) -> None:
        """Write the snapshot of `step`, which `index` lists: the file may be replaced as soon as this returns.

        `unpin` is called when the snapshot has been copied; until then its slot must not be written over.
        """
        kept = Path(index).with_name(f"checkpoint-{tag}.json")
        try:
            os.link(index, kept)
        except OSError as error:
            unpin()
            self._failed(step, f"{index} cannot be kept: {error}")
            return
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.ensure_future(self._write(step, tag, str(kept), declared, unpin))

    async def cancel(self) -> None:
        """The round has ended."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with contextlib.suppress(TenplexError, asyncio.TimeoutError):
                await asyncio.wait_for(self._client.cancel(), CANCEL_S)

    async def _write(self, step: int, tag: str, index: str, declared: Declared, unpin: Callable[[], None]) -> None:
        began, ranks = time.time(), [list(part.ranks) for part in self._round.participants]
        try:
            try:
                size = await self._client.take(
                    tag, index, declared.layout, self._round.parallel.to_json(), ranks, self._number
                )
            finally:
                unpin()
            copied = time.time() - began
            part = await self._client.write(step, self._number, tag, declared.groups)
        except TenplexError as error:
            self._failed(step, str(error))
            return
        seconds = time.time() - began
        self._events.emit(
            "written", round=self._round.number, step=step, num_bytes=size, copied=copied, seconds=seconds
        )
        if self._number == 0:
            part = {**part, "layout": declared.layout}
        self._report(self._round.number, step, {"part": part})

    def _failed(self, step: int, message: str) -> None:
        self._events.emit("checkpoint_failed", round=self._round.number, step=step, message=message)
        self._events.say(f"checkpoint of step {step} not written: {message}; training goes on")
        self._report(self._round.number, step, {"error": message})


@dataclass(slots=True)
class _Going:
    """A checkpoint under way. `parts`: by node, None as long as it is awaited."""

    round: int
    step: int
    tag: str
    began: float
    parts: dict[str, Record | None] = field(default_factory=dict)


class Collector:
    """On the node that decides. Not more than one checkpoint is under way at a time, but for the job's last one."""

    def __init__(self, client: CheckpointClient, every: Interval, events: EventLog, grace_s: float) -> None:
        """`grace_s`: a job that is told to end waits no longer for a last checkpoint."""
        self._client, self._every, self._events, self._grace_s = client, every, events, grace_s
        self._wanted = False
        self._give_up_at: float | None = None
        self.confirm: Confirm | None = None
        self.end: tuple[int, int] | None = None
        """Round and step of the job's last snapshot, once that is known."""
        self._round: Round | None = None
        self._cadence: Cadence | None = None
        self._going: _Going | None = None
        self._publishing: asyncio.Task[None] | None = None

    def expect(self, round_: Round, mine: bool) -> None:
        """A round as it is now; `mine`: it runs, and this node decides. What is of another one is given up."""
        if not mine:
            self._round = self._going = None
        elif self._round is None or self._round.number != round_.number:
            self._round, self._going = round_, None
            # what the end of a round has made impossible is made up for at once
            written = round_.saved if round_.saved is not None else round_.checkpoint.step if round_.checkpoint else 0
            since = self._cadence.at if self._cadence is not None else time.monotonic()
            self._cadence = Cadence(self._every, min(written, round_.start_step), since)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way that is worth waiting for."""
        publishing = self._publishing is not None and not self._publishing.done()
        return publishing or (self._going is not None and time.monotonic() < self._going.began + LONGEST_S)

    def wind_up(self, now: float) -> bool:
        """The job is told to end: the next snapshot that is committed becomes a checkpoint. Returns whether that is
        still to be waited for."""
        if self._give_up_at is None:
            self._give_up_at, self._wanted = now + self._grace_s, True
        return self._round is not None and now < self._give_up_at and (self._wanted or self.busy)

    def begin(self, round_number: int, step: int, linked: Collection[str]) -> str | None:
        """The snapshot of `step` is committed. Returns the checkpoint's tag if it is to become one: not while a node is
        not `linked`, which would not hear of it."""
        now, last = time.monotonic(), self._wanted or self.end == (round_number, step)
        if self._round is None or self._cadence is None or self._round.number != round_number:
            return None
        if (self.busy and not last) or not self._cadence.due(step, now, last) or not {*self._round.nodes} <= {*linked}:
            return None
        self._cadence, self._wanted = self._cadence.begun(step, now), False
        tag = uuid.uuid4().hex[:8]
        self._going = _Going(round_number, step, tag, now, dict.fromkeys(self._round.nodes))
        return tag

    def part(self, node: str, round_number: int, step: int, record: Record) -> None:
        """What a node says of its part: {"part"} or {"error"}."""
        going = self._going
        if going is None or (going.round, going.step) != (round_number, step) or node not in going.parts:
            return
        if "part" not in record:
            self._give_up(going, f"node {node}: {record.get('error')}")
            return
        going.parts[node] = record["part"]
        if all(part is not None for part in going.parts.values()):
            self._publishing = asyncio.ensure_future(self._publish(going, self._publishing))

    def lost(self, node: str) -> None:
        """The link to a node has broken: what it says of its part may not have come."""
        if self._going is not None and self._going.parts.get(node, {}) is None:
            self._give_up(self._going, f"the link to node {node} has broken")

    async def close(self) -> None:
        if self._publishing is not None:
            await end([self._publishing])

    async def _publish(self, going: _Going, before: asyncio.Task[None] | None) -> None:
        """After the one `before`: whatever is published removes what others have left."""
        if before is not None:
            await asyncio.wait([before])
        parts = [part for part in going.parts.values() if part is not None]
        files = [str(part["file"]) for part in parts]
        try:
            layout = parts[0].pop("layout")
            await self._client.prepare(going.step, going.tag, layout, parts)
            if self._going is not going or self.confirm is None:
                raise CompareFailedError(f"round {going.round} has ended")
            await self.confirm(going.round, going.step)
            done = await self._client.publish(going.step, going.tag, files, self.end == (going.round, going.step))
        except TenplexError as error:
            self._give_up(going, str(error))
            return
        if self._going is going:
            self._going = None
        size, seconds = sum(int(part["num_bytes"]) for part in parts), time.monotonic() - going.began
        self._events.emit("checkpoint", round=going.round, step=going.step, num_bytes=size, seconds=seconds, **done)
        self._events.say(f"checkpoint of step {going.step}: {size / 2**20:.1f} MiB in {seconds:.1f} s")
        if done["problem"]:
            self._events.say(done["problem"])

    def _give_up(self, going: _Going, why: str) -> None:
        if self._going is going:
            self._going = None
        self._events.emit("checkpoint_given_up", round=going.round, step=going.step, message=why)
        self._events.say(f"no checkpoint of step {going.step}, the one before stays: {why}")
