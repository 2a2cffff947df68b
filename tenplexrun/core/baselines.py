"""What a plan of least movement is measured against: moving everything, and moving by way of one node. Pure.

A run with --migrate-all or --central executes these; `tenplexctl plan --baselines` only counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tenplexrun.core.planner import Holders, NodePlan, ReconfigurationPlan, plan, plan_node
from tenplexrun.core.ptc import PTC
from tenplexrun.core.rounds import Way
from tenplexrun.core.validation import validate_part

_BEFORE = " as it was"


def migrate_all(target: PTC, holders: Holders, racks: Mapping[str, str] | None = None) -> ReconfigurationPlan:
    """Every node fetches all that its ranks need, also what it holds: from any holder, which it may be itself.

    Raises StateLostError that names every needed region without a living copy.
    """
    moves = plan(target, _apart(holders), _labels(racks))
    return ReconfigurationPlan({node: _renamed(part) for node, part in moves.parts.items()})


@dataclass(frozen=True, slots=True)
class Central:
    """First one node runs `gather`, all of the state that it lacks; then each other one its part of `scatter`."""

    gather: NodePlan
    scatter: ReconfigurationPlan

    @property
    def num_bytes(self) -> int:
        return self.gather.num_bytes + self.scatter.num_bytes


def central(target: PTC, holders: Holders, node: str) -> Central:
    """All state goes to `node`, and from there, to each node of the target, what its ranks need.

    Raises StateLostError that names every needed region without a living copy.
    """
    everything = _everything_on(node, target)
    gather = plan_node(node, everything, holders)
    return Central(gather, plan(target, _gathered(gather, everything)))


@dataclass(frozen=True, slots=True)
class Part:
    """What a node fetches: then it holds the state of `ranks`. With a `hub` it begins when that one holds the state of
    all. `lower_bound_bytes`: the least that any plan must bring here."""

    plan: NodePlan
    ranks: tuple[int, ...]
    lower_bound_bytes: int
    hub: str | None = None


def part_of(way: Way, node: str, target: PTC, holders: Holders, racks: Mapping[str, str] | None = None) -> Part:
    """The part of `node`, planned and proved; rank 0's node is the hub of what goes by way of one.

    Raises StateLostError that names every needed region without a living copy, LayoutError where the proof fails.
    """
    ranks, hub = tuple(rank for rank, name in enumerate(target.nodes) if name == node), target.nodes[0]
    least = plan_node(node, target, holders, racks)
    bound = least.lower_bound_bytes
    if way == "migrate-all":
        own = plan_node(node, target, _apart(holders), _labels(racks))
        validate_part(own, target, _apart(holders))
        return Part(_renamed(own), ranks, bound)
    if way == "central":
        everything = _everything_on(hub, target)
        gather = plan_node(hub, everything, holders)
        if node == hub:
            validate_part(gather, everything, holders)
            return Part(gather, tuple(range(target.config.world_size)), bound)
        gathered = _gathered(gather, everything)
        own = plan_node(node, target, gathered)
        validate_part(own, target, gathered)
        return Part(own, ranks, bound, hub)
    validate_part(least, target, holders)
    return Part(least, ranks, bound)


def _apart(holders: Holders) -> Holders:
    """So that nobody has what it needs."""
    return {f"{node}{_BEFORE}": held for node, held in holders.items()}


def _labels(racks: Mapping[str, str] | None) -> Mapping[str, str] | None:
    return {**racks, **{f"{node}{_BEFORE}": rack for node, rack in racks.items()}} if racks else None


def _everything_on(node: str, target: PTC) -> PTC:
    return replace(target, nodes=(node,) * target.config.world_size)


def _gathered(gather: NodePlan, everything: PTC) -> Holders:
    """What the node holds then."""
    regions = everything.regions_on(gather.node)
    return {gather.node: {fqn: boxes for fqn, boxes in regions.items() if fqn not in gather.absent}}


def _renamed(part: NodePlan) -> NodePlan:
    fetches = tuple(replace(fetch, source=fetch.source.removesuffix(_BEFORE)) for fetch in part.fetches)
    return replace(part, fetches=fetches)
