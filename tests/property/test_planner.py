"""Plans executed on small arrays whose values are their own flat indices, against gather-then-slice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.baselines import central, migrate_all, part_of
from tenplexrun.core.layout import Layout
from tenplexrun.core.planner import ReconfigurationPlan, plan, plan_node
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.validation import check_coverage, validate
from tenplexrun.errors import StateLostError

from .kinds import NODES, layouts, placed

ITEM = 4
EMPTY = -1

Memory = dict[str, dict[str, np.ndarray]]
"""node -> fqn -> array of the whole shape; elements that the node lacks are EMPTY."""

chains = layouts().flatmap(lambda layout: st.tuples(placed(layout), placed(layout), placed(layout)))
pairs = layouts().flatmap(lambda layout: st.tuples(placed(layout), placed(layout)))


def holders_of(ptc: PTC, lost: set[str] | None = None) -> dict[str, Mapping[str, tuple[Region, ...]]]:
    return {node: ptc.regions_on(node) for node in sorted(set(ptc.nodes) - (lost or set()))}


def numbers(layout: Layout, fqn: str) -> np.ndarray:
    spec = layout.spec(fqn)
    return np.arange(spec.whole.num_elements).reshape(spec.shape)


def memory_of(layout: Layout, holders: Mapping[str, Mapping[str, tuple[Region, ...]]]) -> Memory:
    memory: Memory = {}
    for node in NODES:
        memory[node] = {}
        for spec in layout.tensors:
            array = memory[node][spec.fqn] = np.full(spec.shape, EMPTY)
            for region in holders.get(node, {}).get(spec.fqn, ()):
                array[region.slices] = numbers(layout, spec.fqn)[region.slices]
    return memory


def execute(moves: ReconfigurationPlan, before: Memory) -> Memory:
    """Every fetch reads the source's state of before the plan; nothing is written over, nothing empty is read."""
    after = {node: {fqn: array.copy() for fqn, array in tensors.items()} for node, tensors in before.items()}
    for node, part in moves.parts.items():
        for fetch in part.fetches:
            data = before[fetch.source][fetch.fqn][fetch.region.slices]
            assert (data != EMPTY).all(), "the source holds what is fetched from it"
            assert (after[node][fetch.fqn][fetch.region.slices] == EMPTY).all(), "fetched once, and not held before"
            after[node][fetch.fqn][fetch.region.slices] = data
    return after


def kept(memory: Memory, target: PTC) -> Memory:
    """What stays when each node drops all that its ranks do not need."""
    return {
        node: {
            fqn: np.where(needed_mask(target, node, fqn), array, EMPTY) for fqn, array in memory.get(node, {}).items()
        }
        for node in NODES
    }


def needed_mask(target: PTC, node: str, fqn: str) -> np.ndarray:
    mask = np.zeros(target.layout.spec(fqn).shape, dtype=bool)
    for rank in target.ranks_on(node):
        own = target.layout.local(fqn, target.config, target.config.coord(rank))
        for part in own.parts if own is not None else ():
            mask[part.region.slices] = True
    return mask


def assert_ranks_have_their_slices(target: PTC, memory: Memory) -> None:
    for rank, node in enumerate(target.nodes):
        for fqn, regions in target.regions_of(rank).items():
            for region in regions:
                want = numbers(target.layout, fqn)[region.slices]
                np.testing.assert_array_equal(memory[node][fqn][region.slices], want)


def bound_bytes(target: PTC, before: Memory) -> int:
    """Elements that a node needs and lacks, counted one by one."""
    return ITEM * sum(
        int((needed_mask(target, node, spec.fqn) & (before[node][spec.fqn] == EMPTY)).sum())
        for node in set(target.nodes)
        for spec in target.layout.tensors
    )


@given(pairs)
def test_a_plan_gives_what_gather_then_slice_gives_at_the_lower_bound(pair: tuple[PTC, PTC]) -> None:
    current, target = pair
    holders = holders_of(current)
    moves = plan(target, holders, split_bytes=1)
    validate(moves, target, holders)
    before = memory_of(target.layout, holders)
    assert_ranks_have_their_slices(target, execute(moves, before))
    assert moves.num_bytes == moves.lower_bound_bytes == bound_bytes(target, before)
    check_coverage(target.layout, target.config)
    assert sum(moves.egress().values()) == moves.num_bytes


@given(pairs)
def test_baselines_give_the_same_with_more_bytes(pair: tuple[PTC, PTC]) -> None:
    current, target = pair
    holders = holders_of(current)
    before = memory_of(target.layout, holders)
    nothing = memory_of(target.layout, {})
    least = plan(target, holders)

    everything = migrate_all(target, holders)
    after = {**before, **{f"{node} ": tensors for node, tensors in nothing.items()}}
    moves = {
        f"{node} ": replace(part, node=f"{node} ") for node, part in everything.parts.items()
    }  # what they held stays apart from what they get
    after = execute(ReconfigurationPlan(moves), after)
    assert_ranks_have_their_slices(target, {node: after[f"{node} "] for node in NODES})
    assert everything.num_bytes == sum(part.needed_bytes for part in least.parts.values()) >= least.num_bytes

    hub = target.nodes[0]
    by_way = central(target, holders, hub)
    gathered = execute(ReconfigurationPlan({hub: by_way.gather}), before)
    scattered = execute(by_way.scatter, {node: gathered[node] if node == hub else nothing[node] for node in NODES})
    assert_ranks_have_their_slices(target, scattered)
    assert set(by_way.scatter.egress()) <= {hub}
    assert by_way.num_bytes >= least.num_bytes

    for node in set(target.nodes):
        bound = least.parts[node].lower_bound_bytes
        assert part_of("least", node, target, holders).plan == least.parts[node]
        assert part_of("migrate-all", node, target, holders).plan == everything.parts[node]
        own = part_of("central", node, target, holders)
        assert own.plan == (by_way.gather if node == hub else by_way.scatter.parts[node])
        assert (own.lower_bound_bytes, own.hub) == (bound, None if node == hub else hub)
        assert set(own.ranks) >= {rank for rank, name in enumerate(target.nodes) if name == node}


@given(layouts().flatmap(placed))
def test_an_unchanged_layout_moves_nothing(ptc: PTC) -> None:
    moves = plan(ptc, holders_of(ptc))
    assert [part.fetches for part in moves.parts.values()] == [()] * len(set(ptc.nodes))
    assert moves.lower_bound_bytes == 0


@given(chains)
def test_by_way_of_b_ends_as_straight_to_c(chain: tuple[PTC, PTC, PTC]) -> None:
    a, b, c = chain
    straight = execute(plan(c, holders_of(a)), memory_of(c.layout, holders_of(a)))
    at_b = execute(plan(b, holders_of(a)), memory_of(c.layout, holders_of(a)))
    by_way = execute(plan(c, holders_of(b)), kept(at_b, b))
    for node in NODES:
        for fqn, array in kept(by_way, c)[node].items():
            np.testing.assert_array_equal(array, kept(straight, c)[node][fqn])


@given(pairs, st.sets(st.sampled_from(NODES)))
def test_with_lost_nodes_the_survivors_suffice_or_the_gap_is_named(pair: tuple[PTC, PTC], lost: set[str]) -> None:
    current, target = pair
    holders = holders_of(current, lost)
    before = memory_of(target.layout, holders)
    gone = {
        spec.fqn: set(numbers(target.layout, spec.fqn).ravel().tolist())
        - {int(one) for node in NODES for one in before[node][spec.fqn].ravel()}
        for spec in target.layout.tensors
    }
    if not any(gone.values()):
        moves = plan(target, holders)
        validate(moves, target, holders)
        assert not {source for source in moves.egress() if source in lost}
        assert_ranks_have_their_slices(target, execute(moves, before))
        return
    with pytest.raises(StateLostError, match="no living node holds") as caught:
        plan(target, holders)
    first = min(fqn for fqn, elements in gone.items() if elements)
    named = str(caught.value).split(": ", 1)[1]
    assert named.startswith(f"{first} [")
    bounds = named[len(first) + 2 : named.index("]")]
    slices = tuple(slice(*map(int, span.split(":"))) for span in bounds.split(", ") if span)
    assert set(numbers(target.layout, first)[slices].ravel().tolist()) <= gone[first]


@given(pairs, st.randoms(use_true_random=False))
def test_each_node_plans_its_part_alone_whatever_the_order_of_its_inputs(
    pair: tuple[PTC, PTC], shuffler: object
) -> None:
    current, target = pair
    holders = holders_of(current)
    whole = plan(target, holders)

    def shuffled(mapping: Mapping[str, object]) -> dict[str, object]:
        keys = list(mapping)
        shuffler.shuffle(keys)  # type: ignore[attr-defined]
        return {key: mapping[key] for key in keys}

    mixed = {
        node: {fqn: regions[::-1] for fqn, regions in shuffled(tensors).items()}  # type: ignore[index]
        for node, tensors in shuffled(holders).items()
    }
    for node, part in whole.parts.items():
        assert plan_node(node, target, mixed) == part  # type: ignore[arg-type]
    assert ReconfigurationPlan.from_json(json.loads(json.dumps(whole.to_json()))) == whole


@given(chains)
def test_holders_of_mixed_pieces_are_used_without_fetching_twice(chain: tuple[PTC, PTC, PTC]) -> None:
    """After a recovery nodes hold the regions of two layouts, which overlap."""
    *olds, target = chain
    holders: dict[str, dict[str, tuple[Region, ...]]] = {}
    for node in NODES:
        mixed: dict[str, set[Region]] = {}
        for old in olds:
            for fqn, regions in old.regions_on(node).items():
                mixed.setdefault(fqn, set()).update(regions)
        holders[node] = {fqn: tuple(sorted(regions)) for fqn, regions in mixed.items()}
    moves = plan(target, holders)
    validate(moves, target, holders)
    before = memory_of(target.layout, holders)
    assert_ranks_have_their_slices(target, execute(moves, before))
    assert moves.num_bytes == bound_bytes(target, before)
