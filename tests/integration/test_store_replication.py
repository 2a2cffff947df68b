"""Buddies' parts of a snapshot, over real sockets between arenas of one test process."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tenplexrun.core.arena import arena_map
from tenplexrun.core.layout import Layout, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import copies
from tenplexrun.core.snapshots import BuddyClaim, Claim, SnapshotId, choose, gaps, holders_of
from tenplexrun.errors import ArenaFullError, StoreError, WireError
from tenplexrun.store.arena import Arena
from tenplexrun.store.peers import PeerServer
from tenplexrun.store.replication import ReplicaJob
from tenplexrun.store.transfer import Peers

LAYOUT = Layout(
    (
        *(TensorSpec(f"layers.{i}.w", (64, 300), "int64", (Shard(1, "tp"),), Stage(i, 6)) for i in range(6)),
        TensorSpec("norm", (17,), "int64"),
        *(TensorSpec(f"rng.{i}", (9,), "int64", at={"pp": i}) for i in range(3)),
    )
)
CONFIG = ParallelConfig(pp=3)
WORKERS = (1, 1, 1)


def values_of(fqn: str, step: int) -> npt.NDArray[np.int64]:
    shape = LAYOUT.spec(fqn).shape
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape) * (step + 1) + len(fqn)


class Node:
    """The node at one place of a round of three."""

    def __init__(self, folder: Path, place: int, limit_bytes: int | None = None) -> None:
        self.folder, self.place = folder, place
        self.arena = Arena.open(folder, limit_bytes)
        self.server = PeerServer(self.arena, b"secret", timeout_s=5.0)
        self.address = f"127.0.0.1:{self.server.start('127.0.0.1')}"

    def open(self, number: int, replicas: int = 2) -> None:
        buddy = BuddyClaim(CONFIG, WORKERS, replicas, self.place)
        self.paths = self.arena.open_round(number, LAYOUT, Claim(CONFIG, (self.place,)), buddy)

    def seal(self, number: int, step: int, slot: int) -> SnapshotId:
        view = self.arena.file(self.paths[slot].name).view
        for entry in arena_map(LAYOUT, CONFIG, (self.place,)).entries:
            data = np.ascontiguousarray(values_of(entry.fqn, step)[entry.region.slices]).tobytes()
            view[entry.offset : entry.offset + entry.num_bytes] = data
        return self.arena.seal(number, step, slot, {"step": step, "consumed": step})

    def job(self, number: int, step: int, slot: int, stores: list[str], timeout_s: float = 5.0) -> ReplicaJob:
        return ReplicaJob(self.arena, Peers("secret", timeout_s), (number, step, slot), stores)

    def check(self, snapshot: SnapshotId) -> None:
        """All that this node says it holds is here, to the bit."""
        index = self.arena.get(snapshot)
        for claim in index.claims:
            for fqn, regions in claim.regions(LAYOUT).items():
                for region in regions:
                    out: npt.NDArray[Any] = np.zeros(region.lengths, np.int64)
                    for copy in copies(region, [piece for piece in index.pieces if piece.fqn == fqn]):
                        view = self.arena.file(copy.piece.file).view
                        flat = np.frombuffer(view, np.int64, copy.piece.region.num_elements, copy.piece.offset)
                        out[copy.dest.slices] = flat.reshape(copy.piece.region.lengths)[copy.source.slices]
                    np.testing.assert_array_equal(out, values_of(fqn, snapshot.step)[region.slices])


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    made = [Node(tmp_path / str(place), place) for place in range(3)]
    yield made
    for node in made:
        node.server.close()


def sealed(nodes: list[Node], step: int, slot: int, number: int = 1) -> SnapshotId:
    (snapshot,) = {node.seal(number, step, slot) for node in nodes}
    return snapshot


def stores(nodes: list[Node]) -> list[str]:
    return [node.address for node in nodes]


@pytest.mark.parametrize("replicas", [2, 3])
def test_any_nodes_fewer_than_the_replicas_may_go(nodes: list[Node], replicas: int) -> None:
    for node in nodes:
        node.open(1, replicas)
    for step in range(1, 5):
        snapshot = sealed(nodes, step, step % 2)
        moved = sum(node.job(1, step, step % 2, stores(nodes)).run()["num_bytes"] for node in nodes)
        assert moved == (replicas - 1) * sum(spec.num_bytes for spec in LAYOUT.tensors if spec.fqn != "norm")
        for node in nodes:
            node.check(snapshot)
            node.arena.commit(1, step)
    held = {str(node.place): node.arena.inventory() for node in nodes}
    for lost in range(3):
        living = {node: records for node, records in held.items() if int(node) != lost}
        assert choose(living, LAYOUT) == snapshot
        assert gaps(LAYOUT, holders_of(snapshot, living, LAYOUT)) == []
        assert any("rng" in fqn for fqn in holders_of(snapshot, living, LAYOUT)[min(living)])


def test_the_committed_snapshot_outlives_a_new_one_that_is_not_replicated(nodes: list[Node]) -> None:
    for node in nodes:
        node.open(1)
    first = sealed(nodes, 1, 1)
    for node in nodes:
        node.job(1, 1, 1, stores(nodes)).run()
        node.arena.commit(1, 1)
    second = sealed(nodes, 2, 0)
    nodes[0].job(1, 2, 0, stores(nodes)).run()
    for node in nodes:
        node.check(first)
    held = {str(node.place): node.arena.inventory() for node in nodes}
    assert choose(held, LAYOUT) == second, "a candidate that the living complete is newer"
    assert choose({node: held[node] for node in "02"}, LAYOUT) == first


def test_a_restarted_store_goes_on_with_its_own_part_and_replicates_again(nodes: list[Node]) -> None:
    for node in nodes:
        node.open(1)
    snapshot = sealed(nodes, 1, 1)
    again = Node(nodes[0].folder, 0)
    try:
        again.open(1)
        assert [type(claim) for claim in again.arena.get(snapshot).claims] == [Claim]
        addresses = [again.address, *stores(nodes)[1:]]
        again.job(1, 1, 1, addresses).run()
        again.check(snapshot)
        twice = again.arena.get(snapshot)
        again.job(1, 1, 1, addresses).run()
        assert again.arena.get(snapshot) == twice
    finally:
        again.server.close()


def test_what_is_short_fails_whole_and_leaves_the_snapshot_as_it_was(nodes: list[Node]) -> None:
    for node in nodes:
        node.open(1)
    for node in nodes[:2]:
        snapshot = node.seal(1, 1, 1)
    before = [node.arena.get(snapshot) for node in nodes[:2]]
    reasons = []
    for node in nodes[:2]:
        try:
            node.job(1, 1, 1, stores(nodes)).run()
        except WireError as error:
            reasons.append(str(error))
    assert len(reasons) == 1, "one of the two is the buddy of the third, which has sealed nothing"
    assert "not in this store" in reasons[0]
    assert sum(node.arena.get(snapshot) == old for node, old in zip(nodes, before, strict=False)) == 1
    with pytest.raises(StoreError, match="not sealed"):
        nodes[2].job(1, 1, 1, stores(nodes)).run()


def test_a_copy_that_fails_its_checksum_is_not_taken(nodes: list[Node]) -> None:
    for node in nodes:
        node.open(1)
    sealed(nodes, 1, 1)
    for node in nodes:
        view = node.arena.file("slot-1-1.bin").view
        piece = next(p for p in node.arena.get(SnapshotId(1, 1, LAYOUT.digest)).pieces if p.fqn.startswith("layers"))
        view[piece.offset] ^= 1
    for node in nodes:
        with pytest.raises(WireError, match="checksum"):
            node.job(1, 1, 1, stores(nodes)).run()


def test_a_round_change_ends_it_at_once_and_its_slot_is_not_reused_meanwhile(nodes: list[Node]) -> None:
    for node in nodes:
        node.open(1)
    snapshot = sealed(nodes, 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        job = nodes[0].job(1, 1, 1, [address] * 3, timeout_s=600.0)
        errors: list[Exception] = []

        def run() -> None:
            try:
                job.run()
            except WireError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        peer, _ = silent.accept()
        nodes[0].open(2)
        assert (nodes[0].folder / "slot-1-1.bin").exists()
        assert nodes[0].arena.has(snapshot), "the source of a recovery stays"
        nodes[0].seal(2, 2, 0)
        nodes[0].arena.commit(2, 2)
        assert (nodes[0].folder / "slot-1-1.bin").exists(), "somebody still writes there"
        job.cancel()
        thread.join(60)
        peer.close()
    assert len(errors) == 1
    assert not (nodes[0].folder / "slot-1-1.bin").exists()


def test_without_buddies_nothing_more_is_reserved(nodes: list[Node]) -> None:
    nodes[0].open(1, replicas=1)
    own = arena_map(LAYOUT, CONFIG, (0,)).num_bytes
    assert nodes[0].arena.sizes() == {"own": own, "buddy": 0}
    nodes[1].open(1, replicas=3)
    assert nodes[1].arena.sizes()["buddy"] > own
    assert nodes[1].paths[0].stat().st_size == sum(nodes[1].arena.sizes().values())


def test_too_small_an_arena_is_refused_with_all_that_is_needed(tmp_path: Path) -> None:
    node = Node(tmp_path / "x", 0, limit_bytes=400_000)
    with pytest.raises(ArenaFullError, match=r"two slots needs \d{7} bytes more, 400000 are free"):
        node.open(1, replicas=3)
    assert not list(node.folder.glob("*.bin"))
    node.server.close()
