"""Replicas: those of which the first counts, and those that should be equal to the bit and are not.

The latter are names that collide over stages, or ranks that drifted. They are found out cheaply: nodes that hold the
same regions report one digest of the checksums of all of them, and only where those differ are checksums compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.shared import Boxes, SharedRegions, parted


@dataclass(frozen=True, slots=True)
class Copied:
    """One node's copy of a region, and the checksum of its bytes."""

    node: str
    fqn: str
    region: Region
    checksum: int


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Nodes that hold different bytes of one region: groups of nodes with equal ones, the largest first."""

    fqn: str
    region: Region
    nodes: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        groups = " against ".join(", ".join(group) for group in self.nodes)
        return (
            f"{self.fqn} {self.region} differs between the replicas on nodes {groups}: some rank has changed it by "
            "itself, or a machine computes wrongly; if two stages use one name for different tensors give them global "
            "names, if it may differ (as buffers under DDP) declare replicas='first'"
        )


Place = tuple[str, Region]
"""A region of a tensor, by its name."""
Groups = Mapping[str, tuple[Place, ...]]
"""What a node has that others have, too: by the key of all that have it, which is the same on each of them."""


def alike(layout: Layout, config: ParallelConfig, workers: tuple[int, ...], place: int) -> Groups:
    """What the node at `place` holds, and others too, to the bit: whole regions of tensors whose replicas `agree`.

    `workers`: how many ranks each node has, rank 0's node first.
    """
    return layout.remember(("alike", config, workers, place), lambda: _alike(layout, config, workers, place))


def _alike(layout: Layout, config: ParallelConfig, workers: Sequence[int], place: int) -> Groups:
    classes: dict[int, tuple[Boxes, list[int]]] = {}
    mine: Boxes = {}
    first = 0
    for number, count in enumerate(workers):
        shared = layout.regions_at((config, rank) for rank in range(first, first + count)).shared
        classes.setdefault(id(shared), (shared, []))[1].append(number)
        mine = shared if number == place else mine
        first += count
    groups: dict[tuple[int, ...], list[Place]] = {}
    for fqn in sorted(mine):
        if layout.spec(fqn).replicas != "agree":
            continue
        having = [(boxes[fqn], numbers) for boxes, numbers in classes.values() if fqn in boxes]
        for region in mine[fqn]:
            nodes = tuple(sorted(number for regions, numbers in having if region in regions for number in numbers))
            if len(nodes) > 1:
                groups.setdefault(nodes, []).append((fqn, region))
    return {_digest(repr(nodes).encode()): tuple(places) for nodes, places in groups.items()}


def digests(groups: Groups, checksums: Mapping[Place, int]) -> dict[str, str]:
    """One of each group, of the checksums of its regions."""
    return {
        key: _digest(b"".join(checksums[place].to_bytes(8, "little") for place in places))
        for key, places in groups.items()
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Split:
    """Nodes that reported different digests of the group `key` at `step`: those with equal ones together."""

    step: int
    key: str
    nodes: tuple[tuple[str, ...], ...]


class Comparison:
    """Of the digests that the nodes of one round report, step by step."""

    def __init__(self, nodes: Collection[str] = ()) -> None:
        self.expected = frozenset(nodes)
        self._reported: dict[int, dict[str, Mapping[str, str]]] = {}
        self._splits: dict[str, int] = {}

    def report(self, node: str, step: int, found: Mapping[str, str]) -> list[Split]:
        """Returns what is worth a look: the 1st, 2nd, 4th, 8th, … step at which a group is split."""
        self._reported.setdefault(step, {})[node] = found
        return self.settle()

    def settle(self) -> list[Split]:
        """Compare the steps that all expected nodes have reported."""
        nodes = self.expected
        whole = [n for n, found in self._reported.items() if 0 < len(nodes) <= len(found) and nodes <= found.keys()]
        splits = [split for step in sorted(whole) for split in self._compare(step, self._reported.pop(step))]
        if whole:  # what is older will never be whole: a node has reported newer steps already
            self._reported = {step: found for step, found in self._reported.items() if step > max(whole)}
        return splits

    def _compare(self, step: int, reported: Mapping[str, Mapping[str, str]]) -> list[Split]:
        kinds: dict[str, dict[str, list[str]]] = {}
        for node in sorted(self.expected):
            for key, digest in reported[node].items():
                kinds.setdefault(key, {}).setdefault(digest, []).append(node)
        found = []
        for key in [key for key, kind in kinds.items() if len(kind) > 1]:
            count = self._splits[key] = self._splits.get(key, 0) + 1
            if count & (count - 1) == 0:
                found.append(Split(step, key, tuple(map(tuple, kinds[key].values()))))
        return found


def disagreements(copies: Iterable[Copied]) -> tuple[Disagreement, ...]:
    """The regions of which two nodes hold different bytes, by name. `copies`: of those that should be `alike`."""
    found: dict[Place, dict[int, list[str]]] = {}
    for copy in copies:
        found.setdefault((copy.fqn, copy.region), {}).setdefault(copy.checksum, []).append(copy.node)
    return tuple(
        Disagreement(
            fqn, region, tuple(sorted((tuple(sorted(nodes)) for nodes in found[fqn, region].values()), key=_size))
        )
        for fqn, region in sorted(found)
        if len(found[fqn, region]) > 1
    )


def _size(nodes: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    return -len(nodes), nodes


def first_only(
    layout: Layout, holders: Mapping[str, Boxes], ranks: Mapping[str, Sequence[tuple[ParallelConfig, int]]]
) -> dict[str, Boxes]:
    """`holders`, each element of a tensor of which the `first` replica counts left to one node alone.

    That is the living node with the lowest of the `ranks` that have the element; all others fetch it from there, so
    that after a recovery all have one value. The lowest rank has coordinate 0 on every axis that holds replicas.
    """
    names = [spec.fqn for spec in layout.tensors if spec.replicas == "first" and spec.at is None]
    if not names:
        return dict(holders)
    won: dict[str, dict[str, tuple[Region, ...]]] = {}
    for fqn in names:
        lowest: list[tuple[float, str, tuple[Region, ...]]] = []
        for node in holders:
            lowest.append((math.inf, node, holders[node].get(fqn, ())))
            lowest += [(rank, node, layout.regions_of(config, rank).get(fqn, ())) for config, rank in ranks[node]]
        taken: list[Region] = []
        for _, node, regions in sorted(lowest):
            held = holders[node].get(fqn, ())
            rest = [box for region in regions if region in held for box in subtract(region, taken)]
            if rest:
                won.setdefault(node, {}).setdefault(fqn, ())
                won[node][fqn] += tuple(rest)
                taken += rest
    others: dict[int, Boxes] = {}  # nodes that won nothing and were equal stay one object
    left: dict[str, Boxes] = {}
    for node, boxes in holders.items():
        shared, own = parted(boxes)
        if id(shared) not in others:
            others[id(shared)] = {fqn: regions for fqn, regions in shared.items() if fqn not in names}
        left[node] = SharedRegions({**others[id(shared)], **won[node]} if node in won else others[id(shared)], own)
    return left
