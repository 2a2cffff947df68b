"""Whether a worker of this node hangs, from what its agent sees of it again and again. Pure.

One `Watch` belongs to one round: nothing of an old one can make a later one look bad. There are two kinds of evidence:

    stopped  the process is stopped by a signal and not traced: nobody but us would ever notice
    still    its words on the control page do not change, though it is neither parked, done, nor before its first step

How long either may last follows from the longest step of the round; the first one, which compiles, counts only until
there is another. Of ranks that stand still, most wait for one that hangs, perhaps on another node. One that is in its
own Python code, or in uninterruptible sleep, is blamed at once; a node with none such waits half as long again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

from tenplexrun.core.control import DONE, NONE

MAX_LOOK_S = 5.0
"""More than this between two looks is time in which the agent itself stood still: it does not count."""
STOPPED, TRACED, SLEEPING = "T", "t", "D"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a worker may be stopped, and stand still: seconds at least, and a multiple of the longest step."""

    stopped_s: float
    still_s: float
    stopped_steps: float = 0.0
    still_steps: float = 0.0

    @classmethod
    def of(cls, timeout_s: float | None, unreachable_s: float) -> Bounds:
        """`timeout_s`: for both kinds of evidence (inf: never); None: by the length of the steps. `unreachable_s`:
        after which a silent node is given up, for whom its peers must not be blamed."""
        if timeout_s is not None:
            return cls(timeout_s, timeout_s)
        return cls(10.0, max(300.0, unreachable_s), 10.0, 20.0)

    @property
    def never(self) -> bool:
        return math.isinf(self.stopped_s)

    def stopped(self, longest_s: float | None) -> float:
        """Without a step to go by: as long as one that may just be slow."""
        return self.still_s if longest_s is None else max(self.stopped_s, self.stopped_steps * longest_s)

    def still(self, longest_s: float | None) -> float:
        """Before a step is done it may be loading or compiling: no bound."""
        return math.inf if longest_s is None else max(self.still_s, self.still_steps * longest_s)

    def __str__(self) -> str:
        if self.never:
            return "workers that hang are not looked for"
        if not self.stopped_steps:
            return f"a worker that hangs is given up after {self.still_s:g} s"
        return (
            f"a stopped worker is given up after {self.stopped_s:g} s or {self.stopped_steps:g} steps, one that stands "
            f"still after {self.still_s:g} s or {self.still_steps:g} steps"
        )


@dataclass(frozen=True, slots=True)
class Sight:
    """A living worker at one moment: its words on the control page; its state as in /proc/PID/stat, "t" if traced."""

    started: int
    parked: int
    sealed: int
    state: str


@dataclass(frozen=True, slots=True)
class Hang:
    """These local ranks have stood at `step` for `waited_s` seconds; the first is named for it.

    `certain`: nothing else can be the cause. `late`: others have had their time to say that it is theirs.
    `own`: in uninterruptible sleep. `waiting`: done with their part of a snapshot that others have not completed.
    """

    ranks: tuple[int, ...]
    step: int
    waited_s: float
    longest_s: float | None
    certain: bool = False
    late: bool = False
    own: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()

    def blame(self, answering: Container[int]) -> Hang | None:
        """`answering`: ranks whose main thread runs Python code, so is in no collective. None: too early to tell."""
        if self.certain:
            return self
        active = tuple(rank for rank in self.ranks if rank not in self.waiting)
        found = tuple(rank for rank in active if rank in self.own or rank in answering)
        if not found and not self.late:
            return None
        ranks = found or active or self.ranks
        return Hang(ranks, self.step, self.waited_s, self.longest_s, late=self.late, own=self.own)

    def __str__(self) -> str:
        where = "before its first step" if self.step == NONE else f"at step {self.step}"
        steps = f", where steps took {self.longest_s:.3g} s at most" if self.longest_s else ""
        what = "stopped by a signal" if self.certain else "no progress"
        if self.ranks[0] in self.own:
            what += ", in uninterruptible sleep,"
        alike = f"; local ranks {', '.join(map(str, self.ranks[1:]))} alike" if len(self.ranks) > 1 else ""
        return f"hangs {where}: {what} for {self.waited_s:.0f} s{steps}{alike}"


@dataclass(slots=True)
class _Known:
    """What is remembered of a rank; times are of the watch's own clock."""

    words: tuple[int, ...]
    moved: float
    began: float | None = None  # when its step was first seen; None: time passed in it that is none of the step's
    steps: int = 0
    stopped: float | None = None


class Watch:
    """Of one round, whose first step is `start`. `look` says who is suspected."""

    def __init__(self, bounds: Bounds, start: int) -> None:
        self._bounds, self._start = bounds, start
        self._clock, self._looked = 0.0, math.inf
        self._ranks: dict[int, _Known] = {}
        self._first: float | None = None
        self._later: float | None = None

    @property
    def longest_s(self) -> float | None:
        """The longest step that was seen, None before the first is done; 0 if only shorter ones than a look."""
        return self._first if self._later is None else self._later

    def look(self, now: float, sights: Mapping[int, Sight], committed: int, held: bool) -> Hang | None:
        """`sights` by local rank. `committed`: newest step committed. `held`: the ranks are to park, in a time of its
        own. `now` is monotonic."""
        self._clock += min(max(0.0, now - self._looked), MAX_LOOK_S)
        self._looked = now
        excused = held or any(sight.state == TRACED for sight in sights.values())
        for rank, sight in sights.items():
            self._note(rank, sight, committed, excused)
        if excused:
            return None
        here = {rank: sight for rank, sight in sights.items() if not _idle(sight)}
        stopped = {rank: self._clock - since for rank in here if (since := self._ranks[rank].stopped) is not None}
        if stopped:
            bound = self._bounds.stopped(self.longest_s)
            return next((self._stopped(rank, here[rank]) for rank in stopped if stopped[rank] >= bound), None)
        return self._still(here, committed)

    def _note(self, rank: int, sight: Sight, committed: int, excused: bool) -> None:
        words = (sight.started, sight.parked, sight.sealed, committed)
        known = self._ranks.get(rank)
        if known is None:
            known = self._ranks[rank] = _Known((NONE, NONE, NONE, NONE), self._clock)
        if excused or _idle(sight):
            known.moved, known.began, known.stopped = self._clock, None, None
        else:
            since = self._clock if known.stopped is None else known.stopped
            known.stopped = since if sight.state == STOPPED else None
        if words != known.words:
            known.moved = self._clock
        if sight.started != known.words[0]:
            self._step_done(known)
            if sight.started > self._start:
                self._first = self._first or 0.0
            known.began = None if excused or _idle(sight) else self._clock
        known.words = words

    def _step_done(self, known: _Known) -> None:
        if known.began is None:
            return
        seconds, known.steps = self._clock - known.began, known.steps + 1
        if known.steps == 1:
            self._first = max(self._first or 0.0, seconds)
        else:
            self._later = max(self._later or 0.0, seconds)

    def _stopped(self, rank: int, sight: Sight) -> Hang:
        waited = self._clock - (self._ranks[rank].stopped or 0.0)
        return Hang((rank,), sight.started, waited, self.longest_s, certain=True)

    def _still(self, here: Mapping[int, Sight], committed: int) -> Hang | None:
        bound = self._bounds.still(self.longest_s)
        waited = {rank: self._clock - self._ranks[rank].moved for rank, sight in here.items() if sight.started != NONE}
        overdue = [rank for rank in waited if waited[rank] >= bound]
        if not overdue:
            return None
        step = min(here[rank].started for rank in overdue)
        ranks = tuple(rank for rank in sorted(overdue) if here[rank].started == step)
        longest_wait = max(waited[rank] for rank in ranks)
        return Hang(
            ranks,
            step,
            longest_wait,
            self.longest_s,
            late=longest_wait >= 1.5 * bound,
            own=frozenset(rank for rank in ranks if here[rank].state == SLEEPING),
            waiting=frozenset(rank for rank in ranks if here[rank].sealed > committed),
        )


def _idle(sight: Sight) -> bool:
    """Parked before a step, or done with all."""
    return sight.started == DONE or (sight.started != NONE and sight.parked == sight.started)
