"""From a torch tensor to its entry in the layout: DTensors describe themselves, rules describe the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, _StridedShard
from torch.distributed.tensor.placement_types import Shard as DTensorShard

from tenplexrun.core.layout import Shard, Stage, TensorSpec
from tenplexrun.core.parallel import AXES, ParallelConfig
from tenplexrun.errors import LayoutError
from tenplexrun.worker import device

Rules = Mapping[str, Sequence[Shard]]
"""fqn pattern (as in `fnmatch`) → operations, for plain tensors whose axes divide them evenly. The first match wins."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spec_of(fqn: str, tensor: torch.Tensor, config: ParallelConfig, rules: Rules, stage: Stage | None) -> TensorSpec:
    """Name, global shape, dtype and partitioning of a parameter or buffer.

    A DTensor is sharded as its placements say, a plain tensor as the first matching rule says; without one it is a
    replica on every rank. Raises LayoutError for `Partial` placements and for meshes that are not `job.mesh`.
    """
    dtype = device.dtype_name(tensor.dtype)
    if isinstance(tensor, DTensor):
        return TensorSpec(fqn, tuple(tensor.shape), dtype, _ops_of(fqn, tensor, config), stage)
    ops = tuple(next((ops for pattern, ops in rules.items() if fnmatchcase(fqn, pattern)), ()))
    shape = list(tensor.shape)
    for op in ops:
        if op.dim >= len(shape):
            raise LayoutError(f"tensor {fqn} has only {len(shape)} dims, its rule shards dim {op.dim}; correct `rules`")
        shape[op.dim] *= prod(config.size(axis) for axis in op.axes)
    return TensorSpec(fqn, tuple(shape), dtype, ops, stage)


def _ops_of(fqn: str, tensor: DTensor, config: ParallelConfig) -> tuple[Shard, ...]:
    """Placements as operations in nesting order.

    Mesh dims nest from left to right, but for `_StridedShard`: FSDP over TP puts the mesh dim on the left inside those
    on its right that shard the same dim, and `split_factor` is the number of their parts.
    """
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    if not names or any(name not in AXES or mesh.size(dim) != config.size(name) for dim, name in enumerate(names)):
        raise LayoutError(
            f"tensor {fqn} lies on a mesh with the axes {names} of sizes {tuple(mesh.shape)}; "
            f"build it on job.mesh or a part of it, which has {config}"
        )
    ops: list[Shard] = []
    for dim in reversed(range(len(names))):
        placement = tensor.placements[dim]
        if isinstance(placement, _StridedShard):
            inner = [config.size(axis) for op in ops if op.dim == placement.dim for axis in op.axes]
            if placement.split_factor != torch.Size(inner).numel():
                raise LayoutError(
                    f"tensor {fqn}: {placement} is interleaved in {placement.split_factor} parts, but the mesh "
                    f"dims on its right make {torch.Size(inner).numel()}; shard it in another order"
                )
            ops.append(Shard(placement.dim, names[dim], "ceil"))
        elif isinstance(placement, DTensorShard):
            ops.insert(0, Shard(placement.dim, names[dim], "ceil"))
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"tensor {fqn} is {placement} over {names[dim]!r}: an unreduced sum is no state; redistribute it first"
            )
    return tuple(ops)


def check_local(spec: TensorSpec, tensor: torch.Tensor, config: ParallelConfig, coord: Mapping[str, int]) -> None:
    """Raises LayoutError unless the rank at `coord` really holds what the layout says it does."""
    region = spec.region(config, coord)
    if region is None:
        raise LayoutError(
            f"tensor {spec.fqn} is on the rank at {dict(coord)}, but its stage says it belongs elsewhere; "
            "build only the items that `stages.items_of(pp_rank, pp)` gives, or correct `stages`"
        )
    if region.lengths != tuple(tensor.shape):
        raise LayoutError(
            f"tensor {spec.fqn} has the local shape {tuple(tensor.shape)} on the rank at {dict(coord)}, but the layout "
            f"gives it {region} of {spec.shape}; shard it over job.mesh, or declare it in `rules`"
        )
