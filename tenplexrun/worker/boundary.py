"""What happens between two steps: snapshots, and stopping where all ranks stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tenplexrun.core.control import NONE
from tenplexrun.worker.agent import Agent
from tenplexrun.worker.slots import SlotWriter

Read = Callable[[int], tuple[dict[str, torch.Tensor], dict[str, Any]]]
"""Local tensors by fqn, and the encoded values, as they are before the given step."""


class Boundary:
    """The boundaries of one round on one rank.

    Every rank passes the same boundaries in the same order, so all take the same snapshots and use the same slots
    without a word to each other. A slot is written only when the fate of the snapshot in the other one is known, and
    while nobody copies it for a durable checkpoint.
    """

    def __init__(self, agent: Agent, writer: SlotWriter, every: int, read: Read) -> None:
        self._agent, self._writer, self._every, self._read = agent, writer, every, read
        self._sealed, self._slot = NONE, 1

    def before(self, step: int, start: int) -> None:
        """All steps before `step` are done; the round began with `start`. Returns when `step` may run.

        Raises RoundStopped when the round ends here.
        """
        self.after(step, start)
        if not self._agent.may_start(step):
            self._snapshot(step)
            self._agent.park(step)

    def after(self, step: int, start: int) -> None:
        """Take the snapshot of the state before `step`, if one is due; what was restored is there already."""
        if step % self._every == 0 and step > start:
            self._snapshot(step)

    def finish(self, step: int, start: int) -> None:
        """Take the job's last snapshot: it becomes a durable checkpoint, if there are any."""
        if step > start:
            self._snapshot(step, last=True)

    def _snapshot(self, step: int, last: bool = False) -> None:
        if self._sealed == step:
            return
        page, slot = self._agent.page, 1 - self._slot
        self._agent.wait(lambda: page.committed >= self._sealed and page.pinned != slot, step)
        self._slot = slot
        tensors, values = self._read(step)
        self._writer.write(self._slot, tensors)
        self._sealed = step
        self._agent.sealed(step, self._slot, values, last)
