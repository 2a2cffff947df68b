"""Regions over real sockets: between arenas of one test process, from good, bad, dead and silent sources."""

import contextlib
import math
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tenplexrun.core.arena import arena_map
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import copies
from tenplexrun.core.planner import plan_node
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Claim, SnapshotId, holders_of
from tenplexrun.errors import ArenaFullError, WireError
from tenplexrun.store.arena import Arena
from tenplexrun.store.files import MappedFile
from tenplexrun.store.peers import PeerServer
from tenplexrun.store.pulls import Order, PullJob
from tenplexrun.store.transfer import Part, Peers, Pull

TOKEN = "secret"
LAYOUT = Layout(
    (
        TensorSpec("rows", (1536, 300), "float64", (Shard(0, "tp"),)),  # runs, long enough for sendfile
        TensorSpec("columns", (1500, 1001), "float32", (Shard(1, "tp"),)),  # strided, several blocks
        TensorSpec("half", (33, 7), "bfloat16", (Shard(0, "tp", "front"),)),
        TensorSpec("wide", (4, 3), "complex128", (Shard(1, "tp"),)),
        TensorSpec("mask", (17,), "bool"),
        TensorSpec("count", (), "int64"),
    )
)
TWO, ONE = ParallelConfig(tp=2), ParallelConfig()
NUMPY: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def values_of(fqn: str) -> npt.NDArray[Any]:
    """The whole tensor, as bits: every element is its own index (mod 2**bits), moved by the length of its name."""
    spec = LAYOUT.spec(fqn)
    numbers = np.arange(math.prod(spec.shape)) + len(fqn)
    return numbers.astype(NUMPY[item_bytes(spec.dtype)]).reshape(spec.shape)


class Node:
    """An arena that serves its regions."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.arena = Arena.open(folder, limit_bytes)
        self.server = PeerServer(self.arena, TOKEN.encode(), timeout_s=5.0)
        self.address = f"127.0.0.1:{self.server.start('127.0.0.1')}"

    def hold(self, config: ParallelConfig, ranks: tuple[int, ...]) -> SnapshotId:
        slots = self.arena.open_round(1, LAYOUT, Claim(config, ranks))
        view = self.arena.file(slots[0].name).view
        for entry in arena_map(LAYOUT, config, ranks).entries:
            data = np.ascontiguousarray(values_of(entry.fqn)[entry.region.slices]).tobytes()
            view[entry.offset : entry.offset + entry.num_bytes] = data
        return self.arena.seal(1, 7, 0, {"step": 7, "consumed": 70, "lr": 0.1})

    def pull(self, snapshot: SnapshotId, claim: Claim, fetches: list[dict[str, Any]], timeout_s: float = 5.0) -> Any:
        record = {"round": 2, "snapshot": snapshot.to_json(), "layout": LAYOUT.to_json(), "claim": claim.to_json()}
        order = Order.from_json({**record, "fetches": fetches})
        return PullJob(self.arena, Peers(TOKEN, timeout_s), order).run()

    def check(self, snapshot: SnapshotId, claim: Claim) -> None:
        """All that `claim` says is here, to the bit."""
        index = self.arena.get(snapshot)
        for rank in claim.ranks:
            for fqn, (region,) in LAYOUT.regions_of(claim.config, rank).items():
                dtype = NUMPY[item_bytes(LAYOUT.spec(fqn).dtype)]
                out: npt.NDArray[Any] = np.zeros(region.lengths, dtype)
                for copy in copies(region, [piece for piece in index.pieces if piece.fqn == fqn]):
                    piece = copy.piece
                    flat: npt.NDArray[Any] = np.frombuffer(
                        self.arena.file(piece.file).view, dtype, piece.region.num_elements, piece.offset
                    )
                    out[copy.dest.slices] = flat.reshape(piece.region.lengths)[copy.source.slices]
                np.testing.assert_array_equal(out, values_of(fqn)[region.slices], err_msg=f"{fqn} {region}")


class Nodes:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: dict[str, Node] = {}

    def add(self, name: str, limit_bytes: int | None = None) -> Node:
        self.all[name] = Node(self._folder / name, limit_bytes)
        return self.all[name]

    def fetches(self, name: str, snapshot: SnapshotId, claim: Claim) -> list[dict[str, Any]]:
        """What the planner has `name` fetch, with addresses and every other holder of a tensor as alternatives."""
        holdings = {other: node.arena.inventory() for other, node in self.all.items()}
        holders = holders_of(snapshot, holdings, LAYOUT)
        target = PTC(LAYOUT, claim.config, (name,) * claim.config.world_size)
        plan = plan_node(name, target, holders)
        assert plan.num_bytes == plan.lower_bound_bytes
        return [self._fetch(fetch.to_json(), name, holders) for fetch in plan.fetches]

    def _fetch(self, record: dict[str, Any], name: str, holders: Mapping[str, Any]) -> dict[str, Any]:
        others = [self.all[other].address for other in holders if other != name and record["fqn"] in holders[other]]
        return {**record, "address": self.all[record["source"]].address, "alternatives": others}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for node in made.all.values():
        node.server.close()


def tensor_files(node: Node) -> list[str]:
    return node.arena._files.names(".bin")


WHOLE = Claim(ONE, (0,))


def test_joiner_merges_what_two_nodes_hold(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(TWO, (0,))
    assert nodes.add("b").hold(TWO, (1,)) == snapshot
    joiner = nodes.add("c")
    fetches = nodes.fetches("c", snapshot, WHOLE)
    report = joiner.pull(snapshot, WHOLE, fetches)
    assert report["num_bytes"] == LAYOUT.num_bytes
    assert report["num_fetches"] == len(fetches)
    joiner.check(snapshot, WHOLE)
    index = joiner.arena.get(snapshot)
    assert (index.values, index.consumed) == ({"step": 7, "consumed": 70, "lr": 0.1}, 70)
    assert [(held.claims, held.except_) for held in joiner.arena.inventory()] == [((WHOLE,), ())]


def test_survivor_keeps_what_it_has(nodes: Nodes) -> None:
    survivor = nodes.add("a")
    snapshot = survivor.hold(TWO, (0,))
    nodes.add("b").hold(TWO, (1,))
    fetches = nodes.fetches("a", snapshot, WHOLE)
    assert survivor.pull(snapshot, WHOLE, fetches)["num_bytes"] < LAYOUT.num_bytes
    survivor.check(snapshot, WHOLE)
    assert {held.claims[0]: held.except_ for held in survivor.arena.inventory()} == {Claim(TWO, (0,)): (), WHOLE: ()}


@contextlib.contextmanager
def most_bytes(folder: Path) -> Iterator[list[int]]:
    """The most that the arena in `folder` took at any moment until the end, once that has come."""
    found, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.0005):
            sizes = []
            for path in folder.glob("*.bin"):
                with contextlib.suppress(FileNotFoundError):
                    stats = path.stat()
                    sizes.append((stats.st_ino, 512 * stats.st_blocks))  # one that is just renamed shows up twice
            found[0] = max(found[0], sum(dict(sizes).values()))

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    done.set()
    thread.join()


def test_a_move_takes_the_old_slot_and_the_two_new_ones_at_most(nodes: Nodes, tmp_path: Path) -> None:
    """As the module `store.arena` says: what comes needs no memory of its own."""
    survivor, other = nodes.add("a"), nodes.add("b")
    snapshot = survivor.hold(TWO, (0,))
    other.hold(TWO, (1,))
    for node in (survivor, other):
        node.arena.commit(1, 7)
    old, new = (-(-arena_map(LAYOUT, *of).num_bytes // 4096) * 4096 for of in ((TWO, (0,)), (ONE, (0,))))
    with most_bytes(tmp_path / "a") as peak:
        survivor.pull(snapshot, WHOLE, nodes.fetches("a", snapshot, WHOLE))
        assert tensor_files(survivor) == ["slot-1-0.bin", "slot-2-1.bin"]
        survivor.check(snapshot, WHOLE)
        slots = survivor.arena.open_round(2, LAYOUT, WHOLE)
        survivor.check(snapshot, WHOLE)
        survivor.arena.seal(2, 8, 0, {})
    assert old + new < peak[0] <= old + 2 * new
    survivor.arena.commit(2, 8)
    assert tensor_files(survivor) == [slot.name for slot in slots]


def test_a_free_slot_that_is_mapped_is_received_into_as_it_is(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, member = nodes.add("a").hold(ONE, (0,)), nodes.add("b")
    fetches = nodes.fetches("b", snapshot, WHOLE)
    member.hold(ONE, (0,))
    for step in (8, 9):
        member.arena.seal(1, step, step % 2, {})
    member.arena.commit(1, 9)
    monkeypatch.setattr(MappedFile, "write", lambda *_: pytest.fail("written a second time"))
    member.pull(snapshot, WHOLE, fetches)
    member.check(snapshot, WHOLE)
    assert tensor_files(member) == ["slot-1-1.bin", "slot-2-1.bin"]


def test_split_takes_parts_of_whole_tensors(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(ONE, (0,))
    for rank in (0, 1):
        claim = Claim(TWO, (rank,))
        joiner = nodes.add(f"j{rank}")
        parts = [
            {"fqn": fqn, "source": "a", "region": region.to_json(), "address": nodes.all["a"].address}
            | {"num_bytes": region.num_elements * item_bytes(LAYOUT.spec(fqn).dtype)}
            for fqn, (region,) in LAYOUT.regions_of(TWO, rank).items()
        ]
        joiner.pull(snapshot, claim, parts)
        joiner.check(snapshot, claim)


def test_region_over_several_pieces_is_gathered(nodes: Nodes) -> None:
    """A source that pulled its own state in parts serves any region of it."""
    snapshot = nodes.add("a").hold(TWO, (0,))
    nodes.add("b").hold(TWO, (1,))
    nodes.add("c").pull(snapshot, WHOLE, nodes.fetches("c", snapshot, WHOLE))
    region = Region((3, 400), (1490, 300))
    fetch = {"fqn": "columns", "source": "c", "region": region.to_json(), "num_bytes": region.num_elements * 4}
    last = nodes.add("d")
    last.pull(snapshot, WHOLE, [{**fetch, "address": nodes.all["c"].address}])
    (piece,) = last.arena.get(snapshot).pieces
    data = np.frombuffer(last.arena.file(piece.file).view, np.uint32, region.num_elements).reshape(region.lengths)
    np.testing.assert_array_equal(data, values_of("columns")[region.slices])


def test_nothing_to_fetch_still_claims(nodes: Nodes) -> None:
    node = nodes.add("a")
    snapshot = node.hold(ONE, (0,))
    claim = Claim(TWO, (0, 1))
    assert node.pull(snapshot, claim, [])["num_bytes"] == 0
    assert [held.claims for held in node.arena.inventory()] == [(WHOLE,), (claim,)]
    with pytest.raises(WireError, match="no holder is known"):
        nodes.add("b").pull(snapshot, claim, [])


def test_dead_source_is_replaced(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(ONE, (0,))
    nodes.add("b").hold(ONE, (0,))
    joiner = nodes.add("c")
    fetches = nodes.fetches("c", snapshot, WHOLE)
    assert {fetch["source"] for fetch in fetches} == {"a", "b"}
    nodes.all["a"].server.close()
    joiner.pull(snapshot, WHOLE, fetches)
    joiner.check(snapshot, WHOLE)


def test_no_source_left_names_the_region_and_leaves_nothing(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(ONE, (0,))
    joiner = nodes.add("c")
    fetches = nodes.fetches("c", snapshot, WHOLE)
    nodes.all["a"].arena.commit(2, 1)  # a newer commit: what was planned with is gone
    with pytest.raises(WireError, match="not in this store"):
        joiner.pull(snapshot, WHOLE, fetches)
    assert tensor_files(joiner) == []
    assert joiner.arena.inventory() == []


def test_corrupt_source_is_no_source(nodes: Nodes) -> None:
    """Corrupted after the inventory: the sealed checksum travels with a whole piece."""
    snapshot = nodes.add("a").hold(ONE, (0,))
    nodes.add("b").hold(ONE, (0,))
    joiner = nodes.add("c")
    fetches = nodes.fetches("c", snapshot, WHOLE)
    bad = next(f for f in fetches if f["source"] == "a")
    piece = next(piece for piece in nodes.all["a"].arena.get(snapshot).pieces if piece.fqn == bad["fqn"])
    nodes.all["a"].arena.file(piece.file).view[piece.offset] ^= 1
    whole = {**bad, "region": piece.region.to_json(), "num_bytes": piece.num_bytes}
    with pytest.raises(WireError, match=f"{bad['fqn']}.*failed its checksum"):
        joiner.pull(snapshot, WHOLE, [{**whole, "alternatives": []}])
    assert tensor_files(joiner) == []
    joiner.pull(snapshot, WHOLE, [whole])
    (got,) = joiner.arena.get(snapshot).pieces
    assert got.checksum == piece.checksum


def test_full_arena_refuses_a_pull(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(ONE, (0,))
    joiner = nodes.add("c", limit_bytes=1000)
    with pytest.raises(ArenaFullError, match="1000 are free"):
        joiner.pull(snapshot, WHOLE, nodes.fetches("c", snapshot, WHOLE))
    assert tensor_files(joiner) == []


def test_memory_that_runs_out_ends_a_pull(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(ONE, (0,))
    spec, address = LAYOUT.spec("rows"), nodes.all["a"].address
    part = Part("rows", spec.whole, spec.dtype, 1536 * 300 * 8, 0, (address, address))
    pull = Pull(Peers(TOKEN), snapshot, [part], patience_s=60)
    with pytest.raises(ArenaFullError, match="shared memory is too small"):
        pull.run(MappedFile(Path("/dev/full")))


def test_silent_source_is_given_up(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(ONE, (0,))
    joiner = nodes.add("c")
    fetches = nodes.fetches("c", snapshot, WHOLE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        joiner.pull(snapshot, WHOLE, [{**f, "address": address, "alternatives": [f["address"]]} for f in fetches], 0.3)
    joiner.check(snapshot, WHOLE)


def test_cancelled_pull_ends_and_leaves_nothing(nodes: Nodes) -> None:
    snapshot = nodes.add("a").hold(ONE, (0,))
    joiner = nodes.add("c")
    record = {"round": 2, "snapshot": snapshot.to_json(), "layout": LAYOUT.to_json(), "claim": WHOLE.to_json()}
    job = PullJob(
        joiner.arena,
        Peers(TOKEN),
        Order.from_json({**record, "fetches": nodes.fetches("c", snapshot, WHOLE)}),
    )
    job.cancel()
    with pytest.raises(WireError, match="did not arrive"):
        job.run()
    assert tensor_files(joiner) == []


@pytest.mark.parametrize(
    "change",
    [{"num_bytes": 9}, {"region": [[0], [1]]}, {"fqn": "nobody"}, {"region": [[5], [0]]}, {"address": ""}, {"x": 1}],
)
def test_fetches_that_do_not_fit_are_refused(nodes: Nodes, change: dict[str, Any]) -> None:
    fetch = {"fqn": "count", "source": "x", "region": [[], []], "num_bytes": 8, "address": "127.0.0.1:1", **change}
    with pytest.raises(Exception, match=r"\w") as caught:
        nodes.add("c").pull(SnapshotId(1, 7, LAYOUT.digest), WHOLE, [fetch])
    assert caught.type.__name__ in ("LayoutError", "StoreError")


def test_where_the_first_replica_counts_its_value_takes_the_place_of_the_others(nodes: Nodes) -> None:
    layout = Layout((TensorSpec("mean", (4,), "float32", replicas="first"),))
    config, whole = ParallelConfig(dp=3), Region((0,), (4,))
    for rank, name in enumerate("abc"):
        arena = nodes.add(name).arena
        slots = arena.open_round(1, layout, Claim(config, (rank,)))
        arena.file(slots[0].name).view[:16] = np.full(4, rank + 1, np.float32).tobytes()
        snapshot = arena.seal(1, 7, 0, {})
    holdings = {name: node.arena.inventory() for name, node in nodes.all.items()}
    holders = holders_of(snapshot, holdings, layout)
    shrunk = PTC(layout, ParallelConfig(dp=2), ("b", "c"))
    for name in "bc":
        (fetch,) = plan_node(name, shrunk, holders).fetches
        claim = Claim(shrunk.config, (0,)).to_json()
        record = {"round": 2, "snapshot": snapshot.to_json(), "layout": layout.to_json(), "claim": claim}
        fetches = [{**fetch.to_json(), "address": nodes.all[fetch.source].address, "alternatives": []}]
        PullJob(nodes.all[name].arena, Peers(TOKEN, 5.0), Order.from_json({**record, "fetches": fetches})).run()
        (piece,) = nodes.all[name].arena.get(snapshot).pieces
        assert piece.region == whole
        assert np.frombuffer(nodes.all[name].arena.file(piece.file).view, "f4", 4, piece.offset).tolist() == [1] * 4
