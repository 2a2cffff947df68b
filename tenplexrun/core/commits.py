"""When a snapshot is committed: once every node of its round has it sealed, and holds what it owes the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class News(NamedTuple):
    """Steps that just became known to be sealed on all nodes and have to be replicated, or committed; or None."""

    replicate: int | None = None
    commit: int | None = None


class Commits:
    """Counts reports of one round. Ranks start a snapshot only when the fate of the one before is known, so the
    reports of a node come in the order of steps, and the least of all nodes' newest is sealed everywhere."""

    def __init__(self, round_number: int) -> None:
        self.round = round_number
        self.committed: int | None = None
        self.sealed: int | None = None
        self._nodes: frozenset[str] | None = None
        self._sealed: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self.heard = -1
        """The newest step that an earlier decider has committed, as far as nodes have said."""

    def expect(self, nodes: Iterable[str]) -> News:
        """The nodes of the round are known now. Returns what is known by that."""
        self._nodes = frozenset(nodes)
        return self._advance()

    def report(self, node: str, step: int, held: bool, committed: int | None = None) -> News:
        """`node` has sealed its part at `step`; `held`: and has all that it owes of it. `committed`: the newest step
        that it knows an earlier decider to have committed. Returns what is new by that."""
        self.heard = max(self.heard, -1 if committed is None else committed)
        self._sealed[node] = max(step, self._sealed.get(node, step))
        if held:
            self._held[node] = max(step, self._held.get(node, step))
        return self._advance()

    @property
    def known(self) -> News:
        """What a node may have missed."""
        late = self.sealed is not None and (self.committed is None or self.sealed > self.committed)
        return News(self.sealed if late else None, self.committed)

    def _advance(self) -> News:
        sealed, held = self._newest(self._sealed), self._newest(self._held)
        best = max(self.heard, -1 if held is None else held)
        new_commit = best if best > (-1 if self.committed is None else self.committed) else None
        new_seal = sealed if sealed is not None and (self.sealed is None or sealed > self.sealed) else None
        self.committed = self.committed if new_commit is None else new_commit
        self.sealed = self.sealed if new_seal is None else new_seal
        done = new_seal is None or (self.committed is not None and new_seal <= self.committed)
        return News(None if done else new_seal, new_commit)

    def _newest(self, steps: dict[str, int]) -> int | None:
        """The newest step that all nodes have reported."""
        if self._nodes is None or not self._nodes <= steps.keys():
            return None
        return min((steps[node] for node in self._nodes), default=None)
