"""What happens between two steps: snapshots, and stopping where all ranks stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tenplexrun.core.pace import Pace, Turns, Word
from tenplexrun.worker.agent import Agent
from tenplexrun.worker.slots import SlotWriter

Read = Callable[[int], tuple[dict[str, torch.Tensor], dict[str, Any]]]
"""Local tensors by fqn, and the encoded values, as they are before the given step."""


class Store(Protocol):
    """What is used of torch's `Store`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Words:
    """Rank 0's decisions, as all ranks hear them through the process group's own key-value store."""

    def __init__(self, store: Store, agent: Agent, pace: Pace | None) -> None:
        """`pace`: rank 0 has it, and nobody else."""
        self._store, self._agent, self._pace = store, agent, pace
        self._said: list[int] = []

    def about(self, step: int, turns: Turns) -> Word:
        """The word about `step`. Raises RoundStopped."""
        key = f"word/{step}"
        if self._pace is not None:
            page = self._agent.page
            busy = page.committed < turns.sealed or page.pinned == turns.slot
            word = self._pace.decide(step, time.monotonic(), busy)
            self._store.set(key, json.dumps([word.take, word.next]))
            self._said.append(step)
            return word
        self._agent.wait(lambda: self._store.check([key]), step)
        take, following = json.loads(self._store.get(key))
        return Word(bool(take), int(following))

    def taken(self, committed: int, seconds: float) -> None:
        """A snapshot was taken, for which training stood still. All ranks have passed what is committed."""
        if self._pace is not None:
            self._pace.cost(seconds)
            for step in [step for step in self._said if step <= committed]:
                self._store.delete_key(f"word/{step}")
                self._said.remove(step)


class Boundary:
    """The boundaries of one round on one rank.

    Every rank passes the same boundaries in the same order, and takes the same snapshots: those of every so many
    steps, or those of which rank 0 says so (`words`), that of the step before which all have agreed to stop, and a last
    one where there are durable checkpoints. So all use the same slots. A slot is written only when the fate of the
    snapshot in the other one is known, and while nobody copies it for a durable checkpoint.
    """

    def __init__(self, agent: Agent, writer: SlotWriter, turns: Turns, words: Words | None, read: Read) -> None:
        """`words` are there where `turns` ask for them."""
        self._agent, self._writer, self._turns, self._words, self._read = agent, writer, turns, words, read

    def before(self, step: int) -> None:
        """All steps before `step` are done. Returns when it may run. Raises RoundStopped when the round ends here."""
        self.after(step)
        if not self._agent.may_start(step):
            self._agent.park(step, lambda: self._snapshot(step))

    def after(self, step: int) -> None:
        """Take the snapshot of the state before `step`, if one is due."""
        due = self._turns.due(step)
        if self._words is not None and self._turns.asks(step):
            word = self._words.about(step, self._turns)
            self._turns.hear(word)
            due = word.take
        if due:
            self._snapshot(step)

    def finish(self, step: int) -> None:
        """Take the job's last snapshot: it becomes a durable checkpoint, if there are any."""
        if step > self._turns.start:
            self._snapshot(step, last=True)

    def _snapshot(self, step: int, last: bool = False) -> None:
        page, before, slot = self._agent.page, self._turns.sealed, self._turns.slot
        if before == step:
            return
        began = time.monotonic()
        self._agent.wait(lambda: page.committed >= before and page.pinned != slot, step)
        tensors, values = self._read(step)
        self._turns.take(step)
        self._writer.write(slot, tensors)
        self._agent.sealed(step, slot, values, last)
        if self._words is not None:
            self._words.taken(before, time.monotonic() - began)
