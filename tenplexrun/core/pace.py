"""When snapshots are taken. Rank 0 decides, step by step, and all ranks follow its words: none takes one alone.

A word is said about one step, and names the next step that there will be a word about; in between no rank asks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tenplexrun.core.control import NONE

MAX_GAP = 32
"""Steps between two words at most: steps may become slower."""
AUTO_SHARE = 0.02
"""Of the time, for `auto`: what writing snapshots may cost the training."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Each `steps` steps, or each `seconds`, or, with neither, as often as costs no more than `AUTO_SHARE`."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Interval:
        """ "5", "30s" or "auto". Raises ValueError, for people."""
        if text == "auto":
            return cls()
        if not re.fullmatch(r"\d+|\d+(\.\d+)?s", text, re.ASCII):
            raise ValueError(f"{text!r} is neither a number of steps, as 500, nor of seconds, as 30s")
        number = text.removesuffix("s")
        every = cls(steps=int(number)) if number == text else cls(seconds=float(number))
        if not 0 < (every.steps or every.seconds or 0) < float("inf"):
            raise ValueError(f"{text!r} is not above 0")
        return every

    def __str__(self) -> str:
        return "auto" if self == Interval() else f"{self.seconds:g}s" if self.steps is None else str(self.steps)


@dataclass(frozen=True, slots=True)
class Word:
    """Whether all take the snapshot of the step that this is about; and the next step that there is a word about."""

    take: bool
    next: int


class Turns:
    """One rank's part in a round that began with step `start`: whose snapshots are due, and into which slot they go.

    `by_word`: as rank 0 says; else every so many steps. All ranks ask the same, so all take the same turns.
    """

    def __init__(self, every: Interval, start: int, by_word: bool) -> None:
        self.sealed = NONE
        """The newest snapshot that this rank has written its part of. The next waits until that is committed: then the
        other slot holds nothing that may still be needed."""
        self.slot = 0
        """Where the next one goes."""
        self.start = start
        self._every, self._by_word = every, by_word
        self._next = start + 1

    def asks(self, step: int) -> bool:
        """Whether there is a word about the boundary before `step`; `hear` it before anything else."""
        return self._by_word and step == self._next

    def hear(self, word: Word) -> None:
        self._next = word.next

    def due(self, step: int) -> bool:
        """Without words: whether the snapshot of the state before `step` is due; what was restored is there already."""
        every = self._every.steps
        return not self._by_word and step > self.start and every is not None and step % every == 0

    def take(self, step: int) -> int:
        """The slot for the snapshot before `step`, which is this rank's newest from now on."""
        taken = self.slot
        self.sealed, self.slot = step, 1 - taken
        return taken


class Pace:
    """Rank 0's decisions in one round, which began with step `start` at `now` (seconds of any clock).

    The first boundary is always taken: a change of nodes may have left too few copies. While the last snapshot is not
    committed the next one waits for a later step; if that took longer than a step, its links then rest as long again.
    """

    def __init__(self, every: Interval, start: int, now: float) -> None:
        self._every = every
        self._looked, self._looked_at = start, now
        self._step_s = 0.0
        self._taken_at: float | None = None
        self._cost_s = 0.0
        self._was_busy = False
        self._rest_until = now

    def decide(self, step: int, now: float, busy: bool) -> Word:
        """About the boundary before `step`. `busy`: the last snapshot is not committed yet."""
        self._step_s = max(0.0, now - self._looked_at) / max(1, step - self._looked)
        self._looked, self._looked_at = step, now
        if self._was_busy and not busy and self._taken_at is not None:
            self._rest_until = now + (now - self._taken_at)
        self._was_busy = busy
        due_at = self._due_at(now)
        if busy or now < max(due_at, self._rest_until):
            return Word(False, step + (1 if busy else self._gap(max(due_at, self._rest_until) - now)))
        self._taken_at = now
        return Word(True, self._following(step))

    def cost(self, seconds: float) -> None:
        """How long the snapshot that was decided last has kept this rank from training."""
        self._cost_s = seconds

    def _interval(self) -> float:
        return self._cost_s / AUTO_SHARE if self._every.seconds is None else self._every.seconds

    def _due_at(self, now: float) -> float:
        if self._taken_at is None or self._every.steps is not None:
            return now
        return self._taken_at + self._interval()

    def _following(self, step: int) -> int:
        if self._every.steps is not None:
            return step + self._every.steps - step % self._every.steps
        return step + self._gap(self._interval())

    def _gap(self, seconds: float) -> int:
        """Half of the steps that fit into it: what is left is looked at again."""
        if self._step_s <= 0:
            return 1
        return max(1, min(MAX_GAP, int(seconds / self._step_s / 2)))
