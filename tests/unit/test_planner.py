from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import Fetch, NodePlan, ReconfigurationPlan, plan, plan_node
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.validation import validate
from tenplexrun.errors import LayoutError, StateLostError

LAYOUT = Layout(
    (
        TensorSpec("bias", (8,), "float32"),
        TensorSpec("weight", (8, 4), "float32", (Shard(0, "tp"),)),
    )
)


def test_a_joiner_fetches_each_region_once_and_from_both_replicas() -> None:
    current = PTC(LAYOUT, ParallelConfig(dp=2, tp=2), ("a", "a", "b", "b"))
    target = PTC(LAYOUT, ParallelConfig(dp=3, tp=2), ("a", "a", "b", "b", "c", "c"))
    holders = {node: current.regions_on(node) for node in ("a", "b")}
    moves = plan(target, holders)
    assert moves.parts["a"].fetches == moves.parts["b"].fetches == ()
    low, high = Region((0, 0), (4, 4)), Region((4, 0), (4, 4))
    assert moves.parts["c"].fetches == (
        Fetch("bias", "a", Region((0,), (8,)), 32),
        Fetch("weight", "a", low, 64),
        Fetch("weight", "b", high, 64),
    )
    assert (moves.num_bytes, moves.lower_bound_bytes, moves.egress()) == (160, 160, {"a": 96, "b": 64})


def test_a_resize_along_another_dim_reads_only_what_is_needed() -> None:
    rows = Layout((TensorSpec("w", (8, 8), "float32", (Shard(0, "dp"), Shard(1, "tp"))),))
    current = PTC(rows, ParallelConfig(dp=2), ("a", "b"))
    target = PTC(rows, ParallelConfig(tp=2), ("a", "b"))
    moves = plan(target, {node: current.regions_on(node) for node in "ab"})
    assert moves.parts["a"].fetches == (Fetch("w", "b", Region((4, 0), (4, 4)), 64),)
    assert moves.parts["b"].fetches == (Fetch("w", "a", Region((0, 4), (4, 4)), 64),)


def test_copies_that_overlap_are_not_fetched_twice() -> None:
    """Nodes that went through a resize hold the regions of two layouts. The largest part of one copy comes first."""
    layout = Layout((TensorSpec("w", (12,), "float32"),))
    target = PTC(layout, ParallelConfig(), ("d",))
    holders = {
        "a": {"w": (Region((0,), (6,)), Region((4,), (4,)))},
        "b": {"w": (Region((3,), (8,)),)},
        "c": {"w": (Region((8,), (4,)),)},
    }
    moves = plan(target, holders)
    validate(moves, target, holders)
    assert moves.parts["d"].fetches == (
        Fetch("w", "a", Region((0,), (3,)), 12),
        Fetch("w", "b", Region((3,), (8,)), 32),
        Fetch("w", "c", Region((11,), (1,)), 4),
    )


def test_many_joiners_do_not_all_begin_at_the_same_source() -> None:
    layout = Layout((TensorSpec("w", (1024,), "float32"),))
    target = PTC(layout, ParallelConfig(dp=6), tuple("abcdef"))
    holders = {node: target.regions_on(node) for node in "ace"}
    assert plan(target, holders).egress() == dict.fromkeys("ace", 4096)


def test_the_lost_region_is_named() -> None:
    current = PTC(LAYOUT, ParallelConfig(tp=2), ("a", "b"))
    target = PTC(LAYOUT, ParallelConfig(), ("a",))
    with pytest.raises(StateLostError, match=r"weight \[4:8, 0:4\]; bring back a node"):
        plan(target, {"a": current.regions_on("a")})
    with pytest.raises(StateLostError, match=r"weight \[4:8, 0:4\]"):
        plan_node("a", target, {"a": current.regions_on("a")})


def test_of_many_lost_regions_five_are_named() -> None:
    layout = Layout(tuple(TensorSpec(f"w{index}", (2,), "float32") for index in range(7)))
    with pytest.raises(StateLostError, match=r"w4 .* and 2 more"):
        plan(PTC(layout, ParallelConfig(), ("a",)), {})


def test_the_state_of_a_lost_coordinate_is_absent_and_said_so() -> None:
    layout = Layout(
        (
            *(TensorSpec(f"rng.{rank}", (16,), "uint8", at={"dp": rank}) for rank in range(3)),
            TensorSpec("w", (4,), "float32"),
        )
    )
    current = PTC(layout, ParallelConfig(dp=3), ("a", "b", "c"))
    target = PTC(layout, ParallelConfig(dp=2), ("c", "a"))
    holders = {"c": current.regions_on("c"), "b": current.regions_on("b")}
    moves = plan(target, holders)
    validate(moves, target, holders)
    assert moves.parts["c"] == NodePlan("c", (), 16, 16, ("rng.0",))
    assert [fetch.fqn for fetch in moves.parts["a"].fetches] == ["rng.1", "w"]


def test_a_spare_needs_nothing() -> None:
    target = PTC(LAYOUT, ParallelConfig(), ("a",))
    assert plan_node("spare", target, {}) == NodePlan("spare", (), 0, 0)


def test_batches_are_by_source() -> None:
    fetches = tuple(Fetch(fqn, source, Region((0,), (1,)), 4) for source, fqn in ("ax", "ay", "bx"))
    assert NodePlan("c", fetches, 12, 0).batches() == (("a", fetches[:2]), ("b", fetches[2:]))
    assert [source for source, _ in NodePlan("aa", fetches, 12, 0).batches()] == ["b", "a"]


def test_malformed_plans_are_refused() -> None:
    part = NodePlan("a", (), 0, 0).to_json()
    for record in ({}, {"parts": [part, part]}, {"parts": [{**part, "x": 1}]}, {"parts": [{**part, "fetches": [{}]}]}):
        with pytest.raises(LayoutError):
            ReconfigurationPlan.from_json(record)


def test_a_ptc_knows_its_ranks_and_bytes() -> None:
    ptc = PTC(LAYOUT, ParallelConfig(dp=2, tp=2), ("a", "a", "b", "c"))
    assert ptc.ranks_of("weight", Region((4, 1), (2, 2))) == (1, 3)
    assert ptc.ranks_of("weight", Region((3, 0), (2, 1))) == ()
    assert (ptc.num_bytes, ptc.bytes_of(0), ptc.bytes_on("a"), ptc.bytes_on("b")) == (160, 96, 160, 96)
    assert PTC.from_json(ptc.to_json()) == ptc
    with pytest.raises(LayoutError, match="3 were placed"):
        PTC(LAYOUT, ParallelConfig(dp=2, tp=2), ("a", "b", "c"))


_SCRIPT = """
import hashlib, json
from tenplexrun.core.layout import Layout, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.snapshots import arena_map
layout = Layout(tuple(
    TensorSpec(f"l.{i}.w{j}", (7, 5), "float32", (Shard(j % 2, "tp", "front"),), Stage(i, 4))
    for i in range(4) for j in range(6)))
def placed(config, names): return PTC(layout, config, tuple(names[r % len(names)] for r in range(config.world_size)))
current, target = placed(ParallelConfig(dp=2, tp=3), "pqr"), placed(ParallelConfig(pp=2, tp=2, dp=2), "rstu")
moves = plan(target, {node: current.regions_on(node) for node in set(current.nodes)})
arena = arena_map(layout, target.config, {0, 1, 4})
print(layout.digest, hashlib.sha256(json.dumps([moves.to_json(), arena.to_json()]).encode()).hexdigest())
"""


def test_digests_plans_and_arenas_agree_over_hash_seeds() -> None:
    results = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _SCRIPT]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd="/", timeout=60)
        results.add(done.stdout)
    assert len(results) == 1
