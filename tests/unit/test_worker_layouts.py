"""Layouts and restores, with every rank of a mesh played in turn by this process over torch's fake process group."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeCopies
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tenplexrun.core.layout import Layout, Order, Pad, Shard, Stage, Stages, TensorSpec
from tenplexrun.core.parallel import AXES, ParallelConfig
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.core.snapshots import ArenaMap, Claim, SnapshotId, arena_map
from tenplexrun.errors import LayoutError, StateLostError
from tenplexrun.worker.exchange import agree
from tenplexrun.worker.launch import Place
from tenplexrun.worker.placements import Rule, local, spec_of
from tenplexrun.worker.slots import SlotWriter, Snapshot
from tenplexrun.worker.state import State

CPU = torch.device("cpu")
STAGES = Stages("layers.{}.", 4, first=("embed",), last=("head",))


@contextmanager
def rank_of(config: ParallelConfig, rank: int) -> Iterator[tuple[Place, DeviceMesh]]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
    try:
        mesh = init_device_mesh("cpu", tuple(config.size(axis) for axis in AXES), mesh_dim_names=AXES)
        yield Place(config, config.coord(rank), CPU), mesh
    finally:
        dist.destroy_process_group()


class Tiny(nn.Module):
    """Layers with sharded and replicated parameters and a buffer; odd sizes, so that parts are uneven."""

    def __init__(self, place: Place, mesh: DeviceMesh) -> None:
        super().__init__()
        items = STAGES.items_of(place.coord["pp"], place.config.pp)
        if 0 in items:
            self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleDict()
        for item in items:
            layer = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6, bias=False))
            self.layers[str(item)] = layer
        if 3 in items:
            self.head = nn.Linear(6, 7, bias=False)
        plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
        if 3 in items:
            plan["head"] = ColwiseParallel()
        parallelize_module(self, mesh["tp"], plan, src_data_rank=None)


def fill_with_own_indices(tensor: torch.Tensor, spec: TensorSpec, place: Place) -> None:
    """Every element becomes its index in the whole tensor, plus a number that depends on the name."""
    region = spec.region(place.config, place.coord)
    assert region is not None
    whole = torch.arange(spec.whole.num_elements).reshape(spec.shape) + sum(spec.fqn.encode()) % 97
    with torch.no_grad():
        local(tensor).copy_(whole[region.slices])


def make(place: Place, mesh: DeviceMesh) -> tuple[State, torch.optim.Optimizer]:
    model = Tiny(place, mesh)
    matrices = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    others = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}], lr=0.125)
    return State(model, optimizer, None, STAGES, {}, place), optimizer


@functools.cache
def union(config: ParallelConfig) -> Layout:
    layouts = []
    for rank in range(config.world_size):
        with rank_of(config, rank) as (place, mesh):
            layouts.append(make(place, mesh)[0].layout())
    return Layout.merge(layouts)


def without_streams(layout: Layout) -> Layout:
    return Layout(tuple(spec for spec in layout.tensors if not spec.at))


def save(folder: Path, config: ParallelConfig) -> Path:
    """Play a whole round on one node: every rank writes its entries; returns the index of the snapshot."""
    layout = union(config)
    ranks = range(config.world_size)
    arena = arena_map(layout, config, ranks)
    slot, other = folder / "slot.bin", folder / "staged.bin"
    for path in (slot, other):
        path.write_bytes(bytes(arena.num_bytes))
    for rank in ranks:
        with rank_of(config, rank) as (place, mesh):
            state, _ = make(place, mesh)
            filled = state.blank()
            for fqn, tensor in filled.items():
                if fqn.endswith(".exists"):
                    tensor.fill_(True)
                elif not fqn.startswith("rng."):
                    fill_with_own_indices(tensor, layout.spec(fqn), place)
            state.adopt(filled, state.values())
            SlotWriter([str(slot)], arena, layout, place, threads=2).write(0, state.read())
            staged = SlotWriter([str(other)], arena, layout, place, copies=FakeCopies(random.Random(rank)))
            staged.write(0, state.read())
    assert other.read_bytes() == slot.read_bytes(), "what a device stages is the same"
    return write_index(folder, layout, config, arena)


def write_index(folder: Path, layout: Layout, config: ParallelConfig, arena: ArenaMap) -> Path:
    pieces = tuple(Piece(e.fqn, e.region, e.dtype, "slot.bin", e.offset, e.num_bytes, 0) for e in arena.entries)
    claims = (Claim(config, tuple(range(config.world_size))),)
    path = folder / "index.json"
    path.write_text(json.dumps(Index(SnapshotId(0, 7, layout.digest), True, 56, None, claims, pieces).to_json()))
    return path


CONFIGS = [
    ParallelConfig(),
    ParallelConfig(tp=2),
    ParallelConfig(tp=4),
    ParallelConfig(dp=2, tp=2),
    ParallelConfig(pp=2, tp=2),
    ParallelConfig(pp=3, dp=2),
    ParallelConfig(pp=4, tp=3),
]


def test_layout_does_not_depend_on_the_parallelism() -> None:
    layouts = [without_streams(union(config)) for config in CONFIGS]
    assert len({layout.digest for layout in layouts}) == 1
    assert "layers.3.1.running_mean" in layouts[0]
    assert "optim.layers.3.0.weight.exp_avg" in layouts[0]
    assert layouts[0].spec("optim.layers.2.0.weight.exp_avg").ops == (Shard(0, "tp"),)
    assert layouts[0].spec("optim.layers.2.0.weight.step").shape == ()


@pytest.fixture(scope="module", params=[ParallelConfig(dp=2, tp=2), ParallelConfig(pp=3, tp=3)], ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ParallelConfig, Path]:
    return request.param, save(tmp_path_factory.mktemp("arena"), request.param)


@pytest.mark.parametrize("target", CONFIGS, ids=str)
def test_restore_into_another_layout(saved: tuple[ParallelConfig, Path], target: ParallelConfig) -> None:
    current, path = saved
    snapshot = Snapshot(str(path))
    layout = union(target)
    for rank in range(target.world_size):
        with rank_of(target, rank) as (place, mesh):
            state, optimizer = make(place, mesh)
            filled, num_bytes = snapshot.fill(state.blank(), layout, place, threads=2)
            existed = all(place.coord[axis] < current.size(axis) for axis in AXES)
            assert set(state.blank()) - set(filled) == (set() if existed else state.stream_names)
            assert num_bytes > 0
            values = state.values()
            values["optimizer"][0]["lr"] = 0.0625
            state.adopt(filled, values)
            assert optimizer.param_groups[0]["lr"] == 0.0625
            for fqn, tensor in state.read().items():
                if not fqn.endswith(".exists") and not fqn.startswith("rng."):
                    expected = torch.empty_like(tensor)
                    fill_with_own_indices(expected, layout.spec(fqn), place)
                    assert torch.equal(tensor, expected), fqn
            moments = next(iter(optimizer.state.values()))["exp_avg"]
            assert isinstance(moments, DTensor)


def test_a_gap_is_named_and_never_filled(tmp_path: Path) -> None:
    config = ParallelConfig(tp=2)
    path = save(tmp_path, config)
    record = json.loads(path.read_text())
    record["pieces"] = [
        piece
        for piece in record["pieces"]
        if not (piece["fqn"] == "layers.1.0.weight" and piece["region"][0] == [5, 0])
    ]
    path.write_text(json.dumps(record))
    with rank_of(ParallelConfig(), 0) as (place, mesh):
        state, _ = make(place, mesh)
        with pytest.raises(StateLostError, match=r"layers\.1\.0\.weight: \[5:10, 0:6\]"):
            Snapshot(str(path)).fill(state.blank(), state.layout(), place)


def test_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, ParallelConfig())
    with rank_of(ParallelConfig(), 0) as (place, mesh):
        state, _ = make(place, mesh)
        layout = Layout((TensorSpec("head.weight", (6, 6), "float32"),))
        with pytest.raises(LayoutError, match=r"head\.weight was saved as float32 \[0:7, 0:6\]"):
            Snapshot(str(path)).fill({"head.weight": torch.zeros(6, 6)}, layout, place)
        assert state.layout().spec("head.weight").shape == (7, 6)


def test_what_a_layout_cannot_describe() -> None:
    config = ParallelConfig(tp=2)
    with rank_of(config, 1) as (place, mesh):
        partial = DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()], run_check=False)
        with pytest.raises(LayoutError, match="unreduced sum"):
            spec_of("loss", partial, config, {}, None)
        foreign = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [1, 0]), [Sharded(0)], run_check=False)
        with pytest.raises(LayoutError, match=r"build it on job\.mesh"):
            spec_of("w", foreign, config, {}, None)
        odd = DTensor.from_local(torch.ones(4), mesh["tp"], [Sharded(0)], run_check=False, shape=(7,), stride=(1,))
        model = nn.Module()
        model.register_buffer("odd", odd)
        with pytest.raises(LayoutError, match=r"odd has the local shape \(4,\) .* gives it \(3,\) of \(7,\)"):
            State(model, None, None, None, {}, place).layout()


def test_rules_shard_plain_tensors() -> None:
    config = ParallelConfig(tp=2)
    with rank_of(config, 1) as (place, _):
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        rules = {"0.*": (Shard(0, "tp", "even"),), "*": ()}
        layout = State(model, optimizer, None, None, rules, place).layout()
        assert layout.spec("0.weight").shape == (6, 4)
        assert layout.spec("optim.0.weight.momentum_buffer").ops == (Shard(0, "tp", "even"),)
        assert layout.region("0.weight", config, place.coord).offsets == (3, 0)
        assert layout.spec("1.weight").shape == (4, 3)
        with pytest.raises(LayoutError, match="only 2 dims"):
            State(model, None, None, None, {"0.weight": (Shard(2, "tp"),)}, place)


def test_rules_for_fused_and_padded_tensors(tmp_path: Path) -> None:
    """Gate and up fused, each split by itself; a vocabulary padded for tp; moments go along; padding stays as built."""
    rules = {
        "gate_up": (Shard(0, "tp", "even", segs=(1, 1)),),
        "vocabulary": Rule((Pad(0, 4, ("tp",)), Shard(0, "tp", "even")), (9, 2)),
        "qkv": Rule((Order(0, 2, (8, 4, 4)), Shard(0, "tp", "even")), (16, 3)),
    }
    shapes = {"gate_up": (8, 3), "vocabulary": (9, 2), "qkv": (16, 3)}
    whole = {name: torch.arange(float(prod(shape))).view(shape) for name, shape in shapes.items()}

    def make(place: Place, value: float) -> tuple[nn.ParameterDict, State]:
        tp = place.config.tp
        rows = {"gate_up": 8 // tp, "vocabulary": -(-9 // (4 * tp)) * 4, "qkv": 16 // tp}
        model = nn.ParameterDict({name: torch.full((rows[name], *shape[1:]), value) for name, shape in shapes.items()})
        return model, State(model, torch.optim.SGD(model.values(), 0.5, momentum=0.5), None, None, rules, place)

    def expected(name: str, tp: int, rank: int) -> torch.Tensor:
        tensor = whole[name]
        if name == "gate_up":
            return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
        if name == "qkv":
            query, key, value = tensor.split([8, 4, 4])
            groups = [torch.cat([query[g * 4 :][:4], key[g * 2 :][:2], value[g * 2 :][:2]]) for g in (0, 1)]
            return torch.cat(groups).chunk(tp)[rank]
        rows = -(-9 // (4 * tp)) * 4
        return tensor[rank * rows : (rank + 1) * rows]

    def layout_of(config: ParallelConfig) -> Layout:
        declared = {}
        for rank in range(config.world_size):
            with rank_of(config, rank) as (place, _):
                declared[rank] = make(place, 0.0)[1].layout()
        return Layout.union(config, declared)

    current = ParallelConfig(tp=2)
    layout = layout_of(current)
    arena = arena_map(layout, current, range(2))
    slot = tmp_path / "slot.bin"
    slot.write_bytes(bytes(arena.num_bytes))
    for rank in range(2):
        with rank_of(current, rank) as (place, _):
            model, state = make(place, -1.0)
            with torch.no_grad():
                for name, tensor in model.items():
                    part = expected(name, 2, rank)
                    tensor[: len(part)].copy_(part)
            SlotWriter([str(slot)], arena, layout, place).write(0, state.read())
    index = write_index(tmp_path, layout, current, arena)
    for target in (ParallelConfig(), current):
        layout = layout_of(target)
        for rank in range(target.tp):
            with rank_of(target, rank) as (place, _):
                model, state = make(place, -5.0)
                Snapshot(str(index)).fill({name: model[name] for name in shapes}, layout, place)
                for name, tensor in model.items():
                    part = expected(name, target.tp, rank)
                    assert torch.equal(tensor[: len(part)], part), (name, target, rank)
                    assert (tensor[len(part) :] == -5.0).all()


def test_the_stage_rule_must_match_what_was_built() -> None:
    config = ParallelConfig(pp=2)
    with rank_of(config, 1) as (place, _):
        model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Linear(2, 2)})})
        with pytest.raises(LayoutError, match="its stage says it belongs elsewhere"):
            State(model, None, None, STAGES, {}, place).layout()


def test_ranks_agree_on_the_union_or_all_hear_why_not() -> None:
    class Dict(dict):
        def set(self, key: str, value: str) -> None:
            self[key] = value.encode()

        def get(self, key: str) -> bytes:
            return self[key]

    config = ParallelConfig(pp=2)
    a = Layout((TensorSpec("a", (2,), "bool", stage=Stage(0, 2)),))
    b = Layout((TensorSpec("b", (2,), "bool", stage=Stage(1, 2)),))
    store = Dict({"layout/1": json.dumps({"layout": b.to_json(), "values": {"lr": 1}}).encode()})
    both = agree(store, config, 0, a, {"lr": 1})
    assert [spec.fqn for spec in both.tensors] == ["a", "b"]
    with pytest.raises(LayoutError, match="rank 1 and rank 0 differ in lr"):
        agree(store, config, 0, a, {"lr": 2})
    with pytest.raises(LayoutError, match="rank 1 and rank 0 differ in lr"):
        agree(store, config, 1, b, {"lr": 1})
    store = Dict({"layout/1": json.dumps({"layout": b.to_json(), "values": {}}).encode()})
    with pytest.raises(LayoutError, match="tensor b is declared in two ways"):
        agree(store, config, 0, Layout((TensorSpec("b", (3,), "bool"),)), {})
    with pytest.raises(LayoutError, match="rank 1 lacks a"):
        agree(store, config, 0, Layout((TensorSpec("a", (2,), "bool"),)), {})


def test_replicated_dtensors_are_replicas() -> None:
    config = ParallelConfig(dp=2, tp=2)
    with rank_of(config, 3) as (_, mesh):
        tensor = distribute_tensor(torch.ones(4, 3), mesh["dp", "tp"], [Replicate(), Sharded(1)], src_data_rank=None)
        assert spec_of("w", tensor, config, {}, None).ops == (Shard(1, "tp"),)
