"""The living workers of one round on one node: signals to them, their stop, and how each has ended."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenplexrun.agent import probe
from tenplexrun.agent.events import EventLog
from tenplexrun.core.control import ControlPage, num_bytes
from tenplexrun.core.lifecycle import StopWorkers
from tenplexrun.core.rounds import Failure
from tenplexrun.errors import ArenaFullError
from tenplexrun.ports import WorkerExit, WorkerPool

KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class End:
    """`told`: we had sent it a signal or told it to leave before."""

    local_rank: int
    exit: WorkerExit
    told: bool


class Workers:
    """`control`: path of the node's control page; `grace_s`: what a worker gets that was told to stop."""

    def __init__(self, pool: WorkerPool, control: Path, grace_s: float, events: EventLog) -> None:
        self._pool, self._control, self._grace_s, self._events = pool, control, grace_s, events
        self.alive: dict[int, int] = {}  # local rank by pid
        self._none_alive = asyncio.Event()
        self._told = False
        self.ends: list[End] = []

    def __bool__(self) -> bool:
        return bool(self.alive)

    def started(self, pids: Sequence[int]) -> None:
        self.alive.update(zip(pids, range(len(pids)), strict=True))

    def ended(self, exit_: WorkerExit) -> End | None:
        """Note an exit. None: it is none of ours."""
        local_rank = self.alive.pop(exit_.pid, None)
        if local_rank is None:
            return None
        if not self.alive:
            self._none_alive.set()
        end = End(local_rank, exit_, self._told)
        self.ends.append(end)
        return end

    def pass_on(self, signum: int) -> tuple[int, int]:
        """Send a signal to those that handle it; it would kill the others. Returns how many do, and how many live."""
        handling = [pid for pid in self.alive if probe.catches(pid, signum)]
        self._send(handling, signum)
        return len(handling), len(self.alive)

    async def stop(self, order: StopWorkers, leave: Callable[[], None]) -> None:
        """End them all; `leave` tells parked ones to go. Returns when none lives, or SIGKILL has no effect."""
        self._told = True
        if order.hung and self.alive:
            await self._show_stacks("a suspected hang")
        if order.how == "kill":
            self._send(self.alive, signal.SIGKILL)
        elif order.how == "leave":
            leave()
        elif order.how == "terminate":
            self._send(self.alive, order.signum)
        else:
            await self._rescue(order.signum)
        if order.how != "kill" and not await self._gone_within(self._grace_s):
            if self._grace_s > 0:
                await self._show_stacks(f"still here {self._grace_s:g} s after being told to stop")
            self._send(self.alive, signal.SIGKILL)
        await self._gone_within(KILL_TIMEOUT_S)

    async def _rescue(self, signum: int) -> None:
        """After a failure: a rank inside a collective hears nothing until its peer leaves; waiting would be vain."""
        patient = await probe.responsive(list(self.alive), self._control, self._pool.signal)
        self._send([pid for pid in self.alive if pid not in patient], signal.SIGKILL)
        self._send(patient, signum)

    async def _gone_within(self, seconds: float) -> bool:
        if self.alive:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._none_alive.wait(), seconds)
        return not self.alive

    async def _show_stacks(self, why: str) -> None:
        ranks = ", ".join(str(local_rank) for local_rank in sorted(self.alive.values()))
        self._events.emit("stacks", why=why, pids=sorted(self.alive))
        self._events.say(f"{why}: the stacks of local ranks {ranks} follow")
        missing = await probe.dump_stacks(list(self.alive), self._pool.signal)
        if missing:
            self._events.say(missing)

    def _send(self, pids: Collection[int], signum: int) -> None:
        for pid in list(pids):
            self._pool.signal(pid, signum)


def victims(ends: Sequence[End], first_rank: int, failure: Failure, node: str) -> str:
    """Who else of this node ended badly, and how, as one line; "" if nobody."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        rank = first_rank + end.local_rank
        if end.exit.code == 0 or (failure.node, failure.rank) == (node, rank):
            continue
        how = Failure(node, "", rank, end.local_rank, end.exit.pid, end.exit.code, end.exit.at).how
        groups.setdefault(f"{how}, {'stopped by us' if end.told else 'of its own, after it'}", []).append(rank)
    texts = [f"rank {', '.join(map(str, sorted(ranks)))} ({how})" for how, ranks in groups.items()]
    return "; ".join(texts)


def new_page(path: Path, round_number: int, num_workers: int) -> ControlPage:
    """A fresh control page under a new inode: workers of an older round keep theirs. Raises ArenaFullError.

    Its memory is reserved: a page that is written to without any left kills this process.
    """
    fresh = path.with_suffix(".new")
    with fresh.open("wb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes(num_workers))
        except OSError as error:
            raise ArenaFullError(
                f"shared memory is too small: not even a control page of {num_bytes(num_workers)} bytes can be had in "
                f"{path.parent} ({error.strerror}); free some or enlarge it (mount -o remount,size=... /dev/shm)"
            ) from error
        page = ControlPage.create(memoryview(mmap.mmap(file.fileno(), 0)), round_number, num_workers)
    fresh.rename(path)
    return page
