"""From a torch tensor to its entry in the layout: DTensors describe themselves, rules describe the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, _StridedShard
from torch.distributed.tensor.placement_types import Shard as DTensorShard

from tenplexrun.core.layout import Layout, Op, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import ALL_AXES, ParallelConfig
from tenplexrun.core.spec import Replicas
from tenplexrun.errors import LayoutError
from tenplexrun.worker import device
from tenplexrun.worker.launch import Place


@dataclass(frozen=True, slots=True)
class Rule:
    """How plain tensors are partitioned. `shape`: the canonical (global, unpadded) one.

    Without it there may be `Shard`s only, each over axes that divide its dim evenly.
    """

    ops: Sequence[Op]
    shape: tuple[int, ...] | None = None


Rules = Mapping[str, Rule | Sequence[Op]]
"""fqn pattern (as in `fnmatch`) → how such tensors are partitioned. The first match wins."""


USUAL = {"data": "dp", "ddp": "dp", "fsdp": "dp", "context": "cp", "sequence": "cp", "tensor": "tp", "model": "tp"}
"""Names of mesh dims, for those of size 1: their ranks do not say along which axis they would grow."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spec_of(
    fqn: str,
    tensor: torch.Tensor,
    config: ParallelConfig,
    rules: Rules,
    stage: Stage | None,
    replicas: Replicas = "agree",
) -> TensorSpec:
    """Name, global shape, dtype and partitioning of a parameter or buffer.

    A DTensor is sharded as its placements say, a plain tensor as the first matching rule says; without one it is a
    replica on every rank. Raises LayoutError for `Partial` placements and for meshes that are not `job.mesh`.
    """
    dtype = device.dtype_name(tensor.dtype)
    if isinstance(tensor, DTensor):
        return TensorSpec(fqn, tuple(tensor.shape), dtype, _ops_of(fqn, tensor, config), stage, replicas=replicas)
    found = next((rule for pattern, rule in rules.items() if fnmatchcase(fqn, pattern)), ())
    rule = found if isinstance(found, Rule) else Rule(found)
    shape = _global_shape(fqn, tensor, rule.ops, config) if rule.shape is None else rule.shape
    return TensorSpec(fqn, shape, dtype, tuple(rule.ops), stage, replicas=replicas)


def _global_shape(fqn: str, tensor: torch.Tensor, ops: Sequence[Op], config: ParallelConfig) -> tuple[int, ...]:
    shape = list(tensor.shape)
    for op in ops:
        if not isinstance(op, Shard):
            raise LayoutError(f"tensor {fqn}: a rule with {op} needs the canonical shape; give Rule(ops, shape)")
        if op.dim >= len(shape):
            raise LayoutError(f"tensor {fqn} has only {len(shape)} dims, its rule shards dim {op.dim}; correct `rules`")
        shape[op.dim] *= prod(config.size(axis) for axis in op.axes)
    return tuple(shape)


def _ops_of(fqn: str, tensor: DTensor, config: ParallelConfig) -> tuple[Shard, ...]:
    """Placements as operations in nesting order.

    Mesh dims nest from left to right, but for `_StridedShard`: FSDP over TP puts the mesh dim on the left inside those
    on its right that shard the same dim, and `split_factor` is the number of their parts. Where that is 1, torch says
    `Shard`; they nest alike all the same, so that the state has one layout whatever the sizes are.
    """
    axes = _axes_of(fqn, tensor.device_mesh, config)
    ops: list[Shard] = []
    for dim in reversed(range(len(axes))):
        placement = tensor.placements[dim]
        if not axes[dim]:
            continue  # a dim of size 1
        if isinstance(placement, _StridedShard | DTensorShard):
            outer = [config.size(axis) for op in ops if op.dim == placement.dim for axis in op.axes]
            if isinstance(placement, _StridedShard) and placement.split_factor != prod(outer):
                raise LayoutError(
                    f"tensor {fqn}: {placement} is interleaved in {placement.split_factor} parts, but the mesh "
                    f"dims on its right make {prod(outer)}; shard it in another order"
                )
            inside = isinstance(placement, _StridedShard) or (bool(outer) and prod(outer) == 1)
            ops.insert(len(ops) if inside else 0, Shard(placement.dim, axes[dim], "ceil"))
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"tensor {fqn} is {placement} over {'·'.join(axes[dim])!r}: an unreduced sum is no state; "
                "redistribute it first"
            )
    return tuple(ops)


def _axes_of(fqn: str, mesh: DeviceMesh, config: ParallelConfig) -> list[tuple[str, ...]]:
    """The axes of the job that each dim of a mesh goes along: those of its names, or, if it has none of ours, those
    with the same ranks. Raises LayoutError where there are no such axes."""
    names = mesh.mesh_dim_names or ()
    if names and all(name in ALL_AXES and mesh.size(dim) == config.size(name) for dim, name in enumerate(names)):
        return [(name,) for name in names]
    lines = [mesh.mesh.movedim(dim, 0).reshape(mesh.size(dim), -1)[:, 0].tolist() for dim in range(mesh.ndim)]
    found: list[tuple[str, ...] | None] = (
        [_along(line, config) for line in lines] if not {*names} & {*ALL_AXES} else [None]
    )
    for dim, axis in enumerate(map(USUAL.get, names)):
        if found[dim] == () and axis is not None and config.size(axis) == 1:
            found[dim] = (axis,)
    if None in found:
        raise LayoutError(
            f"tensor {fqn} lies on a mesh with the axes {names} of sizes {tuple(mesh.shape)}; "
            f"build it on job.mesh or a part of it, which has {config}"
        )
    return [axes for axes in found if axes is not None]


def _along(ranks: Sequence[int], config: ParallelConfig) -> tuple[str, ...] | None:
    """The axes, neighbours in their order, along which global ranks lie; none for a single rank."""
    if len(ranks) == 1:
        return ()
    for first, last in combinations(range(len(config.order) + 1), 2):
        axes = config.order[first:last]
        step = prod(map(config.size, config.order[last:]))
        line = [ranks[0] + number * step for number in range(prod(map(config.size, axes)))]
        if ranks == line and not any(config.coord(ranks[0])[axis] for axis in axes):
            return tuple(axis for axis in axes if config.size(axis) > 1)
    return None


def check_local(layout: Layout, fqn: str, tensor: torch.Tensor, place: Place) -> None:
    """Raises LayoutError unless the rank at `place` really holds what the layout says it does."""
    held = layout.local(fqn, place.config, place.coord)
    if held is None:
        raise LayoutError(
            f"tensor {fqn} is on the rank at {dict(place.coord)}, but its stage says it belongs elsewhere; "
            "build only the items that `stages.items_of(pp_rank, pp)` gives, or correct `stages`"
        )
    if held.shape != tuple(tensor.shape):
        raise LayoutError(
            f"tensor {fqn} has the local shape {tuple(tensor.shape)} on the rank at {dict(place.coord)}, but the "
            f"layout gives it {held.shape} of {layout.spec(fqn).shape}: shard it on job.mesh or declare it in `rules`"
        )
