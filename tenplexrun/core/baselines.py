"""What a plan of least movement is measured against: moving everything, and moving by way of one node. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tenplexrun.core.planner import Holders, NodePlan, ReconfigurationPlan, plan, plan_node
from tenplexrun.core.ptc import PTC

_BEFORE = " as it was"


def migrate_all(target: PTC, holders: Holders, racks: Mapping[str, str] | None = None) -> ReconfigurationPlan:
    """Every node fetches all that its ranks need, also what it holds: from any holder, which it may be itself.

    Raises StateLostError that names every needed region without a living copy.
    """
    before = {f"{node}{_BEFORE}": held for node, held in holders.items()}  # so that nobody has what it needs
    labels = {**(racks or {}), **{f"{node}{_BEFORE}": rack for node, rack in (racks or {}).items()}}
    return ReconfigurationPlan(
        {node: _renamed(part) for node, part in plan(target, before, labels if racks else None).parts.items()}
    )


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
    everything = replace(target, nodes=(node,) * target.config.world_size)
    gather = plan_node(node, everything, holders)
    held = {fqn: boxes for fqn, boxes in everything.regions_on(node).items() if fqn not in gather.absent}
    return Central(gather, plan(target, {node: held}))


def _renamed(part: NodePlan) -> NodePlan:
    fetches = tuple(replace(fetch, source=fetch.source.removesuffix(_BEFORE)) for fetch in part.fetches)
    return replace(part, fetches=fetches)
