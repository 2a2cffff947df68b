"""A device's queue of copies, on the CPU."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch


class FakeCopies:
    """Runs what is queued in order, as far as `rng` likes at each call, and as far as a mark says when waited for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._queue, self._done, self._asked = rng, deque[Callable[[], object]](), 0, 0
        self.num_buffers = 0

    def buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_buffers += 1
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    def copy(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        assert dest.shape == source.shape
        self._queue.append(lambda: dest.copy_(source))
        self._asked += 1
        self._run(self._done + self._rng.randint(0, len(self._queue)))

    def mark(self) -> Callable[[], None]:
        upto = self._asked
        return lambda: self._run(upto)

    def _run(self, upto: int) -> None:
        while self._done < upto:
            self._queue.popleft()()
            self._done += 1
