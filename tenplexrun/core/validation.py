"""Proof that a plan is right, before a byte moves: bounds, known sources, disjointness, exact tiling.

Nothing of the planner is used but its records, so that a fault there is not repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import Fetch, Holders, NodePlan, ReconfigurationPlan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region, disjoint, subtract
from tenplexrun.core.shared import Boxes
from tenplexrun.errors import LayoutError


def validate(plan: ReconfigurationPlan, target: PTC, holders: Holders) -> None:
    """Raises LayoutError, naming node, tensor and region, unless executing `plan` gives every node what it needs."""
    if set(plan.parts) != set(target.nodes):
        raise LayoutError(f"the plan is for nodes {sorted(plan.parts)}, the target for {sorted(set(target.nodes))}")
    for node, part in plan.parts.items():
        if part.node != node:
            raise LayoutError(f"the plan has the part of node {part.node} under {node}")
        validate_part(part, target, holders)


def validate_part(part: NodePlan, target: PTC, holders: Holders) -> None:
    """`validate` for one node's part: what a node checks before it moves anything."""
    by_tensor: dict[str, list[Fetch]] = {}
    for fetch in part.fetches:
        _check_fetch(fetch, part.node, target, holders)
        by_tensor.setdefault(fetch.fqn, []).append(fetch)
    needed, held = target.regions_on(part.node), holders.get(part.node, {})
    absent = set(part.absent)
    for fqn in sorted(absent):
        if fqn not in needed or not target.layout.spec(fqn).at or fqn in by_tensor or _covered(fqn, needed, holders):
            raise LayoutError(f"node {part.node}: {fqn} is not absent: it is shared state, unneeded, or a copy lives")
    needed_bytes = missing_bytes = 0
    for fqn in sorted({*needed, *by_tensor} - absent):
        boxes = [fetch.region for fetch in by_tensor.get(fqn, ())]
        wanted, having = _disjoint(tuple(needed.get(fqn, ()))), held.get(fqn, ())
        item = item_bytes(target.layout.spec(fqn).dtype)
        needed_bytes += item * sum(region.num_elements for region in wanted)
        if boxes or needed.get(fqn) is not having:
            missing_bytes += item * _check_tiling(f"node {part.node}, tensor {fqn}", boxes, wanted, having)
    if (part.needed_bytes, part.held_bytes) != (needed_bytes, needed_bytes - missing_bytes):
        raise LayoutError(
            f"node {part.node} counts {part.needed_bytes} bytes needed and {part.held_bytes} held; "
            f"they are {needed_bytes} and {needed_bytes - missing_bytes}"
        )


def _check_fetch(fetch: Fetch, node: str, target: PTC, holders: Holders) -> None:
    spec, region = target.layout.spec(fetch.fqn), fetch.region
    fits = len(region.lengths) == len(spec.shape) and all(
        start + length <= size for start, length, size in zip(region.offsets, region.lengths, spec.shape, strict=True)
    )
    wrong = None
    if not fits or region.is_empty:
        wrong = f" is empty or out of the bounds of shape {spec.shape}"
    elif fetch.num_bytes != region.num_elements * item_bytes(spec.dtype):
        wrong = f" says {fetch.num_bytes} bytes, which is not its size in {spec.dtype}"
    elif fetch.source == node or fetch.source not in holders:
        wrong = ": the source is not another living node"
    else:
        held = holders[fetch.source].get(fetch.fqn, ())
        if region not in held and not any(one.contains(region) for one in held):
            wrong = ": the source holds no region that contains it"
    if wrong:
        raise LayoutError(f"node {node}: fetch of {fetch.fqn} {region} from {fetch.source}{wrong}")


def _check_tiling(what: str, boxes: Sequence[Region], needed: Sequence[Region], held: Sequence[Region]) -> int:
    """How many elements of `needed` are not `held`, once `boxes` are known to be disjoint and to be just these."""
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.lengths and other.offsets[0] >= box.offsets[0] + box.lengths[0]:
                break  # sorted by the first dim: no later one can overlap
            if box.intersect(other) is not None:
                raise LayoutError(f"{what}: {box} and {other} overlap, a part is fetched twice")
        if box not in needed and not any(region.contains(box) for region in needed):
            needless = subtract(box, needed)
            if needless:
                raise LayoutError(f"{what}: {needless[0]} is fetched, but not needed")
        if any(box.intersect(region) is not None for region in held):
            raise LayoutError(f"{what}: {box} is fetched, but not needed or held already")
    fetched = sum(box.num_elements for box in boxes)
    if fetched == sum(region.num_elements for region in needed):
        return fetched  # disjoint, all needed, and as many as needed: nothing is left
    missing = [rest for one in needed for rest in subtract(one, held)]
    if fetched != sum(box.num_elements for box in missing):
        gap = next(rest for box in missing for rest in subtract(box, boxes))
        raise LayoutError(f"{what}: {gap} is needed, but neither held nor fetched")
    return fetched


def check_coverage(layout: Layout, config: ParallelConfig) -> None:
    """Proof that the ranks of `config` hold every element of every tensor.

    Raises LayoutError that names a tensor of which an element is on no rank.
    """
    layout.check(config)
    held: dict[str, set[Region]] = {}
    for rank in range(config.world_size):
        for fqn, regions in layout.regions_of(config, rank).items():
            held.setdefault(fqn, set()).update(regions)
    for spec in layout.tensors:
        if spec.at is not None:
            continue
        found = sorted(held.get(spec.fqn, ()))
        gap = subtract(spec.whole, found)
        if gap:
            raise LayoutError(f"tensor {spec.fqn}: {gap[0]} is on no rank at {config}")


_disjoint = lru_cache(maxsize=4096)(disjoint)  # a model has few distinct ones


def _covered(fqn: str, needed: Boxes, holders: Holders) -> bool:
    copies = sorted({region for regions in holders.values() for region in regions.get(fqn, ())})
    return not any(subtract(region, copies) for region in needed[fqn])
