"""How DTensors on a mesh, the job's or the script's own, become a layout: one and the same, whatever the sizes are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tenplexrun.core.layout import Layout, Shard
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.errors import LayoutError
from tenplexrun.worker.placements import check_local, local, spec_of

from .test_worker_layouts import rank_of


def test_fsdp_over_tensor_parallel_is_nested_as_torch_nests_it() -> None:
    config = ParallelConfig(dp=3, tp=2)
    for rank in range(config.world_size):
        with rank_of(config, rank) as (place, mesh):
            linear = nn.Linear(3, 11, bias=False)
            with torch.no_grad():
                linear.weight.copy_(torch.arange(33.0).view(11, 3))
            parallelize_module(linear, mesh["tp"], ColwiseParallel(), src_data_rank=None)
            fully_shard(linear, mesh=mesh["dp"])
            spec = spec_of("weight", linear.weight, config, {}, None)
            assert spec.ops == (Shard(0, "tp"), Shard(0, "dp"))
            region = spec.region(config, place.coord)
            assert region is not None
            assert torch.equal(local(linear.weight), torch.arange(33.0).view(11, 3)[region.slices])


@pytest.mark.parametrize("names", [("dp", "tp"), ("data", "tensor")])
def test_fsdp_over_tensor_parallel_has_one_layout_whatever_the_sizes_are(names: tuple[str, str]) -> None:
    """torch's placements do not: a strided shard is a plain one where there is one tensor-parallel rank."""
    found = set()
    for dp, tp in ((2, 2), (4, 1), (1, 4), (1, 1)):
        config = ParallelConfig(dp=dp, tp=tp)
        with rank_of(config, 0):
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=names)
            model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
            parallelize_module(model, mesh[names[1]], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            for layer in model:
                fully_shard(layer, mesh=mesh[names[0]])
            found.add(Layout(tuple(spec_of(*each, config, {}, None) for each in model.named_parameters())).digest)
    assert len(found) == 1


def test_a_mesh_of_the_script_s_own_is_known_by_its_ranks() -> None:
    config = ParallelConfig(dp=3, cp=2, tp=2)
    for rank in (0, 7):
        with rank_of(config, rank) as (place, _):
            for shape, names, axes in (
                ((3, 4), ("data", "model"), [("dp",), ("cp", "tp")]),
                ((6, 2), None, [("dp", "cp"), ("tp",)]),
                ((1, 12), ("a", "b"), [None, ("dp", "cp", "tp")]),
            ):
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                whole = distribute_tensor(torch.ones(24, 24), mesh, [Sharded(0), Sharded(1)], src_data_rank=None)
                spec = spec_of("w", whole, config, {}, None)
                assert spec.ops == tuple(Shard(dim, axes[dim], "ceil") for dim in (0, 1) if axes[dim])
                assert check_local(Layout((spec,)), "w", local(whole), place) is None
            odd = init_device_mesh("cpu", (2, 6), mesh_dim_names=("a", "b"))
            with pytest.raises(LayoutError, match=r"lies on a mesh with the axes \('a', 'b'\) of sizes \(2, 6\)"):
                spec_of(
                    "w", distribute_tensor(torch.ones(12), odd, [Sharded(0)] * 2, src_data_rank=None), config, {}, None
                )


def test_a_dim_of_one_rank_is_known_by_its_usual_name() -> None:
    """So that the state has one layout, whatever the sizes are."""

    def ops(config: ParallelConfig, shape: tuple[int, int], names: tuple[str, str] = ("data", "tensor")) -> object:
        with rank_of(config, 0):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            whole = distribute_tensor(torch.ones(24, 24), mesh, [Sharded(0), Sharded(1)], src_data_rank=None)
            return spec_of("w", whole, config, {}, None).ops

    both = (Shard(0, ("dp",), "ceil"), Shard(1, ("tp",), "ceil"))
    assert ops(ParallelConfig(dp=2, tp=2), (2, 2)) == both
    assert (
        ops(ParallelConfig(dp=4), (4, 1)) == ops(ParallelConfig(tp=4), (1, 4)) == ops(ParallelConfig(), (1, 1)) == both
    )
    assert ops(ParallelConfig(dp=4), (4, 1), ("x", "y")) == both[:1], "nobody can know"
