"""The arena: what stays, what goes, and what a restarted store finds again."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tenplexrun.core.arena import arena_map
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.core.snapshots import Claim, SnapshotId
from tenplexrun.errors import ArenaFullError, StoreError
from tenplexrun.store.arena import Arena
from tenplexrun.store.slots import Round

LAYOUT = Layout(
    (
        TensorSpec("w", (8, 6), "int64", (Shard(0, "tp"),)),
        TensorSpec("b", (5,), "int64"),
        TensorSpec("count", (), "int64"),
    )
)
CLAIM = Claim(ParallelConfig(dp=2, tp=2), (0, 1))
SLOT_BYTES = arena_map(LAYOUT, CLAIM.config, CLAIM.ranks).num_bytes


def fill(path: Path, step: int, layout: Layout = LAYOUT, claim: Claim = CLAIM) -> None:
    """Write what workers would: every element is its own index, plus the step."""
    for entry in arena_map(layout, claim.config, claim.ranks).entries:
        shape = layout.spec(entry.fqn).shape
        values = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)[entry.region.slices] + step
        with path.open("r+b") as file:
            file.seek(entry.offset)
            file.write(np.ascontiguousarray(values).tobytes())


def snapshot(arena: Arena, slots: Sequence[Path], number: int, step: int) -> SnapshotId:
    fill(slots[step % 2], step)
    return arena.seal(number, step, step % 2, {"step": step, "consumed": step * 10})


def coming(number: int, claim: Claim = CLAIM) -> Round:
    return Round.of(number, LAYOUT, claim, None)


def arrive(arena: Arena, round_: Round, of: SnapshotId, piece: Piece) -> str:
    """A copy of one of its pieces comes from a peer. Returns the file where it is."""
    content = bytes(arena.file(piece.file).view[piece.offset : piece.offset + piece.num_bytes])
    name = arena.stage(round_, piece.num_bytes)
    arena.file(name).write(memoryview(content), 0)
    arena.adopt(LAYOUT, arena.get(of), round_.claim, [replace(piece, file=name, offset=0)])
    return name


def tensor_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.bin"))


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.open(tmp_path)


def test_slots_are_whole_before_they_are_written(arena: Arena) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    assert [slot.stat().st_size for slot in slots] == [SLOT_BYTES] * 2
    assert all(slot.stat().st_blocks * 512 >= SLOT_BYTES for slot in slots)
    assert arena.open_round(1, LAYOUT, CLAIM) == slots


def test_round_is_not_opened_again_for_other_state(arena: Arena) -> None:
    arena.open_round(2, LAYOUT, CLAIM)
    with pytest.raises(StoreError, match="round 2 is"):
        arena.open_round(2, LAYOUT, Claim(CLAIM.config, (0,)))
    with pytest.raises(StoreError, match="round 1 cannot be opened"):
        arena.open_round(1, LAYOUT, CLAIM)


def test_sealed_snapshot_is_held_and_indexed(arena: Arena) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    sealed = snapshot(arena, slots, 1, 4)
    (holding,) = arena.inventory()
    assert (holding.snapshot, holding.claims, holding.committed) == (sealed, (CLAIM,), False)
    assert (holding.except_, holding.consumed) == ((), 40)
    index = Index.from_json(arena._files.read_json(arena.index_path(sealed).name))
    assert index == arena.get(sealed)
    assert index.values == {"step": 4, "consumed": 40}


def test_seal_needs_the_open_round(arena: Arena) -> None:
    arena.open_round(3, LAYOUT, CLAIM)
    for number, slot in [(2, 0), (3, 2), (4, 1)]:
        with pytest.raises(StoreError, match="cannot be sealed"):
            arena.seal(number, 1, slot, None)


def test_commit_drops_older_snapshots_only(arena: Arena) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    first, second = snapshot(arena, slots, 1, 1), snapshot(arena, slots, 1, 2)
    arena.commit(1, 1)
    assert [(held.snapshot, held.committed) for held in arena.inventory()] == [(first, True), (second, False)]
    arena.commit(1, 2)
    assert [(held.snapshot, held.committed) for held in arena.inventory()] == [(second, True)]
    with pytest.raises(StoreError, match="not in this store"):
        arena.get(first)


def test_slot_written_over_is_no_longer_what_it_was(arena: Arena) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    snapshot(arena, slots, 1, 1)
    third = snapshot(arena, slots, 1, 3)
    assert [held.snapshot for held in arena.inventory()] == [third]


def test_source_of_a_recovery_stays_until_the_first_commit(arena: Arena, tmp_path: Path) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    snapshot(arena, slots, 1, 1)
    arena.commit(1, 1)
    new = arena.open_round(2, LAYOUT, CLAIM)
    assert tensor_files(tmp_path) == ["slot-1-1.bin", "slot-2-0.bin", "slot-2-1.bin"]
    later = snapshot(arena, new, 2, 2)
    assert len(arena.inventory()) == 2
    arena.commit(2, 2)
    assert [held.snapshot for held in arena.inventory()] == [later]
    assert tensor_files(tmp_path) == ["slot-2-0.bin", "slot-2-1.bin"]


def test_free_slots_become_those_of_the_next_round(arena: Arena) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    snapshot(arena, slots, 1, 1)
    inode = slots[0].stat().st_ino  # step 1 lies in the other one
    assert inode in [path.stat().st_ino for path in arena.open_round(2, LAYOUT, CLAIM)]


def test_corrupt_region_is_excepted_and_no_longer_listed(arena: Arena) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    sealed = snapshot(arena, slots, 1, 1)
    bad = next(piece for piece in arena.get(sealed).pieces if piece.fqn == "w")
    with slots[1].open("r+b") as file:
        file.seek(bad.offset + 3)
        file.write(b"\xff")
    assert [held.except_ for held in arena.inventory()] == [("w",)]
    assert bad not in arena.get(sealed).pieces
    assert [piece.fqn for piece in arena.get(sealed).pieces] == ["b", "count", "w"]


def test_adopted_pieces_make_up_for_lost_ones(arena: Arena) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    sealed = snapshot(arena, slots, 1, 1)
    bad = next(piece for piece in arena.get(sealed).pieces if piece.fqn == "w")
    content = slots[1].read_bytes()[bad.offset : bad.offset + bad.num_bytes]
    with slots[1].open("r+b") as file:
        file.seek(bad.offset)
        file.write(bytes(bad.num_bytes))
    arena.inventory()
    claim = Claim(ParallelConfig(tp=2), (0,))
    name = arena.stage(coming(2, claim), bad.num_bytes)
    arena.file(name).view[: bad.num_bytes] = content
    arena.adopt(LAYOUT, arena.get(sealed), claim, [replace(bad, file=name, offset=0)])
    held = {holding.claims: holding.except_ for holding in arena.inventory()}
    assert held == {(CLAIM,): (), (claim,): ()}


def test_full_arena_says_what_is_needed_and_leaves_nothing(tmp_path: Path) -> None:
    arena = Arena.open(tmp_path, limit_bytes=SLOT_BYTES + 100)
    with pytest.raises(ArenaFullError, match=f"two slots needs {2 * SLOT_BYTES} bytes more, {SLOT_BYTES + 100} are"):
        arena.open_round(1, LAYOUT, CLAIM)
    assert tensor_files(tmp_path) == []
    with pytest.raises(ArenaFullError):
        arena.stage(coming(1), SLOT_BYTES + 101)
    assert tensor_files(tmp_path) == []


def test_memory_promised_to_one_pull_is_not_there_for_another(arena: Arena, tmp_path: Path) -> None:
    most_of_it = shutil.disk_usage(tmp_path).free * 6 // 10
    first = arena.stage(coming(1), most_of_it)
    with pytest.raises(ArenaFullError):
        arena.stage(coming(1), most_of_it)
    arena.give_back(first)
    arena.give_back(arena.stage(coming(1), most_of_it))
    assert tensor_files(tmp_path) == []


def test_what_comes_goes_into_the_free_slot_which_the_next_round_keeps(arena: Arena, tmp_path: Path) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    sealed = snapshot(arena, slots, 1, 1)
    arena.commit(1, 1)
    free = slots[0].stat().st_ino  # step 1 lies in the other one
    (piece, *_) = arena.get(sealed).pieces
    arrived = arrive(arena, coming(2), sealed, piece)
    assert arrived == "slot-2-1.bin"
    assert (tmp_path / arrived).stat().st_ino == free
    assert tensor_files(tmp_path) == ["slot-1-1.bin", "slot-2-1.bin"], "no memory beside the slots"
    new = arena.open_round(2, LAYOUT, CLAIM)
    assert [new[1].name, new[1].stat().st_ino] == [arrived, free]
    assert tensor_files(tmp_path) == ["slot-1-1.bin", "slot-2-0.bin", "slot-2-1.bin"]
    assert [held.except_ for held in Arena.open(tmp_path).inventory()] == [()], "a store that was restarted has it, too"
    later = snapshot(arena, new, 2, 2)
    arena.commit(2, 2)
    assert tensor_files(tmp_path) == ["slot-2-0.bin", "slot-2-1.bin"]
    assert [held.snapshot for held in arena.inventory()] == [later]


def test_what_comes_after_a_round_was_opened_goes_into_its_second_slot(arena: Arena, tmp_path: Path) -> None:
    sealed = snapshot(arena, arena.open_round(1, LAYOUT, CLAIM), 1, 1)
    (piece, *_) = arena.get(sealed).pieces
    arena.open_round(2, LAYOUT, CLAIM)
    assert arrive(arena, coming(2), sealed, piece) == "slot-2-1.bin"
    assert tensor_files(tmp_path) == ["slot-1-1.bin", "slot-2-0.bin", "slot-2-1.bin"]
    with pytest.raises(StoreError, match="round 1 is over"):
        arena.stage(coming(1), 1)


def test_a_second_pull_of_a_round_leaves_alone_what_the_first_has_brought(arena: Arena) -> None:
    sealed = snapshot(arena, arena.open_round(1, LAYOUT, CLAIM), 1, 1)
    (piece, *_) = arena.get(sealed).pieces
    assert arrive(arena, coming(2), sealed, piece) == "slot-2-1.bin"
    second, third = arena.stage(coming(2), 10), arena.stage(coming(2), 10)
    assert (second, third) == ("pull-2-0.bin", "pull-2-1.bin")
    for name in (second, third):
        arena.give_back(name)


def test_a_round_that_turns_out_larger_or_does_not_fit_keeps_what_came(tmp_path: Path) -> None:
    arena = Arena.open(tmp_path, limit_bytes=4 * SLOT_BYTES)
    sealed = snapshot(arena, arena.open_round(1, LAYOUT, CLAIM), 1, 1)
    small = Claim(ParallelConfig(tp=2), (1,))
    (piece, *_) = arena.get(sealed).pieces
    arrived = arrive(arena, coming(2, small), sealed, piece)
    large = Layout((*LAYOUT.tensors, TensorSpec("more", (SLOT_BYTES,), "uint8")))
    with pytest.raises(ArenaFullError):
        arena.open_round(2, large, CLAIM)
    assert all(map(arena._intact, arena.get(sealed).pieces))
    new = arena.open_round(2, LAYOUT, CLAIM)
    assert new[1].name == arrived
    assert [path.stat().st_size for path in new] == [SLOT_BYTES] * 2
    assert all(path.stat().st_blocks * 512 >= SLOT_BYTES for path in new)
    assert all(map(arena._intact, arena.get(sealed).pieces))


def test_restart_finds_all_that_was_sealed(arena: Arena, tmp_path: Path) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    snapshot(arena, slots, 1, 1)
    arena.commit(1, 1)
    snapshot(arena, slots, 1, 2)
    (tmp_path / "pull-1-0.bin").write_bytes(b"0123456789")
    (tmp_path / "snapshot-9-9-d.json.new").write_text("{")
    again = Arena.open(tmp_path)
    assert again.inventory() == arena.inventory()
    assert again.layout(LAYOUT.digest) == LAYOUT
    assert tensor_files(tmp_path) == ["slot-1-0.bin", "slot-1-1.bin"], "half a pull is removed"
    assert not list(tmp_path.glob("*.new"))
    again.commit(1, 2)
    snapshot(again, slots, 1, 3)
    assert [held.snapshot.step for held in again.inventory()] == [2, 3]


@pytest.mark.parametrize("damage", ["{", "[]", '{"v": 1}', ""], ids=["cut", "list", "fields", "empty"])
@pytest.mark.parametrize("pattern", ["layout-*.json", "snapshot-*.json", "round.json"])
def test_restart_survives_damaged_files(arena: Arena, tmp_path: Path, pattern: str, damage: str) -> None:
    snapshot(arena, arena.open_round(1, LAYOUT, CLAIM), 1, 1)
    next(tmp_path.glob(pattern)).write_text(damage)
    again = Arena.open(tmp_path)
    assert len(again.inventory()) == (1 if pattern == "round.json" else 0)
    again.open_round(2, LAYOUT, CLAIM)


def test_restart_without_a_slot_file_excepts_what_lay_there(arena: Arena, tmp_path: Path) -> None:
    slots = arena.open_round(1, LAYOUT, CLAIM)
    snapshot(arena, slots, 1, 1)
    slots[1].unlink()
    assert [held.except_ for held in Arena.open(tmp_path).inventory()] == [("b", "count", "w")]


def test_index_cannot_name_files_elsewhere(arena: Arena, tmp_path: Path) -> None:
    sealed = snapshot(arena, arena.open_round(1, LAYOUT, CLAIM), 1, 1)
    path = arena.index_path(sealed)
    path.write_text(path.read_text().replace("slot-1-1.bin", "../slot-1-1.bin"))
    Arena.open(tmp_path)
    assert Arena.open(tmp_path).get(sealed).pieces == ()
