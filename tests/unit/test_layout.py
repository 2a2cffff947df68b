from __future__ import annotations

from typing import Any

import pytest

from tenplexrun.core.layout import Layout, Shard, Stage, Stages, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import arena_map
from tenplexrun.errors import LayoutError


def test_a_column_parallel_staged_weight() -> None:
    layout = Layout((TensorSpec("layers.3.w", (8, 6), "float32", (Shard(0, "tp"),), Stage(3, 4)),))
    config = ParallelConfig(pp=2, dp=2, tp=2)
    held = {rank: dict(layout.regions_of(config, rank)) for rank in range(8)}
    low, high = (Region((0, 0), (4, 6)),), (Region((4, 0), (4, 6)),)
    assert held == {
        0: {}, 1: {}, 2: {}, 3: {},
        4: {"layers.3.w": low}, 5: {"layers.3.w": high}, 6: {"layers.3.w": low}, 7: {"layers.3.w": high},
    }  # fmt: skip
    assert layout.num_bytes == 8 * 6 * 4


def test_order_of_operations_is_nesting_order() -> None:
    """FSDP over tensor parallelism: DTensor's strided shard, tp outermost though dp is the outer axis."""
    config = ParallelConfig(dp=2, tp=2)
    nested = TensorSpec("w", (8,), "float32", (Shard(0, "tp"), Shard(0, "dp")))
    at = {rank: nested.region(config, config.coord(rank)) for rank in range(4)}
    assert [at[rank].offsets[0] for rank in range(4) if at[rank]] == [0, 4, 2, 6]  # type: ignore[union-attr]


def test_ceil_leaves_late_parts_short_then_empty() -> None:
    spec, config = TensorSpec("w", (5,), "float32", (Shard(0, "tp"),)), ParallelConfig(tp=4)
    lengths = [spec.region(config, config.coord(rank)).lengths[0] for rank in range(4)]  # type: ignore[union-attr]
    assert lengths == [2, 2, 1, 0]
    assert "w" not in Layout((spec,)).regions_of(config, 3)


def test_the_state_of_one_coordinate_is_needed_only_there() -> None:
    layout = Layout((TensorSpec("rng", (16,), "uint8", at={"tp": 1, "dp": 0}),))
    config = ParallelConfig(dp=2, tp=2)
    assert [bool(layout.regions_of(config, rank)) for rank in range(4)] == [False, True, False, False]
    assert not any(layout.regions_of(ParallelConfig(dp=2), rank) for rank in range(2))
    assert Layout.from_json(layout.to_json()) == layout


def test_zero_size_tensors_are_in_the_catalogue_and_never_held() -> None:
    layout = Layout((TensorSpec("none", (0, 4), "float32"), TensorSpec("step", (), "int64")))
    assert layout.regions_of(ParallelConfig(), 0) == {"step": (Region((), ()),)}
    assert layout.region("none", ParallelConfig(), ParallelConfig().coord(0)) == Region((0, 0), (0, 4))


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (
            TensorSpec("w", (6,), "float32", (Shard(0, "tp", "even"),)),
            ParallelConfig(tp=4),
            "w .*does not divide by tp=4",
        ),
        (TensorSpec("w", (6,), "float32", (), Stage(0, 2)), ParallelConfig(pp=3), "pp=3 stages cannot share 2 items"),
    ],
)
def test_an_impossible_layout_is_one_clear_line(spec: TensorSpec, config: ParallelConfig, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        Layout((spec,)).check(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float31"}, "float31"),
        ({"shape": (-1,)}, "whole number"),
        ({"shape": (True,)}, "whole number"),
        ({"ops": (Shard(1, "tp"),)}, "dim 1 is sharded"),
        ({"ops": (Shard(0, "tp"), Shard(0, "tp"))}, "used twice"),
        ({"ops": (Shard(0, "pp"),), "stage": Stage(0, 1)}, "used twice"),
        ({"ops": (Shard(0, "dp"),), "at": {"dp": 0}}, "used twice"),
        ({"at": {"node": 0}}, "unknown"),
        ({"at": {"dp": -1}}, "whole number"),
    ],
)
def test_contradictions_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        TensorSpec(**{"fqn": "model.w", "shape": (4,), "dtype": "float32", **fields})
    assert "model.w" in str(caught.value)


def test_unknown_axes_policies_and_stages_are_refused() -> None:
    for build in (lambda: Shard(0, "mp"), lambda: Shard(0, "tp", "back"), lambda: Shard(-1, "tp"), lambda: Stage(2, 2)):
        with pytest.raises(LayoutError):
            build()


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 3},
        {"extra": 1},
        {"tensors": None},
        {"tensors": [{"fqn": "w", "shape": [2]}]},
        {"tensors": [{"fqn": "w", "shape": [2], "dtype": "float32", "alias": "v"}]},
        {"tensors": [{"fqn": "w", "shape": [2], "dtype": "float32", "ops": [{"op": "pad", "dim": 0}]}]},
        {"tensors": [{"fqn": "w", "shape": [2], "dtype": "float32",
                      "ops": [{"op": "flat", "dim": 0, "axis": "tp", "policy": "ceil"}]}]},
        {"tensors": [{"fqn": "w", "shape": [2], "dtype": "float32", "stage": [0]}]},
        {"tensors": [{"fqn": "w", "shape": [2], "dtype": "float32", "at": {"node": 1}}]},
        {"tensors": [{"fqn": "", "shape": [2], "dtype": "float32"}]},
        {"tensors": [{"fqn": "w", "shape": 2, "dtype": "float32"}]},
        {"tensors": [{"fqn": "w", "shape": [2], "dtype": ["float32"]}]},
        {"tensors": [{"fqn": "w", "shape": [2], "dtype": "float32"}] * 2},
    ],
)  # fmt: skip
def test_records_with_anything_unknown_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json({"schema": 1, "tensors": [], **change})


def test_merge_names_the_tensor_that_two_ranks_declare_differently() -> None:
    """Stage-local layer numbers collide: two stages both have a `layers.0.w`."""
    first = Layout((TensorSpec("layers.0.w", (4,), "float32", (), Stage(0, 2)),))
    second = Layout((TensorSpec("layers.0.w", (4,), "float32", (), Stage(1, 2)),))
    with pytest.raises(LayoutError, match=r"layers\.0\.w is declared in two ways"):
        Layout.merge([first, second])


def test_unknown_names_are_refused() -> None:
    layout = Layout((TensorSpec("w", (4,), "float32"),))
    assert "w" in layout
    assert "v" not in layout
    with pytest.raises(LayoutError, match="has no tensor v"):
        layout.spec("v")


class TestStages:
    rule = Stages("layers.{}.", 4, first=("embed",), last=("norm", "head"))

    @pytest.mark.parametrize(
        ("fqn", "stage"),
        [
            ("layers.2.attn.q.weight", Stage(2, 4)),
            ("model.layers.3.norm.weight", Stage(3, 4)),
            ("exp_avg.model.layers.0.w", Stage(0, 4)),
            ("model.embed.weight", Stage(0, 4)),
            ("head.weight", Stage(3, 4)),
            ("exp_avg.norm.weight", Stage(3, 4)),
            ("sublayers.2.w", None),
            ("embedding.weight", None),
            ("layers.x.w", None),
            ("step", None),
        ],
    )
    def test_names_find_their_stage(self, fqn: str, stage: Stage | None) -> None:
        assert self.rule.stage_of(fqn) == stage

    def test_json(self) -> None:
        assert Stages.from_json(self.rule.to_json()) == self.rule
        with pytest.raises(LayoutError):
            Stages.from_json({**self.rule.to_json(), "middle": []})

    def test_contradictions_are_refused(self) -> None:
        with pytest.raises(LayoutError, match="item 4 of only 4"):
            self.rule.stage_of("layers.4.w")
        with pytest.raises(LayoutError, match="exactly one"):
            Stages("layers.", 4)
        with pytest.raises(LayoutError, match="both for the first and for the last"):
            Stages("layers.{}.", 4, first=("embed",), last=("embed",))
        with pytest.raises(LayoutError, match="use a smaller pp"):
            self.rule.items_of(0, 5)


def test_ranks_that_share_a_region_share_the_writing() -> None:
    layout = Layout(tuple(TensorSpec(f"w{index}", (64,), "float32") for index in range(8)))
    arena = arena_map(layout, ParallelConfig(dp=2), (0, 1))
    assert [entry.writer for entry in arena.entries] == [0, 1] * 4
    assert type(arena).from_json(arena.to_json()) == arena
