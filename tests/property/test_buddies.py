"""Buddies: what any nodes fewer than the replicas take along is still there, and nothing is copied for nothing."""

from __future__ import annotations

import json
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from tenplexrun.core.buddies import buddies
from tenplexrun.core.layout import Layout, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region, disjoint, subtract
from tenplexrun.core.snapshots import BuddyClaim, Claim, Holding, SnapshotId, gaps, holders_of

from .kinds import configs, layouts


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Layout, ParallelConfig, tuple[int, ...], int]:
    """A layout, a mesh that can have it, the ranks of each node, and how many replicas are wanted."""
    layout, config = draw(layouts()), draw(configs())
    left, workers = config.world_size, []
    while left:
        workers.append(draw(st.integers(1, left)))
        left -= workers[-1]
    return layout, config, tuple(workers), draw(st.integers(1, 4))


def possible(layout: Layout, config: ParallelConfig) -> bool:
    try:
        layout.check(config)
    except Exception:
        return False
    return True


def held(layout: Layout, config: ParallelConfig, workers: tuple[int, ...], replicas: int) -> dict[str, list[Holding]]:
    """What the nodes say that they hold, as it comes out of the round document."""
    snapshot, found, first = SnapshotId(0, 1, layout.digest), {}, 0
    for place, count in enumerate(workers):
        claims = (
            Claim(config, tuple(range(first, first + count))), BuddyClaim(config, workers, replicas, place)
        )  # fmt: skip
        text = json.dumps(Holding(snapshot, claims).to_json())
        found[f"n{place:02}"] = [Holding.from_json(json.loads(text))]
        first += count
    return found


@examples(150)
@given(worlds())
def test_losing_fewer_nodes_than_replicas_loses_nothing(
    world: tuple[Layout, ParallelConfig, tuple[int, ...], int],
) -> None:
    layout, config, workers, replicas = world
    if not possible(layout, config):
        return
    holdings = held(layout, config, workers, replicas)
    snapshot = SnapshotId(0, 1, layout.digest)
    lost = min(replicas, len(workers)) - 1
    for gone in list(combinations(holdings, lost))[:40]:
        living = {node: records for node, records in holdings.items() if node not in gone}
        assert gaps(layout, holders_of(snapshot, living, layout)) == []


@examples(150)
@given(worlds())
def test_each_region_is_on_as_many_nodes_as_asked_and_on_no_more(
    world: tuple[Layout, ParallelConfig, tuple[int, ...], int],
) -> None:
    """Of each element, counted: natural copies, and buddies' only up to what is asked."""
    layout, config, workers, replicas = world
    if not possible(layout, config):
        return
    owed, first, own = buddies(layout, config, workers, replicas), 0, []
    for count in workers:
        own.append(layout.regions_at((config, rank) for rank in range(first, first + count)))
        first += count
    wanted = min(replicas, len(workers))
    for spec in layout.tensors:
        natural = [disjoint(boxes.get(spec.fqn, ())) for boxes in own]
        extra = [[one for one in mine if one.fqn == spec.fqn] for mine in owed]
        for place, mine in enumerate(extra):
            for one in mine:
                assert all(one.region.intersect(box) is None for box in natural[place]), "what is there is not copied"
                assert all(not subtract(one.region, natural[holder]) for holder in one.holders), "holders have it whole"
            assert sum(box.num_elements for box in disjoint([one.region for one in mine])) == sum(
                one.region.num_elements for one in mine
            ), "nothing twice on one node"
        for box in _atoms(spec.whole, [box for boxes in natural for box in boxes]):
            by_ranks = sum(not subtract(box, boxes) for boxes in natural)
            copies = sum(any(one.region.contains(box) for one in mine) for mine in extra)
            assert copies == max(0, wanted - by_ranks), (spec.fqn, box)


def _atoms(whole: Region, boxes: list[Region]) -> list[Region]:
    """Pieces of `whole` that each box has wholly or not at all."""
    atoms = [whole] if not whole.is_empty else []
    for box in boxes:
        cut = []
        for atom in atoms:
            common = atom.intersect(box)
            cut += [atom] if common is None else [common, *subtract(atom, [common])]
        atoms = cut
    return atoms


MODEL = Layout(
    (
        *(TensorSpec(f"layers.{i}.w", (64, 8), "float32", (Shard(0, "tp"),), Stage(i, 8)) for i in range(8)),
        *(TensorSpec(f"layers.{i}.m", (64, 8), "float32", (Shard(0, ("tp", "dp")),), Stage(i, 8)) for i in range(8)),
        *(TensorSpec(f"rng.{i}", (16,), "uint8", at={"pp": i % 4, "dp": i // 4}) for i in range(8)),
    )
)


def loads(config: ParallelConfig, workers: tuple[int, ...], replicas: int = 2) -> list[int]:
    return [sum(one.num_bytes for one in owed) for owed in buddies(MODEL, config, workers, replicas)]


def test_equal_nodes_owe_equal_bytes_to_one_partner_each() -> None:
    for replicas in (2, 3):
        owed = buddies(MODEL, ParallelConfig(pp=8), (1,) * 8, replicas)
        assert len(set(loads(ParallelConfig(pp=8), (1,) * 8, replicas))) <= 2  # some have a random stream
        assert {len({holder for one in mine for holder in one.holders}) for mine in owed} <= {replicas - 1, replicas}
        assert all(place not in one.holders for place, mine in enumerate(owed) for one in mine)


def test_where_data_parallelism_suffices_nothing_is_owed() -> None:
    replicated = Layout(tuple(spec for spec in MODEL.tensors if not spec.fqn.endswith(".m")))
    config = ParallelConfig(pp=2, dp=2)
    assert buddies(replicated, config, (1, 1, 1, 1), 2) == ((), (), (), ()), "nor are random streams alone"
    assert all(buddies(replicated, config, (1, 1, 1, 1), 3))
    assert buddies(MODEL, ParallelConfig(), (1,), 2) == ((),), "a single node has nobody"
    assert loads(ParallelConfig(pp=8), (1,) * 8, 1) == [0] * 8


def test_one_large_node_is_shared_out() -> None:
    tensors = [TensorSpec(f"big.{i}", (100,), "uint8", stage=Stage(0, 3)) for i in range(10)]
    small = [TensorSpec(f"small.{i}", (100,), "uint8", stage=Stage(i, 3)) for i in (1, 2)]
    layout = Layout((*tensors, *small))
    owed = [sum(one.num_bytes for one in mine) for mine in buddies(layout, ParallelConfig(pp=3), (1, 1, 1), 2)]
    assert sorted(owed) == [200, 500, 500]


def test_the_claims_of_128_nodes_are_short() -> None:
    config = ParallelConfig(pp=8, dp=16, tp=8)
    claims = [BuddyClaim(config, (8,) * 128, 2, place) for place in range(128)]
    assert len(json.dumps([claim.to_json() for claim in claims])) < 128 * 120
