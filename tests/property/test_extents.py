"""Owners of a dataset's extents: budgets, balance, and the least that has to move, against all other ways."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from tenplexrun.core.extents import lacking, numbers_in, own, spans

SIZE, LAST = 10, 7
NODES = "abcde"


def check(owned: dict[str, tuple[int, ...]], budgets: dict[str, int], num_extents: int) -> None:
    """Nobody is over budget, nothing is owned twice, all is owned if it can be, loads are as even as can be."""
    everything = sorted(number for numbers in owned.values() for number in numbers)
    assert sorted(owned) == sorted(budgets)
    assert everything == sorted(set(everything) & set(range(num_extents)))
    assert all(list(numbers) == sorted(numbers) for numbers in owned.values())
    room = {node: budget // SIZE for node, budget in budgets.items()}
    assert all(len(numbers) <= room[node] for node, numbers in owned.items())
    assert len(everything) == min(num_extents, sum(room.values()))
    for node in owned:
        if len(owned[node]) < room[node]:
            assert max(map(len, owned.values())) <= len(owned[node]) + 1


@st.composite
def worlds(draw: st.DrawFn, most_nodes: int, most_extents: int) -> tuple[int, dict[str, int], dict[str, set[int]]]:
    num_extents = draw(st.integers(1, most_extents))
    nodes = draw(st.lists(st.sampled_from(NODES), unique=True, min_size=1, max_size=most_nodes))
    budgets = {node: draw(st.integers(0, (num_extents + 1) * SIZE)) for node in nodes}
    numbers = st.sets(st.integers(0, num_extents))  # one too many: what was held of another dataset
    return num_extents, budgets, draw(st.dictionaries(st.sampled_from(NODES), numbers))


@examples(150)
@given(worlds(most_nodes=3, most_extents=6))
def test_no_other_way_that_is_as_even_moves_less(world: tuple[int, dict[str, int], dict[str, set[int]]]) -> None:
    num_extents, budgets, held = world
    owned = own(num_extents, SIZE, budgets, held)
    check(owned, budgets, num_extents)
    loads = sorted(map(len, owned.values()))
    size = SIZE if sum(loads) < num_extents else LAST  # where some are left to nobody, count extents

    def cost(one: dict[str, tuple[int, ...]]) -> int:
        return sum(
            size if number == num_extents - 1 else SIZE
            for node, numbers in one.items()
            for number in lacking(numbers, held.get(node, ()))
        )

    ways = (
        {node: tuple(n for n, owner in enumerate(owners) if owner == node) for node in budgets}
        for owners in product([None, *budgets], repeat=num_extents)
    )
    as_even = (way for way in ways if sorted(map(len, way.values())) == loads)
    assert cost(owned) == min(cost(way) for way in as_even if _fits(way, budgets))


def _fits(way: dict[str, tuple[int, ...]], budgets: dict[str, int]) -> bool:
    return all(len(numbers) * SIZE <= budgets[node] for node, numbers in way.items())


@examples(200)
@given(st.integers(1, 300), st.lists(st.dictionaries(st.sampled_from(NODES), st.integers(0, 3200), min_size=1)))
def test_any_sequence_of_nodes_and_budgets(num_extents: int, rounds: list[dict[str, int]]) -> None:
    """Each moves what the new owners lack and nothing else; the bound: what of an even share is held nowhere better."""
    held: dict[str, set[int]] = {}
    for budgets in rounds:
        owned = own(num_extents, SIZE, budgets, held)
        assert owned == own(num_extents, SIZE, dict(reversed(budgets.items())), {n: held[n] for n in reversed(held)})
        check(owned, budgets, num_extents)
        # held by one each, so an even share keeps what it can of its own
        for node, numbers in owned.items():
            mine = held.get(node, set())
            assert not set(numbers) - mine or not mine - set(numbers), "who has too much gives, and does not get"
        assert own(num_extents, SIZE, budgets, {n: set(o) for n, o in owned.items()}) == owned, "at rest"
        held = {node: set(numbers) for node, numbers in owned.items()}


def test_what_moves_when_nodes_come_and_go() -> None:
    budgets = dict.fromkeys("ab", 10**6)
    first = own(12, SIZE, budgets, {})
    assert first == {"a": (0, 1, 2, 3, 4, 5), "b": (6, 7, 8, 9, 10, 11)}
    held = {node: set(numbers) for node, numbers in first.items()}
    joined = own(12, SIZE, {**budgets, "c": 10**6}, held)
    assert joined == {"a": (0, 1, 2, 3), "b": (6, 7, 8, 9), "c": (4, 5, 10, 11)}
    held = {node: set(numbers) for node, numbers in joined.items()}
    lost = own(12, SIZE, dict.fromkeys("bc", 10**6), held)
    assert {node: lacking(numbers, held[node]) for node, numbers in lost.items()} == {"b": (0, 1), "c": (2, 3)}
    assert own(12, SIZE, {"b": 35, "c": 10**6}, held)["b"] == (6, 7, 8)
    assert own(12, SIZE, {"b": 5}, held) == {"b": ()}
    assert own(12, SIZE, {}, held) == {}


def test_a_large_job_is_planned_in_a_moment() -> None:
    nodes = [f"n{number:04d}" for number in range(1000)]
    first = own(131072, SIZE, dict.fromkeys(nodes, 10**6), {})
    held = {node: set(numbers) for node, numbers in first.items() if node != "n0500"}
    again = own(131072, SIZE, {node: 10**6 for node in nodes if node != "n0500"}, held)
    assert sum(len(lacking(numbers, held[node])) for node, numbers in again.items()) == len(first["n0500"])


@given(st.sets(st.integers(0, 60)))
def test_spans(numbers: set[int]) -> None:
    packed = spans(sorted(numbers))
    assert list(numbers_in(packed)) == sorted(numbers)
    assert all(first + count < later for (first, count), (later, _) in pairwise(packed))
