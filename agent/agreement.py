"""Whether replicas agree: what this node's store says of its own, and what the decider makes of what all say."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tenplexrun.agent.events import EventLog
from tenplexrun.core.regions import Region
from tenplexrun.core.replicas import Copied, Disagreement, Split, disagreements
from tenplexrun.core.rounds import Request
from tenplexrun.errors import ReplicasDifferError, TenplexError
from tenplexrun.ports import StoreClient

MAX_LINES = 5
Ask = Callable[[str, int, int, str], Awaitable[list[Any]]]
"""The checksums that a node has: of a round, a step, and the key of a group."""


class Agreement:
    """`mode`: "warn" tells people, "strict" also ends the job, "off" compares nothing."""

    def __init__(self, mode: str, store: StoreClient, events: EventLog) -> None:
        self._mode, self._store, self._events = mode, store, events
        self._told: set[str] = set()
        self.end: Callable[[Request], None] = lambda request: None

    async def digests(self, round_number: int, step: int) -> Mapping[str, str]:
        """What this node reports of a snapshot that it has just sealed."""
        if self._mode == "off":
            return {}
        try:
            return await self._store.digests(round_number, step)
        except TenplexError as error:  # the next snapshot will do
            self._events.emit("not_compared", round=round_number, step=step, message=str(error))
            return {}

    async def checksums(self, round_number: int, step: int, key: str) -> list[Any]:
        """For the decider. Raises StoreError when the snapshot has been written over."""
        return await self._store.checksums(round_number, step, key)

    async def look_into(self, round_number: int, split: Split, ask: Ask) -> None:
        """Find the names of what differs: one node of each kind is asked. What was told before is not told again."""
        copies = []
        for like in split.nodes:
            try:
                found = await ask(like[0], round_number, split.step, split.key)
            except TenplexError as error:  # too late, or it is gone; what drifts apart stays so
                self._events.emit("not_compared", round=round_number, step=split.step, message=str(error))
                return
            copies += [Copied(node, fqn, Region.from_json(box), value) for node in like for fqn, box, value in found]
        fresh = [one for one in disagreements(copies) if one.fqn not in self._told]
        if fresh:
            self._told.update(one.fqn for one in fresh)
            self._tell(round_number, split.step, fresh)

    def _tell(self, round_number: int, step: int, found: list[Disagreement]) -> None:
        names = list(dict.fromkeys(one.fqn for one in found))
        self._events.emit("replicas_differ", round=round_number, step=step, tensors=names)
        for one in found[:MAX_LINES]:
            self._events.say(f"step {step}: {one}")
        if len(found) > MAX_LINES:
            self._events.say(
                f"step {step}: {len(found) - MAX_LINES} more regions differ, see the event replicas_differ"
            )
        if self._mode == "strict":
            detail = f"replicas differ at step {step}, and --replica-check is strict: {found[0]}"
            self.end(Request(uuid.uuid4().hex[:8], "end", code=ReplicasDifferError.exit_code, detail=detail))
