"""Replicas that should be equal to the bit, and are not: names that collide over stages, or ranks that drifted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenplexrun.core.layout import Layout
from tenplexrun.core.regions import Region


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
