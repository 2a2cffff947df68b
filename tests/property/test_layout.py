"""Layouts against independent definitions: numpy.array_split, torch.chunk's rule, and coverage of every element."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from tenplexrun.core.layout import Layout, Shard, Stage, Stages, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import ALIGNMENT, arena_map

configs = st.builds(
    ParallelConfig, pp=st.integers(1, 3), dp=st.integers(1, 3), cp=st.integers(1, 2), tp=st.integers(1, 4)
)


@st.composite
def specs(draw: st.DrawFn, fqn: str = "w") -> TensorSpec:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5, 7, 12]), max_size=3)))
    axes = draw(st.permutations(["dp", "cp", "tp"])) if shape else []
    ops = [
        Shard(draw(st.integers(0, len(shape) - 1)), axis, draw(st.sampled_from(["ceil", "front"])))
        for axis in axes[: draw(st.integers(0, 3))]
    ]
    stage = draw(st.none() | st.builds(lambda index: Stage(index, 4), st.integers(0, 3)))
    dtype = draw(st.sampled_from(["float64", "float32", "bfloat16", "bool"]))
    return TensorSpec(fqn, shape, dtype, tuple(ops), stage)


def split(block: np.ndarray, op: Shard, parts: int) -> Sequence[np.ndarray]:
    """What numpy, or torch.chunk padded with empty parts, makes of a block."""
    length = block.shape[op.dim]
    if op.policy == "front":
        return np.array_split(block, parts, axis=op.dim)
    chunk = -(-length // parts)
    return np.split(block, [min(chunk * index, length) for index in range(1, parts)], axis=op.dim)


@given(specs(), configs)
def test_every_rank_holds_what_nested_splits_give_it(spec: TensorSpec, config: ParallelConfig) -> None:
    numbers = np.arange(spec.whole.num_elements).reshape(spec.shape)
    layout = Layout((spec,))
    layout.check(config)
    seen = []
    for rank in range(config.world_size):
        coord = config.coord(rank)
        if spec.stage is not None and spec.stage.index not in np.array_split(np.arange(4), config.pp)[coord["pp"]]:
            assert layout.region("w", config, coord) is None
            continue
        want = numbers
        for op in spec.ops:
            want = split(want, op, config.size(op.axis))[coord[op.axis]]
        region = layout.region("w", config, coord)
        assert region is not None
        np.testing.assert_array_equal(numbers[region.slices], want)
        assert layout.regions_of(config, rank).get("w") == (None if region.is_empty else (region,))
        seen.append(want.ravel())
    assert set(np.concatenate(seen).tolist()) == set(range(numbers.size)), "every element is on some rank"


@given(st.lists(st.integers(0, 9), max_size=4, unique=True).flatmap(lambda n: st.tuples(*(specs(f"t{i}") for i in n))))
def test_json_and_order_do_not_change_the_digest(tensors: tuple[TensorSpec, ...]) -> None:
    layout = Layout(tensors)
    assert Layout(tensors[::-1]).digest == layout.digest
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert (again, again.digest) == (layout, layout.digest)
    assert Layout.merge([Layout((one,)) for one in tensors] * 2) == layout


@examples(50)
@given(st.tuples(specs("a"), specs("b"), specs("c")), configs, st.data())
def test_a_slot_holds_each_distinct_region_once(
    tensors: tuple[TensorSpec, ...], config: ParallelConfig, data: st.DataObject
) -> None:
    layout = Layout(tensors)
    ranks = data.draw(st.sets(st.integers(0, config.world_size - 1), min_size=1))
    arena = arena_map(layout, config, ranks)
    assert arena == arena_map(layout, config, sorted(ranks, reverse=True))
    needed = {(fqn, region) for rank in ranks for fqn, (region,) in layout.regions_of(config, rank).items()}
    assert [(one.fqn, one.region) for one in arena.entries] == sorted(needed)
    end = 0
    for entry in arena.entries:
        assert entry.offset >= end
        assert entry.offset % ALIGNMENT == 0
        assert entry.writer in ranks
        assert layout.regions_of(config, entry.writer)[entry.fqn] == (entry.region,)
        end = entry.offset + entry.num_bytes
    assert end <= arena.num_bytes < end + ALIGNMENT


@given(st.integers(1, 40), st.integers(1, 12))
def test_stages_are_array_split(of: int, pp: int) -> None:
    owners = [Stage(index, of).owner(pp) for index in range(of)]
    want = [part.tolist() for part in np.array_split(np.arange(of), pp)]
    assert [[index for index in range(of) if owners[index] == rank] for rank in range(pp)] == want
    if pp <= of:
        stages = Stages("layers.{}.", of)
        assert [list(stages.items_of(rank, pp)) for rank in range(pp)] == want
