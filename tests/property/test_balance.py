"""The busiest sender against a linear programme; racks; splitting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples
from scipy.optimize import linprog

from tenplexrun.core.balance import Line, quotas
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.validation import validate

NODES = "abcdefgh"
configs = st.builds(ParallelConfig, dp=st.integers(1, 4), cp=st.integers(1, 2), tp=st.integers(1, 4))


@st.composite
def resizes(draw: st.DrawFn) -> tuple[PTC, PTC]:
    specs = [
        TensorSpec(f"t{index}", (draw(st.integers(64, 4096)), 1024), "float32", (Shard(draw(st.integers(0, 1)), axis),))
        for index, axis in enumerate(draw(st.lists(st.sampled_from(["tp", "cp", "dp"]), min_size=1, max_size=6)))
    ]
    layout = Layout(tuple(specs))
    found = []
    for _ in range(2):
        config = draw(configs)
        ranks = st.lists(st.sampled_from(NODES), min_size=config.world_size, max_size=config.world_size)
        found.append(PTC(layout, config, tuple(draw(ranks))))
    return found[0], found[1]


def least_load(tiles: Mapping[frozenset[str], int]) -> float:
    """Of the busiest source, every tile being divisible."""
    pairs = [(row, source) for row, able in enumerate(tiles) for source in sorted(able)]
    if not pairs:
        return 0.0
    equal, loads = np.zeros((len(tiles), len(pairs) + 1)), np.zeros((len(NODES), len(pairs) + 1))
    loads[:, -1] = -1.0
    for column, (row, source) in enumerate(pairs):
        equal[row, column] = loads[NODES.index(source), column] = 1.0
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    return float(linprog(cost, loads, np.zeros(len(NODES)), equal, list(tiles.values())).fun)


@examples(60)
@given(resizes())
def test_the_busiest_sender_is_near_the_least_possible(resize: tuple[PTC, PTC]) -> None:
    current, target = resize
    holders = {node: current.regions_on(node) for node in sorted(set(current.nodes))}
    moves = plan(target, holders, split_bytes=4096)
    validate(moves, target, holders)
    tiles: dict[frozenset[str], int] = {}
    for part in plan(target, holders, split_bytes=1 << 60).parts.values():
        for fetch in part.fetches:
            able = [
                node for node, held in holders.items() if any(one.contains(fetch.region) for one in held[fetch.fqn])
            ]
            tiles[frozenset(able)] = tiles.get(frozenset(able), 0) + fetch.num_bytes
    # a row is not split, so a source may have one more than its share for each set that it is in
    assert max(moves.egress().values(), default=0) <= 1.2 * least_load(tiles) + 4096 * len(tiles)


@given(resizes(), st.lists(st.sampled_from(["x", "y"]), min_size=8, max_size=8))
def test_the_own_rack_comes_first(resize: tuple[PTC, PTC], labels: list[str]) -> None:
    current, target = resize
    racks = dict(zip(NODES, labels, strict=True))
    holders = {node: current.regions_on(node) for node in sorted(set(current.nodes))}
    moves = plan(target, holders, racks)
    validate(moves, target, holders)
    for node, part in moves.parts.items():
        for fetch in part.fetches:
            near = [
                other
                for other, held in holders.items()
                if racks[other] == racks[node] and any(one.contains(fetch.region) for one in held[fetch.fqn])
            ]
            assert racks[fetch.source] == racks[node] or not near


@example([1, 1, 1, 1], 2, 1)  # a row is left, and not cut in another dim
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=4), st.integers(2, 12), st.integers(1, 30))
def test_a_line_serves_every_row_once(ends: list[int], rows: int, split: int) -> None:
    region, num_bytes = Region((0, 3, 0), (1, rows, 2)), rows * 2 * 4
    total = sum(ends) + num_bytes
    line = Line.cut(total, [((f"s{index}",), total / len(ends)) for index in range(len(ends))])
    parts = list(line.serve(min(ends[0], total - num_bytes), region, num_bytes, split))
    assert sum(size for _, _, size in parts) == num_bytes
    start = 3
    for source, part, size in parts:
        assert source in line.sources
        assert part.offsets == (0, start, 0)
        assert size == part.num_elements * 4
        start += part.lengths[1]
    assert len(parts) == 1 or min(size for _, _, size in parts) >= split


def test_loads_are_levelled_over_overlapping_sets() -> None:
    demands = [(("a",), 90), (("a", "b"), 60), (("b", "c"), 90)]
    given_ = quotas(demands, {"a": 1, "b": 1, "c": 2})
    load = {group: sum(one.get(group, 0.0) for one in given_) for group in "abc"}
    assert load == {"a": 90, "b": 60, "c": 90}
    assert quotas([], {}) == []


def test_a_source_with_a_rest_too_small_to_send_is_passed_over() -> None:
    line = Line(("a", "b", "c"), (1, 513, 1024))  # one byte of a's share is left: the others still halve the region
    region = Region((0, 0), (16, 64))
    assert list(line.serve(0, region, 1024, 64)) == [
        ("b", Region((0, 0), (8, 64)), 512),
        ("c", Region((8, 0), (8, 64)), 512),
    ]
