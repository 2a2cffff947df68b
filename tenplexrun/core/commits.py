"""When a snapshot is committed: once every node of its round has reported it sealed."""

from __future__ import annotations

from collections.abc import Iterable


class Commits:
    """Counts reports of one round. Ranks start a snapshot only when the fate of the one before is known, so the
    reports of a node come in the order of steps, and the least of all nodes' newest is sealed everywhere."""

    def __init__(self, round_number: int) -> None:
        self.round = round_number
        self.committed: int | None = None
        self._nodes: frozenset[str] | None = None
        self._newest: dict[str, int] = {}

    def expect(self, nodes: Iterable[str]) -> int | None:
        """The nodes of the round are known now. Returns a step that is committed by that, if any."""
        self._nodes = frozenset(nodes)
        return self._advance()

    def sealed(self, node: str, step: int) -> int | None:
        """`node` has sealed its part at `step`. Returns the step if it is committed by that, else None."""
        self._newest[node] = max(step, self._newest.get(node, step))
        return self._advance()

    def _advance(self) -> int | None:
        if self._nodes is None or not self._nodes <= self._newest.keys():
            return None
        step = min(self._newest[node] for node in self._nodes)
        if self.committed is not None and step <= self.committed:
            return None
        self.committed = step
        return step
