"""Looks at the workers of one round, again and again, until one is found to hang. What that is: `core.hang`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from tenplexrun.agent import probe
from tenplexrun.core.control import NO_HOLD, ControlPage
from tenplexrun.core.hang import Hang, Sight, Watch

LOOK_S = 0.5


class HangWatcher:
    """`alive`: local rank by pid of the workers that live. `control`: path of the control page, `page`."""

    def __init__(self, watch: Watch, page: ControlPage, control: Path, alive: Mapping[int, int]) -> None:
        self._watch = watch
        self._page, self._control, self._alive = page, control, alive

    async def found(self, send: probe.Send) -> Hang:
        """Returns when one hangs, which may be never. `send` signals a worker."""
        while True:
            await asyncio.sleep(LOOK_S)
            sights = {rank: self._sight(pid, rank) for pid, rank in self._alive.items()}
            held = self._page.hold != NO_HOLD
            hang = self._watch.look(time.monotonic(), sights, self._page.committed, held)
            blamed = None if hang is None else hang.blame(await self._answering(hang, send))
            if blamed is not None and blamed.ranks[0] in self._alive.values():  # it may have ended meanwhile
                return blamed

    def _sight(self, pid: int, local_rank: int) -> Sight:
        page = self._page
        return Sight(page.started(local_rank), page.parked(local_rank), page.sealed(local_rank), probe.state(pid))

    async def _answering(self, hang: Hang, send: probe.Send) -> set[int]:
        if hang.certain:
            return set()
        pids = [pid for pid, rank in self._alive.items() if rank in hang.ranks]
        return {self._alive[pid] for pid in await probe.answering(pids, self._control, send) if pid in self._alive}
