"""Who can give what: the regions of a tensor that are held, found by box, and how a node gets what it lacks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from tenplexrun.core.regions import Region, disjoint, subtract
from tenplexrun.core.shared import Boxes, parted

Copy = tuple[Region, tuple[int, ...]]
"""A held region and the numbers of the holders (groups of equal nodes) that have it, ascending."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a node gets one tensor, in elements. Tensors of one signature share it.

    `tiles`: the missing boxes, each with the holders that have all of it. `lost`: what nobody has.
    """

    needed_elements: int
    missing_elements: int
    tiles: tuple[Copy, ...]
    lost: tuple[Region, ...]


def geometry(needed: Sequence[Region], held: Sequence[Region], copies: CopyIndex) -> Geometry:
    """What is missing of `needed`, cut along the copies."""
    wanted = disjoint(needed)
    missing = [box for region in wanted for box in (subtract(region, held) if held else [region])]
    tiles: list[Copy] = []
    lost: list[Region] = []
    for box in missing:
        found = copies.tiles(box)
        tiles.extend(found)
        if sum(tile.num_elements for tile, _ in found) < box.num_elements:  # they are disjoint parts of the box
            lost.extend(copies.gaps(box))
    if len(missing) > 1:
        tiles.sort()
    return Geometry(
        sum(region.num_elements for region in wanted),
        sum(box.num_elements for box in missing),
        tuple(tiles),
        tuple(lost),
    )


class Copies:
    """All that the living hold. Nodes that hold the same, as one object, are one class; so are owners of own state.

    `nodes`: the ids of each class, sorted.
    """

    def __init__(self, holders: Mapping[str, Boxes]) -> None:
        self.nodes: list[list[str]] = []
        by_tensor: dict[str, list[tuple[int, tuple[Region, ...]]]] = {}
        known: dict[int, int] = {}
        for node in sorted(holders):
            for index, boxes in enumerate(parted(holders[node])):
                if not boxes:
                    continue
                number = known.setdefault(id(boxes), len(self.nodes)) if index == 0 else len(self.nodes)
                if number == len(self.nodes):
                    self.nodes.append([])
                    for fqn, regions in boxes.items():
                        by_tensor.setdefault(fqn, []).append((number, regions))
                self.nodes[number].append(node)
        self._by_tensor = by_tensor
        self._kinds: dict[tuple[tuple[int, int], ...], int] = {}
        self._kind_of: dict[str, int] = {}
        self._indexes: dict[int, CopyIndex] = {}
        self._ways: dict[tuple[int, int, int], tuple[Geometry, object]] = {}
        self._groups: dict[tuple[int, ...], dict[tuple[int, str | None], tuple[str, ...]]] = {}

    def way(self, fqn: str, needed: tuple[Region, ...], held: tuple[Region, ...]) -> Geometry:
        """How a node that needs and holds these regions of a tensor gets it."""
        kind = self._kind(fqn)
        key = (kind, id(needed), id(held))  # regions of equal tensors are one object; it is kept, so ids stay good
        if key not in self._ways:
            found = geometry(sorted(needed), sorted(held), self._indexes[kind])
            self._ways[key] = (found, (needed, held))
        return self._ways[key][0]

    def groups(
        self, classes: tuple[int, ...], racks: Mapping[str, str]
    ) -> dict[tuple[int, str | None], tuple[str, ...]]:
        """The nodes of some classes by (class, rack)."""
        if classes not in self._groups:
            found: dict[tuple[int, str | None], list[str]] = {}
            for number in classes:
                for node in self.nodes[number]:
                    found.setdefault((number, racks.get(node)), []).append(node)
            self._groups[classes] = {group: tuple(nodes) for group, nodes in found.items()}
        return self._groups[classes]

    def _kind(self, fqn: str) -> int:
        """A number for where a tensor's copies are: the same for tensors that lie in the same way."""
        if fqn not in self._kind_of:
            copies = self._by_tensor.get(fqn, ())
            key = tuple((number, id(regions)) for number, regions in copies)
            kind = self._kinds.setdefault(key, len(self._kinds))
            self._kind_of[fqn] = kind
            if kind not in self._indexes:
                holding: dict[Region, list[int]] = {}
                for number, regions in copies:
                    for region in regions:
                        if not region.is_empty:
                            holding.setdefault(region, []).append(number)
                self._indexes[kind] = CopyIndex([(region, tuple(numbers)) for region, numbers in holding.items()])
        return self._kind_of[fqn]


class CopyIndex:
    """The distinct held regions of one tensor, as intervals of the first dim, below each those of the second, …

    Finding the boxes that overlap another takes time by their number where those of a dim do not overlap (any grid).
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = sorted(copies)
        self._root: _Tree = 0
        self._disjoint = True
        if self._copies:
            dims = len(self._copies[0][0].lengths)
            self._root, self._disjoint = _build(self._copies, range(len(self._copies)), 0, dims)

    def overlapping(self, box: Region) -> list[tuple[int, Region]]:
        """Numbers of the copies that have an element of `box`, and what each has of it; disjoint ones in order."""
        found: list[tuple[int, Region]] = []
        if isinstance(self._root, int):
            found.extend((number, box) for number in range(len(self._copies)))
        else:
            _find(self._root, box, (), (), found)
        return found

    def tiles(self, box: Region) -> list[Copy]:
        """`box`, as far as there are copies, in disjoint parts, sorted, each with the holders that have it whole."""
        found = self.overlapping(box)
        if self._disjoint:
            return [(common, self._copies[number][1]) for number, common in found]
        return _greedy(box, [(self._copies[number], common) for number, common in found])

    def gaps(self, box: Region) -> list[Region]:
        """What no copy has of `box`."""
        return subtract(box, [common for _, common in self.overlapping(box)])


def _greedy(box: Region, near: Sequence[tuple[Copy, Region]]) -> list[Copy]:
    """Copies that overlap one another: the largest parts first, so that there are few."""
    tiles: list[Copy] = []
    left = [box]
    for (region, _), _ in sorted(near, key=lambda one: (-one[1].num_elements, one[0][0])):
        for tile in [common for rest in left if (common := rest.intersect(region)) is not None]:
            holders = {holder for (other, having), _ in near if other.contains(tile) for holder in having}
            tiles.append((tile, tuple(sorted(holders))))
        left = [rest for part in left for rest in subtract(part, [region])]
    return sorted(tiles)


@dataclass(frozen=True, slots=True)
class _Level:
    """Intervals of one dim, by start; `below` has the next dim's level or the copy's number for each."""

    starts: list[int]
    stops: list[int]
    below: list[_Tree]
    ordered: bool
    """No interval overlaps the next, so that stops ascend too."""


_Tree: TypeAlias = "_Level | int"


def _build(copies: Sequence[Copy], numbers: Sequence[int], dim: int, dims: int) -> tuple[_Tree, bool]:
    """The tree over the copies with these numbers, and whether they are disjoint."""
    if dim == dims:
        return numbers[0], True
    groups: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        region = copies[number][0]
        groups.setdefault((region.offsets[dim], region.offsets[dim] + region.lengths[dim]), []).append(number)
    spans = sorted(groups)
    ordered = all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    built = [_build(copies, groups[span], dim + 1, dims) for span in spans]
    below = [tree for tree, _ in built]
    level = _Level([start for start, _ in spans], [stop for _, stop in spans], below, ordered)
    return level, ordered and all(disjoint for _, disjoint in built)


def _find(
    level: _Level, box: Region, offsets: tuple[int, ...], lengths: tuple[int, ...], found: list[tuple[int, Region]]
) -> None:
    """`offsets` and `lengths`: what `box` and the copies of `level` have in common of the dims outside it."""
    low = box.offsets[len(offsets)]
    high = low + box.lengths[len(offsets)]
    first = bisect_right(level.stops, low) if level.ordered else 0
    for place in range(first, bisect_left(level.starts, high)):
        start, stop = level.starts[place], level.stops[place]
        if stop > low:
            start = start if start > low else low
            length = (stop if stop < high else high) - start
            below = level.below[place]
            if isinstance(below, int):
                found.append((below, Region((*offsets, start), (*lengths, length))))
            else:
                _find(below, box, (*offsets, start), (*lengths, length), found)
