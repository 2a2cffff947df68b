"""Proof that a plan is right, before a byte moves: bounds, known sources, disjointness, exact tiling.

Nothing of the planner is used but its records, so that a fault there is not repeated here.
"""

from __future__ import annotations

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
        wrong = _wrong(fetch, part.node, target, holders)
        if wrong:
            raise LayoutError(f"node {part.node}: fetch of {fetch.fqn} {fetch.region} from {fetch.source}{wrong}")
        by_tensor.setdefault(fetch.fqn, []).append(fetch)
    needed, held = target.regions_on(part.node), holders.get(part.node, {})
    absent = set(part.absent)
    for fqn in sorted(absent):
        if fqn not in needed or not target.layout.spec(fqn).at or fqn in by_tensor or _covered(fqn, needed, holders):
            raise LayoutError(f"node {part.node}: {fqn} is not absent: it is shared state, unneeded, or a copy lives")
    needed_bytes = missing_bytes = 0
    for fqn in sorted({*needed, *by_tensor} - absent):
        boxes = tuple(fetch.region for fetch in by_tensor.get(fqn, ()))
        found = _tiling(boxes, tuple(needed.get(fqn, ())), tuple(held.get(fqn, ())))
        if isinstance(found, str):
            raise LayoutError(f"node {part.node}, tensor {fqn}: {found}")
        item = item_bytes(target.layout.spec(fqn).dtype)
        needed_bytes += item * found[0]
        missing_bytes += item * found[1]
    if (part.needed_bytes, part.held_bytes) != (needed_bytes, needed_bytes - missing_bytes):
        raise LayoutError(
            f"node {part.node} counts {part.needed_bytes} bytes needed and {part.held_bytes} held; "
            f"they are {needed_bytes} and {needed_bytes - missing_bytes}"
        )


def _wrong(fetch: Fetch, node: str, target: PTC, holders: Holders) -> str | None:
    """Why a fetch cannot be executed."""
    spec, region = target.layout.spec(fetch.fqn), fetch.region
    if region.is_empty or len(region.lengths) != len(spec.shape) or not spec.whole.contains(region):
        return f" is empty or out of the bounds of shape {spec.shape}"
    if fetch.num_bytes != region.num_elements * item_bytes(spec.dtype):
        return f" says {fetch.num_bytes} bytes, which is not its size in {spec.dtype}"
    if fetch.source == node or fetch.source not in holders:
        return ": the source is not another living node"
    held = holders[fetch.source].get(fetch.fqn, ())
    if region not in held and not any(one.contains(region) for one in held):
        return ": the source holds no region that contains it"
    return None


_disjoint = lru_cache(maxsize=1 << 12)(disjoint)


@lru_cache(maxsize=1 << 14)
def _tiling(boxes: tuple[Region, ...], wanted: tuple[Region, ...], held: tuple[Region, ...]) -> tuple[int, int] | str:
    """(elements of `wanted`, how many of them are not `held`) if `boxes` are disjoint and are just these.

    Else what is wrong. A model has few distinct ones, so the last are remembered.
    """
    needed = _disjoint(wanted)
    num_needed = sum(region.num_elements for region in needed)
    if not boxes and wanted == held:
        return num_needed, 0
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.lengths and other.offsets[0] >= box.offsets[0] + box.lengths[0]:
                break  # sorted by the first dim: no later one can overlap
            if box.intersect(other) is not None:
                return f"{box} and {other} overlap, a part is fetched twice"
        if box not in needed and not any(region.contains(box) for region in needed):
            needless = subtract(box, needed)
            if needless:
                return f"{needless[0]} is fetched, but not needed"
        if any(box.intersect(region) is not None for region in held):
            return f"{box} is fetched, but not needed or held already"
    fetched = sum(box.num_elements for box in boxes)
    if fetched == num_needed:
        return num_needed, fetched  # disjoint, all needed, and as many as needed: nothing is left
    missing = [rest for one in needed for rest in subtract(one, held)]
    if fetched != sum(box.num_elements for box in missing):
        gap = next(rest for box in missing for rest in subtract(box, boxes))
        return f"{gap} is needed, but neither held nor fetched"
    return num_needed, fetched


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


def _covered(fqn: str, needed: Boxes, holders: Holders) -> bool:
    copies = sorted({region for regions in holders.values() for region in regions.get(fqn, ())})
    return not any(subtract(region, copies) for region in needed[fqn])
