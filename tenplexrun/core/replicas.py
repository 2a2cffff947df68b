"""Replicas: those of which the first counts, and those that should be equal to the bit and are not.

The latter are names that collide over stages, or ranks that drifted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
            f"{self.fqn} {self.region} differs between replicas: {groups}; if two stages use one name for different "
            "tensors give them global names, if it may differ (as buffers under DDP) declare replicas='first'"
        )


def disagreements(layout: Layout, copies: Iterable[Copied]) -> tuple[Disagreement, ...]:
    """The regions of tensors with `agree` of which two nodes hold different bytes, by name."""
    found: dict[tuple[str, Region], dict[int, list[str]]] = {}
    for copy in copies:
        if layout.spec(copy.fqn).replicas == "agree":
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
