"""Which node owns which extent of a dataset, planned anew for each round from who holds what by then.

An extent is a run of consecutive samples, numbered from 0: a dataset is a tensor of samples, its extents are regions of
it. All have `extent_bytes`, but the last, which may be shorter. Nodes share them as evenly as their budgets allow, each
is owned once, and of all such ways one is taken in which the nodes lack the fewest bytes of what they own. The same
inputs give the same owners on every node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

Spans = tuple[tuple[int, int], ...]
"""A set of numbers as (first, count), ascending."""

_EXTRA, _END = -1, -2  # vertices; classes are numbers from 0, nodes their names


def own(
    num_extents: int, extent_bytes: int, budgets: Mapping[str, int], held: Mapping[str, Collection[int]]
) -> dict[str, tuple[int, ...]]:
    """For each node with a budget (in bytes) the extents it owns, ascending. `held`: what nodes hold by now.

    Nodes own equally many or one more, but for those whose budget is below that. Extents have no owner only where all
    budgets are full.
    """
    nodes = sorted(budgets)
    room = {node: max(0, budgets[node]) // extent_bytes for node in nodes}
    level, extra = _level(num_extents, room)
    flow = _Flow()
    flow.arc(_EXTRA, _END, extra)
    for node in nodes:
        flow.arc(node, _END, min(room[node], level))
        flow.arc(node, _EXTRA, int(room[node] > level))
    owned: dict[str, list[int]] = {node: [] for node in nodes}
    classes = _classes(num_extents, nodes, held)
    for index, (able, numbers) in enumerate(classes):
        for node in able:
            flow.arc(index, node, len(numbers))
        flow.push(index, _END, len(numbers))
    for index, (able, numbers) in enumerate(classes):
        rest = iter(numbers)
        for node in able:
            owned[node] += islice(rest, flow.through(index, node))
    _deal(num_extents, owned, _loads(room, level, extra, {node for node in nodes if flow.through(node, _EXTRA)}))
    return {node: tuple(sorted(numbers)) for node, numbers in owned.items()}


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of a round: the address of each one's store, its budget in bytes, and, by dataset, what it held when
    the round was formed. `me` is this node."""

    me: str
    stores: Mapping[str, str]
    budgets: Mapping[str, int]
    held: Mapping[str, Mapping[str, Spans]]

    def to_json(self) -> dict[str, Any]:
        return {"me": self.me, "stores": dict(self.stores), "budgets": dict(self.budgets), "held": dict(self.held)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Placement:
        """Inverse of `to_json`. Raises KeyError, TypeError."""
        return cls(record["me"], record["stores"], record["budgets"], record["held"])


ALONE = Placement("", {"": ""}, {"": 1 << 62}, {})
"""A node without a job, which may hold everything."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who owns which extents of one dataset in a round. `small`: every node holds all of it, whoever owns what."""

    placement: Placement
    owned: Mapping[str, tuple[int, ...]]
    held: Mapping[str, frozenset[int]]
    owner: Mapping[int, str]
    wanted: frozenset[int]

    @classmethod
    def of(cls, placement: Placement, dataset: str, num_extents: int, extent_bytes: int, small: bool) -> Plan:
        packed = placement.held.get(dataset, {})
        held = {node: frozenset(numbers_in(packed.get(node, ()))) for node in placement.stores}
        owned = own(num_extents, extent_bytes, placement.budgets, held)
        owner = {number: node for node, numbers in owned.items() for number in numbers}
        return cls(placement, owned, held, owner, frozenset(range(num_extents) if small else owned[placement.me]))

    @property
    def mine(self) -> tuple[int, ...]:
        return self.owned[self.placement.me]

    def lacked(self) -> tuple[int, ...]:
        """What this node is to have and did not hold when the round was formed: the least that it has to fetch."""
        return lacking(self.wanted, self.held[self.placement.me])

    def sources(self, number: int) -> tuple[str, ...]:
        """Stores of other nodes that have this extent or will have it: its owner, then who held it before."""
        holders = [node for node in sorted(self.held) if number in self.held[node]]
        nodes = dict.fromkeys([*filter(None, [self.owner.get(number)]), *holders])
        return tuple(self.placement.stores[node] for node in nodes if node != self.placement.me)


def lacking(owned: Collection[int], held: Collection[int]) -> tuple[int, ...]:
    """What a node has to fetch, ascending."""
    return tuple(sorted(set(owned) - set(held)))


def spans(numbers: Iterable[int]) -> Spans:
    """Ascending numbers, packed."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return tuple(found)


def numbers_in(packed: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Inverse of `spans`."""
    for first, count in packed:
        yield from range(first, first + count)


def _level(num_extents: int, room: Mapping[str, int]) -> tuple[int, int]:
    """(level, extra): each node owns min(its room, level), and `extra` of those with more room one more."""
    low, high = 0, max(room.values(), default=0)
    while low < high:  # the highest level at which there are extents enough
        middle = (low + high + 1) // 2
        if sum(min(one, middle) for one in room.values()) <= num_extents:
            low = middle
        else:
            high = middle - 1
    left = num_extents - sum(min(one, low) for one in room.values())
    return low, min(left, sum(one > low for one in room.values()))


def _classes(
    num_extents: int, nodes: Collection[str], held: Mapping[str, Collection[int]]
) -> list[tuple[tuple[str, ...], list[int]]]:
    """The extents that somebody holds, by their holders. The short last one comes last: a flow grown from class to
    class never gives up what it has, so it is the one that has to move where one has to."""
    holders: dict[int, list[str]] = {}
    for node in sorted(nodes):
        for number in held.get(node, ()):
            holders.setdefault(number, []).append(node)
    found: dict[tuple[tuple[str, ...], bool], list[int]] = {}
    for number in sorted(holders):
        if number < num_extents:
            found.setdefault((tuple(holders[number]), number == num_extents - 1), []).append(number)
    return [(able, numbers) for (able, _), numbers in sorted(found.items(), key=lambda item: (item[0][1], item[1]))]


def _loads(room: Mapping[str, int], level: int, extra: int, taken: Collection[str]) -> dict[str, int]:
    """How many each node owns: one more for those that have `taken` one, then for the first others with room."""
    others = islice((node for node in room if room[node] > level and node not in taken), extra - len(taken))
    more = {*taken, *others}
    return {node: min(one, level) + (node in more) for node, one in room.items()}


def _deal(num_extents: int, owned: Mapping[str, list[int]], loads: Mapping[str, int]) -> None:
    """Fill each node up to its load with extents that nobody keeps, in runs."""
    kept = {number for numbers in owned.values() for number in numbers}
    rest = (number for number in range(num_extents) if number not in kept)
    for node, numbers in owned.items():
        numbers += islice(rest, loads[node] - len(numbers))


class _Flow:
    """A maximum flow, grown by shortest paths (Edmonds and Karp, 1972)."""

    def __init__(self) -> None:
        self._left: dict[int | str, dict[int | str, int]] = {}  # what an arc can still take; its reverse: what it has

    def arc(self, start: int | str, stop: int | str, capacity: int) -> None:
        self._left.setdefault(start, {})[stop] = capacity
        self._left.setdefault(stop, {}).setdefault(start, 0)

    def through(self, start: int | str, stop: int | str) -> int:
        return self._left[stop][start]

    def push(self, source: int | str, sink: int | str, amount: int) -> None:
        """As much of `amount` from `source` to `sink` as there is room for; what flows already goes on to flow."""
        while amount and (path := self._path(source, sink)):
            most = min(amount, *(self._left[start][stop] for start, stop in path))
            for start, stop in path:
                self._left[start][stop] -= most
                self._left[stop][start] += most
            amount -= most

    def _path(self, source: int | str, sink: int | str) -> list[tuple[int | str, int | str]]:
        came: dict[int | str, int | str] = {source: source}
        queue = deque([source])
        while queue and sink not in came:
            start = queue.popleft()
            for stop, left in self._left[start].items():
                if left and stop not in came:
                    came[stop] = start
                    queue.append(stop)
        path, at = [], sink
        while at in came and at != source:
            path.append((came[at], at))
            at = came[at]
        return path
