"""Turns the state that living nodes hold into what this node's ranks need: plans its part, pulls it, peer to peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenplexrun.agent.events import EventLog
from tenplexrun.core import inputs
from tenplexrun.core.baselines import part_of
from tenplexrun.core.layout import Layout
from tenplexrun.core.planner import Fetch, Holders
from tenplexrun.core.ptc import PTC
from tenplexrun.core.rounds import Round
from tenplexrun.core.snapshots import Claim, holders_of
from tenplexrun.errors import TenplexError
from tenplexrun.ports import StoreClient

FIRST_NEWS_S, LAST_NEWS_S = 2.0, 30.0
"""When people first hear of a move that is under way, and how often at the least."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Where the workers of a round start: a snapshot whose pieces are all on this node, or step 0."""

    step: int = 0
    consumed: int = 0
    snapshot: dict[str, Any] | None = None
    index: str | None = None
    values: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "consumed": self.consumed,
            "snapshot": self.snapshot,
            "index": self.index,
            "values": self.values,
        }


class Transformer:
    """Executes this node's part of a round's plan."""

    def __init__(self, store: StoreClient, events: EventLog) -> None:
        self._store, self._events = store, events

    async def restore(self, node: str, round_: Round) -> Restored:
        """Have all that this node's ranks need here. Raises StateLostError, WireError, ArenaFullError."""
        if round_.snapshot is None or not round_.sources:
            return Restored()
        began = time.time()
        try:
            return await self._restore(node, round_, began)
        except TenplexError as error:
            self._events.emit("move_failed", round=round_.number, message=str(error))
            self._events.say(f"state could not be moved: {error}")
            raise

    async def _restore(self, node: str, round_: Round, began: float) -> Restored:
        assert round_.snapshot is not None
        assert round_.sources is not None
        inputs.check(round_)
        addresses = {participant.node: participant.store for participant in round_.participants}
        addresses |= {name: source.store for name, source in round_.sources.items()}
        peers = [address for name, address in addresses.items() if name != node]
        record = await self._store.layout(round_.snapshot.digest, peers)
        layout = Layout.from_json(record)
        holdings = {name: source.holdings for name, source in round_.sources.items()}
        holders = holders_of(round_.snapshot, holdings, layout)
        target = PTC(layout, round_.parallel, round_.rank_nodes())
        mine = part_of(round_.way, node, target, holders, round_.racks)
        planned = time.time()
        snapshot, buddy = round_.snapshot.to_json(), round_.buddy_claim(node)
        others: Holders = {} if mine.hub else holders
        order: dict[str, Any] = {
            "layout": record,
            "claim": Claim(round_.parallel, mine.ranks).to_json(),
            "fetches": [self._fetch(fetch, addresses, node, others) for fetch in mine.plan.fetches],
            "buddy": None if buddy is None else buddy.to_json(),
            "after": Claim(round_.parallel, tuple(range(target.config.world_size))).to_json() if mine.hub else None,
        }
        moved = await self._pull(round_.number, self._store.pull(round_.number, snapshot, **order))
        index = await self._store.index(snapshot)
        content = json.loads(Path(index).read_bytes())
        self._events.emit(
            "moved",
            round=round_.number,
            began=began,
            plan_seconds=planned - began,
            seconds=time.time() - began,
            num_bytes=moved["num_bytes"],
            lower_bound=mine.lower_bound_bytes,
            needed=mine.plan.needed_bytes,
            absent=list(mine.plan.absent),
        )
        return Restored(round_.snapshot.step, int(content["consumed"]), snapshot, index, content["values"])

    async def _pull(self, number: int, pulling: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Wait for it, and tell people how far it is. Cancelled: the store stops, too."""
        task = asyncio.ensure_future(pulling)
        began, pause = time.monotonic(), FIRST_NEWS_S
        try:
            while not (await asyncio.wait([task], timeout=pause))[0]:
                with contextlib.suppress(TenplexError):  # the store is being started again: `task` knows more
                    self._tell(number, await self._store.progress(), time.monotonic() - began)
                pause = min(2 * pause, LAST_NEWS_S)
            return task.result()
        except asyncio.CancelledError:
            task.cancel()
            with contextlib.suppress(TenplexError):
                await self._store.abandon()
            self._events.emit("move_abandoned", round=number)
            raise

    def _tell(self, number: int, progress: dict[str, Any], seconds: float) -> None:
        num_bytes, total = progress["num_bytes"], progress["total_bytes"]
        self._events.emit("moving", round=number, num_bytes=num_bytes, total_bytes=total, seconds=seconds)
        if total:
            rate = num_bytes / seconds
            left = f", {(total - num_bytes) / rate:.0f} s left" if 0 < num_bytes < total else ""
            self._events.say(
                f"moving state: {num_bytes / 2**20:.0f} of {total / 2**20:.0f} MiB ({num_bytes / total:.0%}) "
                f"in {seconds:.0f} s, {rate / 2**20:.0f} MiB/s{left}"
            )

    def _fetch(self, fetch: Fetch, addresses: dict[str, str], node: str, holders: Holders) -> dict[str, Any]:
        """A fetch with its address; any other holder of the region may stand in for a source that fails."""
        others = [
            addresses[name]
            for name, held in holders.items()
            if name not in (node, fetch.source) and any(one.contains(fetch.region) for one in held.get(fetch.fqn, ()))
        ]
        return {**fetch.to_json(), "address": addresses[fetch.source], "alternatives": others}
