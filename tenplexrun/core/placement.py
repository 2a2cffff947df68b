"""Which node takes which block of ranks, so that the least bytes move.

Ranks are dealt to nodes in blocks, in order. Considered are the permutations of blocks of equal size: a tensor-parallel
group that lies in a block stays inside one node. That is an assignment problem for each size; `Assign` solves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region, disjoint, subtract
from tenplexrun.core.shared import Boxes, parted

Assign: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[int]]
"""Of a square cost matrix: for each row its column, all different, with the least sum. A library does it: core is pure
Python, so the solver is an argument (`tenplexrun.assignment.least_cost`)."""

EXACT = 1 << 52
"""Costs stay below: solvers count in float64."""

Order = tuple[tuple[str, int], ...]
"""(node, number of workers) in the order in which ranks are dealt."""


def place(
    layout: Layout,
    config: ParallelConfig,
    order: Sequence[tuple[str, int]],
    holders: Mapping[str, Boxes],
    assign: Assign,
    before: Mapping[str, int] | None = None,
    fixed: Collection[str] = (),
) -> Order:
    """`order` with nodes of equal size exchanged so that the least bytes move; never more than as it was.

    Of placements that move the same, the one where most nodes have the first rank they had `before`. Nodes in `fixed`
    stay where they are. Raises LayoutError where `config` cannot be laid out.
    """
    movement = _Movement(layout, config, holders)
    placed = list(order)
    blocks: dict[int, list[tuple[int, int]]] = {}  # by size: (place in `order`, first rank)
    first_rank = 0
    for index, (node, num_workers) in enumerate(order):
        if node not in fixed:
            blocks.setdefault(num_workers, []).append((index, first_rank))
        first_rank += num_workers
    for size, found in sorted(blocks.items()):
        nodes = [order[index][0] for index, _ in found]
        costs = [[movement.missing(node, range(first, first + size)) for _, first in found] for node in nodes]
        moved = [[(before or {}).get(node) != first for _, first in found] for node in nodes]
        for row, column in enumerate(_solve(costs, moved, assign)):
            placed[found[column][0]] = (nodes[row], size)
    return tuple(placed)


def _solve(costs: Sequence[Sequence[int]], moved: Sequence[Sequence[bool]], assign: Assign) -> Sequence[int]:
    """The column of each row: least bytes, then fewest nodes with new ranks."""
    count = len(costs)
    scale = -(-max(max(row) for row in costs) * (count + 1) // EXACT) or 1
    joint = [
        [cost // scale * (count + 1) + change for cost, change in zip(row, changes, strict=True)]
        for row, changes in zip(costs, moved, strict=True)
    ]
    identity = range(count)
    if sum(joint[row][row] for row in identity) == sum(min(row) for row in joint):
        return identity
    found = assign(joint)

    def total(columns: Sequence[int]) -> tuple[int, int]:
        pairs = list(enumerate(columns))
        return sum(costs[row][column] for row, column in pairs), sum(moved[row][column] for row, column in pairs)

    return min(identity, found, key=total)


class _Movement:
    """Bytes that a node would have to fetch for a block of ranks. Equal nodes and equal blocks are counted once."""

    def __init__(self, layout: Layout, config: ParallelConfig, holders: Mapping[str, Boxes]) -> None:
        self._layout, self._config, self._holders = layout, config, holders
        self._blocks: dict[range, Boxes] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._elements: dict[tuple[int, int], tuple[int, object]] = {}

    def missing(self, node: str, ranks: range) -> int:
        if ranks not in self._blocks:
            self._blocks[ranks] = self._layout.regions_at((self._config, rank) for rank in ranks).shared
        needed, held = self._blocks[ranks], parted(self._holders.get(node, {}))[0]
        key = (id(needed), id(held) if held else 0)
        if key not in self._bytes:
            self._bytes[key] = sum(
                self._missing(boxes, held.get(fqn, ())) * item_bytes(self._layout.spec(fqn).dtype)
                for fqn, boxes in needed.items()
            )
        return self._bytes[key]

    def _missing(self, needed: tuple[Region, ...], held: tuple[Region, ...]) -> int:
        if needed is held:
            return 0
        key = (id(needed), id(held))
        if key not in self._elements:
            left = [rest for region in disjoint(needed) for rest in subtract(region, held)]
            self._elements[key] = (sum(region.num_elements for region in left), (needed, held))
        return self._elements[key][0]
