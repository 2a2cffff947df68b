"""Buddies: which node also holds what of other nodes, so that every region of a snapshot is on enough distinct nodes.

Copies that data parallelism makes anyway count; only what is short of them goes to buddies. The state of single mesh
coordinates (random streams) goes along where its node has something else to give, and is derived anew otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.shared import Boxes, SharedRegions

Cell = tuple[Region, tuple[int, ...], int]
"""A box of one tensor, the places of the nodes that hold all of it, ascending, and how many elements it has."""


@dataclass(frozen=True, slots=True)
class Owed:
    """A region that a node has to hold for the nodes at `holders`, whose ranks have it. `num_bytes`: its size."""

    fqn: str
    region: Region
    num_bytes: int
    holders: tuple[int, ...]


def buddies(
    layout: Layout, config: ParallelConfig, workers: tuple[int, ...], replicas: int
) -> tuple[tuple[Owed, ...], ...]:
    """For each node what it owes, sorted. `workers`: how many ranks each has, rank 0's node first.

    Each region is then on min(replicas, nodes) distinct nodes, none of them twice. Dealt by bytes, whole groups of
    regions with the same holders to few partners, from the nearest following node on. The same on every node.
    """
    return layout.remember(
        ("buddies", config, workers, replicas), lambda: _deal(layout, config, workers, min(replicas, len(workers)))
    )


def regions_owed(layout: Layout, owed: Sequence[Owed]) -> SharedRegions:
    """As `Layout.regions_at` gives what ranks hold."""
    found: dict[str, list[Region]] = {}
    for one in owed:
        found.setdefault(one.fqn, []).append(one.region)
    return layout.together([{fqn: layout.interned(tuple(regions)) for fqn, regions in found.items()}])


def _deal(
    layout: Layout, config: ParallelConfig, workers: tuple[int, ...], copies: int
) -> tuple[tuple[Owed, ...], ...]:
    groups = _short(layout, config, workers, copies)
    sizes = {holders: sum(one.num_bytes for one in group) for holders, group in groups.items()}
    share = -(-sum(size * (copies - len(holders)) for holders, size in sizes.items()) // len(workers))
    load = [0] * len(workers)
    dealt: list[list[Owed]] = [[] for _ in workers]
    for holders in sorted(groups, key=lambda holders: (-sizes[holders], holders)):
        taken = [set(holders) for _ in groups[holders]]
        for _ in range(copies - len(holders)):
            partner: int | None = None
            for one, nodes in zip(groups[holders], taken, strict=True):
                if partner is None or partner in nodes or load[partner] >= share:
                    free = (place for place in range(len(workers)) if place not in nodes)
                    partner = min(free, key=lambda place: (load[place], (place - holders[0]) % len(workers)))
                nodes.add(partner)
                load[partner] += one.num_bytes
                dealt[partner].append(one)
    return tuple(tuple(sorted(owed, key=lambda one: (one.fqn, one.region.offsets))) for owed in dealt)


def _short(
    layout: Layout, config: ParallelConfig, workers: Sequence[int], copies: int
) -> dict[tuple[int, ...], list[Owed]]:
    """What is on fewer than `copies` nodes, by its holders."""
    held, first = [], 0
    for count in workers:
        held.append(layout.regions_at((config, rank) for rank in range(first, first + count)))
        first += count
    groups: dict[tuple[int, ...], list[Owed]] = {}
    for parts, along in (([boxes.shared for boxes in held], False), ([boxes.own for boxes in held], True)):
        givers = {place for holders in groups for place in holders}
        for fqn, cells in _cells(layout, parts):
            item = item_bytes(layout.spec(fqn).dtype)
            for region, holders, num_elements in cells:
                if len(holders) < copies and (not along or givers.intersection(holders)):
                    groups.setdefault(holders, []).append(Owed(fqn, region, num_elements * item, holders))
    return groups


def _cells(layout: Layout, held: Sequence[Boxes]) -> Iterator[tuple[str, list[Cell]]]:
    """All tensors in disjoint boxes with their holders. Nodes and tensors that are alike are looked at once."""
    classes: dict[int, tuple[Boxes, list[int]]] = {}
    for place, boxes in enumerate(held):
        classes.setdefault(id(boxes), (boxes, []))[1].append(place)
    by_tensor: dict[str, list[tuple[tuple[Region, ...], list[int]]]] = {}
    for boxes, places in classes.values():
        for fqn, regions in boxes.items():
            by_tensor.setdefault(fqn, []).append((regions, places))
    known: dict[tuple[tuple[int, int], ...], list[Cell]] = {}
    for fqn in sorted(by_tensor):
        alike = tuple((id(regions), id(places)) for regions, places in by_tensor[fqn])
        if alike not in known:
            holding: dict[Region, set[int]] = {}
            for regions, places in by_tensor[fqn]:
                for region in regions:
                    holding.setdefault(region, set()).update(places)
            known[alike] = _parted(layout.spec(fqn).whole.num_elements, holding)
        yield fqn, known[alike]


def _parted(num_elements: int, holding: Mapping[Region, set[int]]) -> list[Cell]:
    """Disjoint boxes, each with all that hold it: the regions themselves where none overlaps another."""
    if sum(region.num_elements for region in holding) == num_elements:  # together they are the tensor
        return [(region, tuple(sorted(holding[region])), region.num_elements) for region in sorted(holding)]
    cells: list[tuple[Region, frozenset[int]]] = []
    for region in sorted(holding):
        places, left, cut = frozenset(holding[region]), [region], []
        for box, others in cells:
            common = box.intersect(region)
            if common is None:
                cut.append((box, others))
                continue
            cut.append((common, others | places))
            cut.extend((rest, others) for rest in subtract(box, [common]))
            left = [rest for part in left for rest in subtract(part, [common])]
        cells = cut + [(rest, places) for rest in left]
    return [(box, tuple(sorted(places)), box.num_elements) for box, places in sorted(cells, key=lambda cell: cell[0])]
