"""Which snapshot a recovery takes: the newest that the living nodes can tile, and nothing that only looks complete."""

from __future__ import annotations

import json

import pytest

from tenplexrun.core.layout import Layout, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Claim, Holding, SnapshotId, choose, gaps, holders_of, regions_of_holdings
from tenplexrun.errors import LayoutError

LAYOUT = Layout(
    (
        TensorSpec("layers.0.w", (8, 4), "float32", (Shard(0, "tp"),), Stage(0, 2)),
        TensorSpec("layers.1.w", (8, 4), "float32", (Shard(0, "tp"),), Stage(1, 2)),
        TensorSpec("nothing", (0,), "float32"),
        TensorSpec("norm", (4,), "float32"),
        TensorSpec("rng.1", (16,), "uint8", at={"dp": 1, "tp": 0}),
    )
)
DP2_TP2 = ParallelConfig(dp=2, tp=2)
PP2_TP2 = ParallelConfig(pp=2, tp=2)


def at(step: int, round_number: int = 0, layout: Layout = LAYOUT) -> SnapshotId:
    return SnapshotId(round_number, step, layout.digest)


def held(snapshot: SnapshotId, config: ParallelConfig, *ranks: int, bad: tuple[str, ...] = ()) -> Holding:
    return Holding(snapshot, (Claim(config, ranks),), except_=bad)


def test_newest_of_all_nodes() -> None:
    holdings = {
        "a": [held(at(5), DP2_TP2, 0, 1), held(at(6), DP2_TP2, 0, 1)],
        "b": [held(at(5), DP2_TP2, 2, 3), held(at(6), DP2_TP2, 2, 3)],
    }
    assert choose(holdings, LAYOUT) == at(6)


def test_one_replica_is_enough_when_the_other_node_is_lost() -> None:
    """Also without the random state of the lost coordinate: it goes with its owner."""
    assert choose({"a": [held(at(6), DP2_TP2, 0, 1)]}, LAYOUT) == at(6)


def test_a_newer_partial_candidate_is_passed_over() -> None:
    holdings = {
        "a": [held(at(5), PP2_TP2, 0, 1), held(at(6), PP2_TP2, 0, 1)],
        "b": [held(at(5), PP2_TP2, 2, 3)],
    }
    assert choose(holdings, LAYOUT) == at(5)


def test_a_newer_partial_candidate_that_tiles_from_one_replica_is_taken() -> None:
    holdings = {"a": [held(at(5), DP2_TP2, 0, 1)], "b": [held(at(5), DP2_TP2, 2, 3), held(at(6), DP2_TP2, 2, 3)]}
    assert choose(holdings, LAYOUT) == at(6)


def test_a_later_round_is_newer_even_at_an_earlier_step() -> None:
    holdings = {"a": [held(at(9), DP2_TP2, 0, 1), held(at(7, 1), DP2_TP2, 0, 1)]}
    assert choose(holdings, LAYOUT) == at(7, 1)


def test_parts_of_different_steps_are_never_put_together() -> None:
    holdings = {"a": [held(at(5), PP2_TP2, 0, 1)], "b": [held(at(6), PP2_TP2, 2, 3)]}
    assert choose(holdings, LAYOUT) is None


def test_half_a_tensor_parallel_group_is_not_enough() -> None:
    holdings = {"a": [held(at(5), DP2_TP2, 0, 2)]}
    assert choose(holdings, LAYOUT) is None
    missing = [("layers.0.w", Region((4, 0), (4, 4))), ("layers.1.w", Region((4, 0), (4, 4)))]
    assert gaps(LAYOUT, holders_of(at(5), holdings, LAYOUT)) == missing


def test_a_copy_that_fails_its_checksum_is_no_copy() -> None:
    whole = {"a": [held(at(5), DP2_TP2, 0, 1), held(at(6), DP2_TP2, 0, 1, bad=("norm",))]}
    assert choose(whole, LAYOUT) == at(5)
    whole["b"] = [held(at(6), DP2_TP2, 2)]
    assert choose(whole, LAYOUT) == at(6), "the other replica has it"
    assert "norm" not in holders_of(at(6), whole, LAYOUT)["a"]


def test_claims_of_several_configs_add_up() -> None:
    one = Holding(at(5), (Claim(PP2_TP2, (0,)), Claim(ParallelConfig(tp=4), (2, 3))))
    regions = regions_of_holdings([one], LAYOUT)
    assert regions["layers.0.w"] == (Region((0, 0), (4, 4)), Region((4, 0), (2, 4)), Region((6, 0), (2, 4)))
    assert choose({"a": [one]}, LAYOUT) is None
    assert choose({"a": [one], "b": [held(at(5), PP2_TP2, 2)]}, LAYOUT) == at(5)


def test_a_snapshot_of_an_unknown_layout_is_passed_over() -> None:
    other = Layout((TensorSpec("w", (4,), "float32"),))
    holdings = {"a": [held(at(5), DP2_TP2, 0, 1), held(at(9, layout=other), ParallelConfig(), 0)]}
    assert choose(holdings, LAYOUT) == at(5)
    assert choose(holdings, {one.digest: one for one in (LAYOUT, other)}) == at(9, layout=other)
    with pytest.raises(LayoutError, match="is of layout"):
        regions_of_holdings(holdings["a"], LAYOUT)


def test_nothing_held_nothing_chosen() -> None:
    assert choose({}, LAYOUT) is None
    assert choose({"a": []}, LAYOUT) is None


def test_where_the_first_replica_counts_the_lowest_living_rank_alone_holds_it() -> None:
    layout = Layout(
        (
            TensorSpec("mean", (4,), "float32", replicas="first"),
            TensorSpec("part", (8,), "float32", (Shard(0, "tp"),), replicas="first"),
            TensorSpec("w", (4,), "float32"),
        )
    )
    config, snapshot = ParallelConfig(dp=3, tp=2), at(5, layout=layout)
    nodes = {"c": (0, 1), "b": (2, 3), "a": (4, 5)}
    holdings = {node: [held(snapshot, config, *ranks)] for node, ranks in nodes.items()}
    whole = Region((0,), (4,))
    found = holders_of(snapshot, holdings, layout)
    assert list(found) == ["a", "b", "c"]
    assert dict(found["c"]) == {"mean": (whole,), "part": (whole, Region((4,), (4,))), "w": (whole,)}
    assert dict(found["a"]) == dict(found["b"]) == {"w": (whole,)}
    assert found["a"].shared is found["b"].shared, "equal nodes stay one class"  # type: ignore[attr-defined]
    moves = plan(PTC(layout, config, ("a", "a", "b", "b", "c", "c")), found)
    assert {node: [fetch.source for fetch in part.fetches] for node, part in moves.parts.items()} == {
        "a": ["c"] * 3, "b": ["c"] * 3, "c": [],
    }  # fmt: skip
    del holdings["c"]
    assert "mean" in holders_of(snapshot, holdings, layout)["b"], "of those that live"
    assert choose(holdings, layout) == snapshot
    # adopted under another config, where the node's ranks have other parts: each element has one holder still
    holdings["b"].append(held(snapshot, ParallelConfig(tp=1), 0))
    assert holders_of(snapshot, holdings, layout)["b"]["part"] == (Region((0,), (8,)),)
    assert "part" not in holders_of(snapshot, holdings, layout)["a"]


def test_json() -> None:
    one = Holding(at(5), (Claim(DP2_TP2, (3, 1, 1)),), committed=True, except_=("norm",), consumed=640)
    record = json.loads(json.dumps(one.to_json()))
    assert Holding.from_json(record) == one
    assert one.claims[0].ranks == (1, 3)
    assert record["except"] == ["norm"]


@pytest.mark.parametrize(
    "change",
    [
        {"kept": True},
        {"committed": 1},
        {"consumed": -1},
        {"except": "norm"},
        {"snapshot": {"round": 0, "step": 1}},
        {"snapshot": {"round": 0, "step": True, "digest": "x"}},
        {"claims": [{"config": {"tp": 2}, "ranks": [2]}]},
        {"claims": [{"config": {"tp": 0}, "ranks": []}]},
        {"claims": [{"config": {"zp": 2}, "ranks": []}]},
        {"claims": [{"config": {"ep": 2}, "ranks": []}]},
        {"claims": [{"ranks": []}]},
    ],
)
def test_malformed_holdings_are_refused(change: dict[str, object]) -> None:
    record = held(at(5), DP2_TP2, 0).to_json()
    with pytest.raises(LayoutError):
        Holding.from_json({**record, **change})
