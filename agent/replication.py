"""This node's part in replicating a round's snapshots: after its own seal, what it owes the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tenplexrun.agent.events import EventLog
from tenplexrun.agent.links import Links
from tenplexrun.core.control import NONE
from tenplexrun.core.rounds import Round
from tenplexrun.errors import TenplexError
from tenplexrun.ports import StoreClient
from tenplexrun.tasks import end

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0


class Replication:
    """Of one round. A holder that does not deliver is asked again until the round ends: that is what decides its fate;
    training goes on meanwhile."""

    def __init__(self, round_: Round, store: StoreClient, links: Links, events: EventLog) -> None:
        self._round, self._store, self._links, self._events = round_, store, links, events
        self._owed_bytes = 0
        self._slots: dict[int, int] = {}  # by step
        self._digests: Mapping[str, str] = {}
        self._begun = NONE
        self._task: asyncio.Task[None] | None = None
        links.on_replicate = self._begin

    def opened(self, slots: dict[str, Any]) -> None:
        """The store's answer to `open_round`: how large it has become."""
        own, buddy = int(slots["own"]), int(slots["buddy"])
        self._owed_bytes = buddy
        self._events.emit("arena", round=self._round.number, own=own, buddy=buddy, num_bytes=2 * (own + buddy))
        others = f" of its own and {buddy / 2**20:.1f} MiB for other nodes" if buddy else ""
        self._events.say(
            f"snapshots take {2 * (own + buddy) / 2**20:.1f} MiB of shared memory on this node: 2 x "
            f"{'(' if others else ''}{own / 2**20:.1f} MiB{others}{')' if others else ''}"
        )

    async def sealed(self, step: int, slot: int) -> None:
        """This node's own part is sealed."""
        self._slots, agreement = {step: slot}, self._links.agreement
        if agreement is not None and len(self._round.participants) > 1:
            self._digests = await agreement.digests(self._round.number, step)
        self._links.report(self._round.number, step, held=not self._owed_bytes, digests=self._digests)

    def _begin(self, number: int, step: int) -> None:
        """All nodes have sealed `step`."""
        if number != self._round.number or not self._owed_bytes or step not in self._slots or step <= self._begun:
            return
        self._begun = step
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.ensure_future(self._replicate(step, self._slots[step]))

    async def _replicate(self, step: int, slot: int) -> None:
        stores = [participant.store for participant in self._round.participants]
        number, pause = self._round.number, FIRST_PAUSE_S
        while True:
            try:
                moved = await self._store.replicate(number, step, slot, stores, self._owed_bytes)
            except TenplexError as error:
                self._events.emit("replication_failed", round=number, step=step, message=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_S)
                continue
            self._events.emit("replicated", round=number, step=step, **moved)
            self._links.report(number, step, held=True, digests=self._digests)
            return

    async def stop(self) -> None:
        """What is not finished is given up."""
        if self._task is not None:
            await end([self._task])
