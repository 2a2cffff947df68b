"""Cases S1, S10, S11, S12 and S17 of the field, at the planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tenplexrun.core.layout import Layout, Order, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.replicas import Comparison, Copied, Split, alike, digests, disagreements

_MERGE = """
import json
from tenplexrun.core.layout import Layout, Order, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import plan
from tenplexrun.core.ptc import PTC
layout = Layout((TensorSpec("qkv", (16, 2), "float32", (Order(0, 4, (8, 4, 4)), Shard(0, "tp", "even"))),))
current = PTC(layout, ParallelConfig(tp=4), tuple("pqrs"))
moves = plan(PTC(layout, ParallelConfig(), ("z",)), {node: current.regions_on(node) for node in set(current.nodes)})
print(json.dumps(moves.to_json()))
"""


def test_s1_a_merge_places_parts_by_offset_whatever_the_hash_seed() -> None:
    plans = set()
    for seed in range(6):
        done = subprocess.run(
            [sys.executable, "-c", _MERGE],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            timeout=120,
        )
        plans.add(done.stdout)
    assert len(plans) == 1
    merged = np.full((16, 2), -1)
    numbers = np.arange(32).reshape(16, 2)
    for fetch in json.loads(plans.pop())["parts"][0]["fetches"]:
        (row, column), (rows, columns) = fetch["region"]
        merged[row : row + rows, column : column + columns] = numbers[row : row + rows, column : column + columns]
    np.testing.assert_array_equal(merged, numbers)


def test_s10_scalars_of_the_optimizer_move_nothing_in_place() -> None:
    layout = Layout(
        (
            TensorSpec("w", (8,), "float32", (Shard(0, "tp"),)),
            *(TensorSpec(f"optim.w{index}.step", (), "float32") for index in range(5)),
            TensorSpec("empty", (0,), "float32"),
        )
    )
    ptc = PTC(layout, ParallelConfig(dp=2, tp=2), tuple("aabb"))
    assert plan(ptc, {node: ptc.regions_on(node) for node in "ab"}).num_bytes == 0


def test_s11_unique_bytes_leave_once_a_node_and_from_all_sources() -> None:
    layout = Layout((TensorSpec("w", (4096, 1024), "float32"),))
    current = PTC(layout, ParallelConfig(dp=2), tuple("ab"))
    target = PTC(layout, ParallelConfig(dp=10), tuple("aabbccddee"))
    moves = plan(target, {node: current.regions_on(node) for node in "ab"})
    size = 4096 * 1024 * 4
    assert moves.num_bytes == 3 * size  # c, d and e, two ranks each
    assert moves.egress() == {"a": 3 * size // 2, "b": 3 * size // 2}  # d is served by both, in halves


def test_s12_a_split_along_another_dim_reads_only_what_is_needed() -> None:
    layout = Layout((TensorSpec("w", (8, 8), "float32", (Shard(0, "cp"), Shard(1, "tp"))),))
    current = PTC(layout, ParallelConfig(cp=2, tp=2), tuple("abcd"))
    target = PTC(layout, ParallelConfig(cp=2, tp=4), tuple("efghijkl"))
    moves = plan(target, {node: current.regions_on(node) for node in "abcd"})
    assert [part.num_bytes for part in moves.parts.values()] == [8 * 8 * 4 // 8] * 8


def test_s17_replicated_norms_survive_a_change_of_tp_and_are_verified() -> None:
    layout = Layout((TensorSpec("norm", (6,), "float32"), TensorSpec("w", (4,), "float32", (Shard(0, "tp"),))))
    current = PTC(layout, ParallelConfig(tp=2), tuple("ab"))
    target = PTC(layout, ParallelConfig(), ("a",))
    moves = plan(target, {node: current.regions_on(node) for node in "ab"})
    assert [fetch.fqn for fetch in moves.parts["a"].fetches] == ["w"]
    (norm,) = current.regions_of(0)["norm"]
    same = [Copied(node, "norm", norm, 7) for node in "ab"]
    assert disagreements(same) == ()
    other = [Copied("a", "norm", norm, 7), Copied("b", "norm", norm, 8), Copied("c", "norm", norm, 7)]
    (found,) = disagreements(other)
    assert (found.fqn, found.nodes) == ("norm", (("a", "c"), ("b",)))
    assert "norm [0:6] differs" in str(found)


def test_nodes_compare_what_several_have_alike_and_replicas_that_may_differ_are_not_compared() -> None:
    layout = Layout(
        (
            TensorSpec("bn.running_mean", (6,), "float32", replicas="first"),
            TensorSpec("norm", (6,), "float32"),
            TensorSpec("w", (8,), "float32", (Shard(0, "tp"),)),
            TensorSpec("first.w", (8,), "float32", (Shard(0, "tp"),), Stage(0, 2)),
        )
    )
    config, workers = ParallelConfig(pp=2, dp=2, tp=2), (2, 2, 2, 1, 1)  # the last replica's tp group: on two nodes
    groups = [alike(layout, config, workers, place) for place in range(5)]
    names = [sorted(sorted({fqn for fqn, _ in places}) for places in one.values()) for one in groups]
    assert names == [[["first.w"], ["norm"], ["w"], ["w"]]] * 2 + [[["norm"], ["w"], ["w"]]] + [[["norm"], ["w"]]] * 2
    sums = {
        place: number for number, place in enumerate(place for one in groups[:1] for ps in one.values() for place in ps)
    }
    assert digests(groups[0], sums) == digests(groups[1], sums)
    changed = {**sums, ("norm", Region((0,), (6,))): 77}
    unlike = [key for key, digest in digests(groups[1], changed).items() if digest != digests(groups[0], sums)[key]]
    assert [groups[0][key] for key in unlike] == [(("norm", Region((0,), (6,))),)]


def test_steps_are_compared_once_all_have_reported_and_a_split_is_looked_into_ever_more_rarely() -> None:
    comparison = Comparison()
    assert comparison.report("a", 1, {"k": "x"}) == comparison.report("b", 1, {"k": "y"}) == []
    comparison.expected = frozenset("ab")
    assert comparison.settle() == [Split(1, "k", (("a",), ("b",)))]
    found = []
    for step in range(2, 18):
        assert comparison.report("a", step, {"k": "x"}) == []
        found += comparison.report("b", step, {"k": "x" if step == 3 else "z"})
    assert [split.step for split in found] == [2, 5, 9, 17]
    assert comparison.report("b", 19, {}) == comparison.report("b", 20, {"k": "x"}) == []
    assert comparison.report("a", 20, {"k": "x"}) == [], "step 19 will not be whole any more"


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_qkv_is_three_runs_a_rank(groups: int) -> None:
    spec = TensorSpec("qkv", (16,), "float32", (Order(0, 4, (8, 4, 4)), Shard(0, "tp", "even")))
    regions = Layout((spec,)).regions_of(ParallelConfig(tp=groups), 1)["qkv"]
    assert [region.lengths[0] for region in regions] == [8 // groups, 4 // groups, 4 // groups]
