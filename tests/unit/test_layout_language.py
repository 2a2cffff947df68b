"""What the layout language refuses, its JSON, and corners of its evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tenplexrun.core.layout import Buffer, Flat, Layout, Order, Pad, Shard, Stage, Stages, TensorSpec
from tenplexrun.core.local import joined
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import Fetch, NodePlan, ReconfigurationPlan, plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.sources import CopyIndex
from tenplexrun.core.validation import check_coverage, validate
from tenplexrun.errors import LayoutError

FLAT = Flat("dp", align=2, multiple=8, buffer="all")
EVERYTHING = Layout(
    (
        TensorSpec("embed", (10, 4), "float32", (Pad(0, 2, ("tp",)), Shard(0, "tp", "even")), Stage(0, 4, 2),
                   copies=(Stage(3, 4),), aliases=("head",)),
        TensorSpec("qkv", (16, 4), "float32", (Order(0, 2, (8, 4, 4)), Shard(0, "tp", unit=2), Flat(("dp", "cp")))),
        TensorSpec("gate_up", (8, 4), "float32", (Shard(0, "tp", segs=(1, 1)), Shard(1, ("dp_shard",)))),
        TensorSpec("sizes", (6,), "float32", (Shard(0, "tp", (4, 2)),)),
        TensorSpec("expert.1", (4,), "float32", (Shard(0, "etp"),), expert=Stage(1, 2)),
        TensorSpec("mean", (4,), "float32", replicas="first"),
        TensorSpec("rng", (16,), "uint8", at={"dp": 1}),
        TensorSpec("f0", (5,), "float32", (FLAT,)),
        TensorSpec("f1", (), "float32", (FLAT,)),
    ),
    (Buffer("all", ("f1", "f0"), start=4, bucket=3),),
)  # fmt: skip


def test_json_of_every_kind_comes_back() -> None:
    again = Layout.from_json(json.loads(json.dumps(EVERYTHING.to_json())))
    assert (again, again.digest) == (EVERYTHING, EVERYTHING.digest)
    assert Layout.merge([again, EVERYTHING]) == EVERYTHING
    check_coverage(EVERYTHING, ParallelConfig(dp=2, cp=2, ep=2, tp=2))
    old = {"schema": 1, "tensors": [{"fqn": "w", "shape": [4], "dtype": "float32",
                                     "ops": [{"op": "shard", "dim": 0, "axis": "tp", "policy": "ceil"}]}]}  # fmt: skip
    assert Layout.from_json(old).regions_of(ParallelConfig(tp=2), 1) == {"w": (Region((2,), (2,)),)}
    config = ParallelConfig(dp=4, ep=2, tp=2, etp=1, dp_shard=2, order=("dp", "pp", "cp", "tp"))
    assert ParallelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert str(config) == "dp4·ep2·tp2·etp1·dp_shard2 (dp-pp-cp-tp)"


WRONG: dict[str, Callable[[], Any]] = {
    "does not divide into 3 groups": lambda: Order(0, 3, (4,)),
    "the parts of Order make 8 rows": lambda: Layout(
        (TensorSpec("w", (6,), "float32", (Order(0, 2, (8,)),)),)
    ).check(ParallelConfig()),
    "correct the sizes": lambda: Layout((TensorSpec("w", (6,), "float32", (Shard(0, "tp", (4, 2)),)),)).check(
        ParallelConfig(tp=3)
    ),
    "does not divide into segments": lambda: Layout(
        (TensorSpec("w", (7,), "float32", (Shard(0, "tp", segs=(1, 1)),)),)
    ).check(ParallelConfig()),
    "in units of 4": lambda: Layout((TensorSpec("w", (8,), "float32", (Shard(0, "tp", "even", unit=4),)),)).check(
        ParallelConfig(tp=4)
    ),
    "names a tensor twice": lambda: Buffer("b", ("w", "w")),
    "two buffers of the layout": lambda: Layout((), (Buffer("b", ()), Buffer("b", ("w",)))),
    "which does not name it": lambda: Layout((TensorSpec("w", (2,), "float32", (FLAT,)),), (Buffer("all", ("v",)),)),
    "need the same Flat operation": lambda: Layout(
        (TensorSpec("v", (2,), "float32"), TensorSpec("w", (2,), "float32", (FLAT,))), (Buffer("all", ("v", "w")),)
    ),
    "is no tensor of the layout": lambda: Layout(
        (TensorSpec("w", (2,), "float32", (FLAT,)),), (Buffer("all", ("v", "w")),)
    ).check(ParallelConfig()),
    "buffer b is declared in two ways": lambda: Layout.merge(
        [Layout((), (Buffer("b", ()),)), Layout((), (Buffer("b", ("w",)),))]
    ),
    "ep=4 ranks cannot share 2 experts": lambda: EVERYTHING.check(ParallelConfig(dp=4, ep=4, tp=2)),
    "unknown layout operation": lambda: TensorSpec.from_json(
        {"fqn": "w", "shape": [2], "dtype": "float32", "ops": [{"op": "partial"}]}
    ),
    "are unknown; they": lambda: TensorSpec("w", (2,), "float32", replicas="last"),  # type: ignore[arg-type]
    "need a stage of its own": lambda: TensorSpec("w", (2,), "float32", copies=(Stage(0, 2),)),
    "nothing can follow it": lambda: TensorSpec("w", (2,), "float32", (Flat("dp"), Shard(0, "tp"))),
    "use chunks_of": lambda: Stages("l.{}.", 4, chunks=2).items_of(0, 2),
    "is not one box": lambda: EVERYTHING.region("qkv", ParallelConfig(), {}),
    "two tensors are called head": lambda: Layout(
        (*EVERYTHING.tensors, TensorSpec("head", (2,), "float32")), EVERYTHING.buffers
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_refused(message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        WRONG[message]()


def test_wrong_meshes_are_refused() -> None:
    for sizes in ({"etp": 3, "tp": 2}, {"dp": 3, "dp_shard": 2}, {"order": ("pp", "dp", "tp")}, {"ep": 2}):
        with pytest.raises(ValueError, match=r"divide|order"):
            ParallelConfig(**sizes)


def test_the_union_of_all_ranks_is_just_what_each_declares() -> None:
    config = ParallelConfig(pp=2)
    first = Layout((TensorSpec("l.0", (2,), "float32", stage=Stage(0, 2)), TensorSpec("step", (), "int64")))
    second = Layout((TensorSpec("l.1", (2,), "float32", stage=Stage(1, 2)), TensorSpec("step", (), "int64")))
    assert [spec.fqn for spec in Layout.union(config, {0: first, 1: second}).tensors] == ["l.0", "l.1", "step"]
    with pytest.raises(LayoutError, match=r"rank 1 declares l\.0"):
        Layout.union(config, {0: first, 1: first})
    with pytest.raises(LayoutError, match=r"rank 0 lacks l\.0"):
        Layout.union(config, {0: Layout(first.tensors[1:]), 1: Layout((*first.tensors, *second.tensors[:1]))})


def test_owners_by_expert_stage_and_coordinate() -> None:
    config = ParallelConfig(dp=2, ep=2, pp=2, tp=1)
    assert EVERYTHING.local("expert.1", config, {"dp": 0}) is None
    assert EVERYTHING.local("embed", ParallelConfig(pp=4), {"pp": 1}) is None
    spec = TensorSpec("w", (4,), "float32", stage=Stage(1, 2))
    assert spec.region(ParallelConfig(pp=2), {"pp": 0}) is None
    gate_up, mean = (EVERYTHING.local(fqn, ParallelConfig(tp=2), {"tp": 0}) for fqn in ("gate_up", "mean"))
    assert mean is not None
    assert gate_up is not None
    assert mean.is_plain
    assert not gate_up.is_plain


def test_a_fault_in_an_operation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for low, count in ((0, 2), (1, 3), (3, 1)):  # rows on no rank at the end; on both; on none in the middle
        monkeypatch.setattr(Shard, "part", lambda self, length, parts, index, low=low, n=count: (low * index, n))
        with pytest.raises(LayoutError, match="are not the dim"):
            Layout((TensorSpec("w", (4,), "float32", (Shard(0, "tp"),)),)).check(ParallelConfig(tp=2))


def test_an_element_on_no_rank_is_named() -> None:
    layout = Layout((TensorSpec("w", (4,), "float32", (Flat("dp"),)),))
    check_coverage(layout, ParallelConfig(dp=3))
    gappy = Layout(layout.tensors)
    gappy._memo[ParallelConfig(), ()] = {}
    gappy._memo["axes"] = ()
    with pytest.raises(LayoutError, match=r"w: \[0:4\] is on no rank"):
        check_coverage(gappy, ParallelConfig())


def test_a_flat_range_in_the_middle_of_rows() -> None:
    layout = Layout((TensorSpec("w", (4, 3), "float32", (Flat("dp"),)), TensorSpec("s", (), "float32", (Flat("dp"),))))
    assert layout.regions_of(ParallelConfig(dp=2), 0)["s"] == (Region((), ()),)
    held = [layout.regions_of(ParallelConfig(dp=5), rank).get("w", ()) for rank in range(5)]
    assert held[0] == (Region((0, 0), (1, 3)),)
    five = layout.regions_of(ParallelConfig(dp=3), 1)["w"]
    assert five == (Region((1, 1), (1, 2)), Region((2, 0), (1, 2)))


def test_copies_that_overlap_and_empty_ones() -> None:
    index = CopyIndex([(Region((0,), (6,)), (0,)), (Region((2,), (2,)), (1,)), (Region((8,), (2,)), (2,))])
    assert index.overlapping(Region((5,), (2,))) == [(0, Region((5,), (1,)))]
    assert CopyIndex([]).tiles(Region((0,), (2,))) == []
    layout = Layout((TensorSpec("w", (4,), "float32"),))
    holders = {"a": {"w": (Region((0,), (0,)), Region((0,), (4,)))}}
    assert plan(PTC(layout, ParallelConfig(), ("b",)), holders, {"a": "x", "b": "x"}).num_bytes == 16
    assert plan(PTC(layout, ParallelConfig(), ("b",)), holders, {"a": "x", "b": "y"}).num_bytes == 16


def test_a_fetch_of_what_is_not_needed_is_refused() -> None:
    layout = Layout((TensorSpec("w", (4,), "float32", (Shard(0, "tp"),)),))
    target = PTC(layout, ParallelConfig(tp=2), ("b", "c"))
    holders = {"a": {"w": (Region((0,), (4,)),)}}
    moves = plan(target, holders)
    (fetch,) = moves.parts["c"].fetches
    broken = {**moves.parts, "b": NodePlan("b", (fetch,), 8, 0)}
    with pytest.raises(LayoutError, match="is fetched, but not needed"):
        validate(ReconfigurationPlan(broken), target, holders)
    double = PTC(layout, ParallelConfig(tp=2), ("b", "b"))
    whole = plan(double, {"a": {"w": (Region((0,), (4,)),)}})
    assert whole.num_bytes == 16
    validate(whole, double, holders)


def test_a_box_over_two_needed_regions_is_needed() -> None:
    layout = Layout((TensorSpec("w", (4,), "float32", (Shard(0, "tp"),)),))
    target = PTC(layout, ParallelConfig(tp=2), ("b", "b"))
    holders = {"a": {"w": (Region((0,), (4,)),)}}
    part = NodePlan("b", (Fetch("w", "a", Region((0,), (4,)), 16),), 16, 0)
    validate(ReconfigurationPlan({"b": part}), target, holders)


def test_neighbours_are_put_together() -> None:
    rows = [Region((1, 0), (1, 4)), Region((0, 0), (1, 2)), Region((0, 2), (1, 2)), Region((3, 0), (1, 4))]
    assert joined(rows) == (Region((0, 0), (2, 4)), Region((3, 0), (1, 4)))
    assert joined([]) == ()
