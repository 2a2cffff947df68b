"""Which rows of the global order a rank will need next, so that they are there before it asks. No IO, no clock.

The window is positions [reached, reached + limit) of the order. It is fetched in chunks of whole steps, small ones
first; what lies a little behind stays, for ranks that share the view and are not quite as far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tenplexrun.core.order import DataOrder, Ids

_MAX_STEPS = 64
_PARTS = 4
"""A chunk is at most this part of the window, and so much stays behind."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The steps [first, stop) in positions, and the ids of the rank's rows in them, ascending, each once."""

    first: int
    stop: int
    ids: Ids


@dataclass(slots=True)
class Ahead:
    """Of one data-parallel rank, from position `reached` on. `limit_rows`: of the window, of this rank's rows."""

    order: DataOrder
    rank: int
    size: int
    limit_rows: int
    reached: int
    fetched: int = -1
    _steps: int = 1

    def __post_init__(self) -> None:
        self.fetched = max(self.fetched, self.reached)

    @property
    def limit(self) -> int:
        """Of the window in positions: two steps at the least, and no more rows of the rank than there are samples."""
        return max(min(self.limit_rows, self.order.num_samples) * self.size, 2 * self.order.global_batch)

    @property
    def full(self) -> bool:
        return self.fetched >= self.reached + self.limit

    @property
    def kept_from(self) -> int:
        """What ends before this position is needed no more."""
        return self.reached - self.limit // _PARTS

    def reach(self, begin: int) -> None:
        """The rank reads the step at `begin`. The window begins anew where that is outside it."""
        if not self.kept_from <= begin <= self.fetched:
            self.fetched, self._steps = begin, 1
        self.reached = begin

    def next_chunk(self) -> Chunk | None:
        """What to fetch next; None while the window is full."""
        at, end = self.fetched, self.reached + self.limit
        parts: list[Ids] = []
        most = min(end, at + max(self.limit // _PARTS, 1))
        while at < most and len(parts) < self._steps:
            ids, _, _ = self.order.share(at, self.rank, self.size)
            parts.append(ids)
            at = self.order.step(at).stop
        return Chunk(self.fetched, at, np.unique(np.concatenate(parts))) if parts else None

    def done(self, chunk: Chunk) -> None:
        """`chunk` has been fetched."""
        if chunk.first == self.fetched:
            self.fetched, self._steps = chunk.stop, min(2 * self._steps, _MAX_STEPS)
