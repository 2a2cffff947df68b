"""PURE: which rows a data-parallel rank reads from a position of the global order to the end of its epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tenplexrun.core.order import DataOrder, Ids, Share, Weights, deal

_BLOCK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of a view, from position `start`: `full_steps` of global_batch rows, then one of `tail_rows` if any."""

    order: DataOrder
    dp_rank: int
    dp_size: int
    start: int
    full_steps: int
    tail_rows: int

    @property
    def end(self) -> int:
        """`consumed` after the last step."""
        return self.start + self.full_steps * self.order.global_batch + self.tail_rows

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Rows of this rank in each of the full steps, and in the last one."""
        return self._deal(self.order.global_batch).rows, self._deal(self.tail_rows).rows

    @property
    def num_rows(self) -> int:
        full, tail = self.batch_sizes
        return full * self.full_steps + tail

    def ids(self, first: int, count: int) -> Ids:
        """Sample ids of the rows [first, first + count). Not to be written to."""
        if not count:
            return np.empty(0, dtype=np.int64)
        blocks = range(first // _BLOCK_ROWS, (first + count - 1) // _BLOCK_ROWS + 1)
        found = [_ids_of_block(self, number) for number in blocks]
        skipped = first - blocks[0] * _BLOCK_ROWS
        return (found[0] if len(found) == 1 else np.concatenate(found))[skipped : skipped + count]

    def weights(self, first: int, count: int) -> Weights:
        """Weights of these rows."""
        full, tail = self._deal(self.order.global_batch), self._deal(self.tail_rows)
        step, within = self._steps(first, count)
        last = step == self.full_steps
        real = within < np.where(last, tail.real, full.real)
        size = np.where(last, max(self.tail_rows, 1), self.order.global_batch)
        return np.where(real, self.dp_size / size, 0.0)

    def positions(self, first: int, count: int) -> Ids:
        """Where these rows are in the global order."""
        full, tail = self._deal(self.order.global_batch), self._deal(self.tail_rows)
        step, within = self._steps(first, count)
        offsets = np.where(step == self.full_steps, tail.offsets(within), full.offsets(within))
        return self.start + step * self.order.global_batch + offsets

    def _steps(self, first: int, count: int) -> tuple[Ids, Ids]:
        """The step of each row, and which of its rows it is."""
        row = np.arange(first, first + count, dtype=np.int64)
        full, _ = self.batch_sizes
        step = np.minimum(row // full, self.full_steps)
        return step, row - step * full

    def begin_of(self, row: int) -> int:
        """Where the step of a row begins in the order."""
        return self.start + min(row // self.batch_sizes[0], self.full_steps) * self.order.global_batch

    def cut(self, max_rows: int) -> Window:
        """As many of the steps as have no more rows than that, at least one."""
        most = max(1, max_rows // self.batch_sizes[0])
        if max_rows >= self.num_rows or self.full_steps < most:
            return self
        return replace(self, full_steps=most, tail_rows=0)

    def at_epoch(self, epoch: int) -> Window:
        """The window of a later epoch, as it will be if the job goes on at this global batch."""
        start = epoch * self.order.num_samples
        if self.order.tail == "wrap":
            start = self.start + -(-(start - self.start) // self.order.global_batch) * self.order.global_batch
        return window(self.order, self.dp_rank, self.dp_size, start)

    def _deal(self, num_rows: int) -> Share:
        return deal(num_rows, self.order.micro_batch, self.dp_rank, self.dp_size)


def window(order: DataOrder, dp_rank: int, dp_size: int, consumed: int) -> Window:
    """The steps from `consumed` that begin in its epoch (the next one, if tail="drop" leaves none). Raises DataError
    for impossible arguments."""
    deal(order.global_batch, order.micro_batch, dp_rank, dp_size)
    start = order.step(consumed).start
    batch, left = order.global_batch, order.num_samples - start % order.num_samples
    full, tail = divmod(left, batch)
    if order.tail == "wrap":
        full, tail = full + (tail > 0), 0
    elif order.tail == "drop":
        tail = 0
    return Window(order, dp_rank, dp_size, start, full, tail)


@lru_cache(maxsize=128)  # files are read from their beginning; to permute few places takes as long as to permute many
def _ids_of_block(shown: Window, number: int) -> Ids:
    first = number * _BLOCK_ROWS
    return shown.order.sample_at(shown.positions(first, min(_BLOCK_ROWS, shown.num_rows - first)))
