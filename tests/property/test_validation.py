"""Any change to a right plan is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tenplexrun.core.layout import Layout, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import Fetch, ReconfigurationPlan, plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.validation import validate
from tenplexrun.errors import LayoutError

LAYOUT = Layout(
    (
        TensorSpec("embed", (7, 4), "float32", (Shard(0, "tp", "front"),), Stage(0, 3)),
        TensorSpec("head", (6,), "float64", (Shard(0, "tp"),), Stage(2, 3)),
        TensorSpec("norm", (5,), "bfloat16"),
        TensorSpec("step", (), "int64"),
    )
)

configs = st.builds(ParallelConfig, pp=st.integers(1, 2), dp=st.integers(1, 2), tp=st.integers(1, 3))


def ptc(config: ParallelConfig, names: str) -> PTC:
    return PTC(LAYOUT, config, tuple(names[rank % len(names)] for rank in range(config.world_size)))


def shifted(fetch: Fetch) -> Fetch:
    offsets = tuple(offset + 1 for offset in fetch.region.offsets)
    return replace(fetch, region=Region(offsets, fetch.region.lengths))


def grown(fetch: Fetch) -> Fetch:
    lengths = tuple(length + 1 for length in fetch.region.lengths)
    region = Region(fetch.region.offsets, lengths)
    size = fetch.num_bytes // fetch.region.num_elements * region.num_elements
    return replace(fetch, region=region, num_bytes=size)


CHANGES = {
    "dropped": lambda fetch: [],
    "twice": lambda fetch: [fetch, fetch],
    "shifted": lambda fetch: [shifted(fetch)],
    "grown": lambda fetch: [grown(fetch)],
    "emptied": lambda fetch: [
        replace(fetch, region=Region(fetch.region.offsets, tuple(0 for _ in fetch.region.lengths)), num_bytes=0)
    ],
    "miscounted": lambda fetch: [replace(fetch, num_bytes=fetch.num_bytes + 1)],
    "unknown source": lambda fetch: [replace(fetch, source="nobody")],
    "unknown name": lambda fetch: [replace(fetch, fqn="nothing")],
    "other tensor": lambda fetch: [replace(fetch, fqn="norm" if fetch.fqn != "norm" else "step")],
}


@given(configs, configs, st.sampled_from(sorted(CHANGES)), st.data())
def test_a_changed_fetch_is_refused(
    before: ParallelConfig, after: ParallelConfig, change: str, data: st.DataObject
) -> None:
    current, target = ptc(before, "ab"), ptc(after, "bcd")
    holders = {node: current.regions_on(node) for node in set(current.nodes)}
    moves = plan(target, holders)
    validate(moves, target, holders)
    node = data.draw(st.sampled_from(sorted(node for node, part in moves.parts.items() if part.fetches) or [None]))
    assume(node is not None)
    part = moves.parts[node]
    index = data.draw(st.integers(0, len(part.fetches) - 1))
    assume(part.fetches[index].region.lengths or change not in ("shifted", "grown", "emptied"))
    fetches = [*part.fetches[:index], *CHANGES[change](part.fetches[index]), *part.fetches[index + 1 :]]
    broken = ReconfigurationPlan({**moves.parts, node: replace(part, fetches=tuple(fetches))})
    with pytest.raises(LayoutError):
        validate(broken, target, holders)


def small() -> tuple[ReconfigurationPlan, PTC, Mapping[str, Mapping[str, tuple[Region, ...]]]]:
    target = ptc(ParallelConfig(dp=2), "ab")
    holders = {"a": target.regions_on("a")}
    return plan(target, holders), target, holders


def test_wrong_sums_are_refused() -> None:
    moves, target, holders = small()
    for change in ({"needed_bytes": 1}, {"held_bytes": 1}):
        broken = ReconfigurationPlan({**moves.parts, "b": replace(moves.parts["b"], **change)})
        with pytest.raises(LayoutError, match="counts"):
            validate(broken, target, holders)


def test_the_plan_is_for_the_nodes_of_the_target() -> None:
    moves, target, holders = small()
    with pytest.raises(LayoutError, match="the plan is for nodes"):
        validate(ReconfigurationPlan({"a": moves.parts["a"]}), target, holders)
    with pytest.raises(LayoutError, match="part of node a under b"):
        validate(ReconfigurationPlan({"a": moves.parts["a"], "b": moves.parts["a"]}), target, holders)


def test_a_node_does_not_fetch_from_itself_nor_what_it_has() -> None:
    moves, target, holders = small()
    fetch = moves.parts["b"].fetches[0]
    for source, message in (("a", "not another living node"), ("b", "not needed or held already")):
        part = replace(moves.parts["a"], fetches=(replace(fetch, source=source),))
        with pytest.raises(LayoutError, match=message):
            validate(ReconfigurationPlan({**moves.parts, "a": part}), target, {**holders, "b": holders["a"]})


def test_a_source_holds_what_is_fetched_from_it() -> None:
    moves, target, holders = small()
    holders = {**holders, "c": {"norm": (Region((0,), (3,)),)}}
    for fqn in ("norm", "head"):
        fetches = tuple(replace(one, source="c") if one.fqn == fqn else one for one in moves.parts["b"].fetches)
        broken = ReconfigurationPlan({**moves.parts, "b": replace(moves.parts["b"], fetches=fetches)})
        with pytest.raises(LayoutError, match=f"{fqn} .* from c: the source holds no region"):
            validate(broken, target, holders)


def test_an_empty_fetch_is_refused() -> None:
    moves, target, holders = small()
    part = moves.parts["b"]
    more = (*part.fetches, Fetch("norm", "a", Region((2,), (0,)), 0))
    with pytest.raises(LayoutError, match="is empty or out of the bounds"):
        validate(ReconfigurationPlan({**moves.parts, "b": replace(part, fetches=more)}), target, holders)


def test_shared_state_cannot_be_declared_absent() -> None:
    moves, target, holders = small()
    part = moves.parts["b"]
    broken = replace(part, fetches=tuple(one for one in part.fetches if one.fqn != "norm"), absent=("norm",))
    with pytest.raises(LayoutError, match="norm is not absent"):
        validate(ReconfigurationPlan({**moves.parts, "b": broken}), target, holders)
