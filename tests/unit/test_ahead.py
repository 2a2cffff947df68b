"""Pages of the arena that a worker has before it needs them."""

from __future__ import annotations

import json
import mmap
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scratch import scratch_dir

from tenplexrun.core.arena import arena_map
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import index_name
from tenplexrun.core.snapshots import Claim
from tenplexrun.store.arena import Arena
from tenplexrun.worker.ahead import Ahead, Source
from tenplexrun.worker.device import Bytes
from tenplexrun.worker.launch import Place
from tenplexrun.worker.slots import SlotWriter, Snapshot

ROWS, WIDTH = 1024, 1024
LAYOUT = Layout((TensorSpec("weight", (ROWS, WIDTH), "float32", (Shard(0, "tp"),)),))
ONE, TP2, TP4 = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(tp=4)
CPU = torch.device("cpu")


def place(config: ParallelConfig, rank: int) -> Place:
    return Place(config, config.coord(rank), CPU)


def mapped_bytes(path: Path) -> int:
    """Of this process, of all maps of a file."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    own = (part for part in maps if str(path) in part.partition("\n")[0])
    return sum(int(found[1]) << 10 for part in own if (found := re.search(r"^Rss: +(\d+) kB", part, re.MULTILINE)))


@pytest.fixture
def arena() -> Iterator[Path]:
    folder = scratch_dir()
    yield folder
    shutil.rmtree(folder)


def save(folder: Path) -> tuple[Path, torch.Tensor]:
    """A snapshot at tp2 of both ranks: its index, and what it holds."""
    arena, weight = Arena.open(folder), torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    paths = [str(path) for path in arena.open_round(0, LAYOUT, Claim(TP2, (0, 1)))]
    for rank, half in enumerate(weight.chunk(2)):
        SlotWriter(paths, arena_map(LAYOUT, TP2, (0, 1)), LAYOUT, place(TP2, rank)).write(0, {"weight": half})
    return folder / index_name(arena.seal(0, 1, 0, None)), weight


def test_a_rank_has_the_pages_of_what_it_will_read_and_no_others(arena: Path) -> None:
    index, weight = save(arena)
    slot = arena / Snapshot(str(index)).index.pieces[0].file
    before = mapped_bytes(slot)
    source = Source(str(index), place(TP4, 2))
    source.ahead.wait()
    quarter, around = ROWS * WIDTH, 16 * mmap.PAGESIZE  # in bytes; the kernel maps some neighbours, too
    assert quarter <= mapped_bytes(slot) - before <= quarter + 2 * around
    target = torch.zeros(ROWS // 4, WIDTH)
    Snapshot(str(index), source.end()).fill({"weight": target}, LAYOUT, place(TP4, 2))
    assert torch.equal(target, weight.chunk(4)[2])


def test_another_layout_of_the_script_reads_other_pages(arena: Path) -> None:
    index, weight = save(arena)
    slot = arena / Snapshot(str(index)).index.pieces[0].file
    columns, before = Layout((TensorSpec("weight", (ROWS, WIDTH), "float32", (Shard(1, "tp"),)),)), mapped_bytes(slot)
    source = Source(str(index), place(TP2, 0))
    source.aim(columns)
    source.ahead.wait()
    assert (
        mapped_bytes(slot) - before >= ROWS * WIDTH * 4 - mmap.PAGESIZE
    )  # half of each row, so all pages but the last
    target = torch.zeros(ROWS, WIDTH // 2)
    Snapshot(str(index), source.end()).fill({"weight": target}, columns, place(TP2, 0))
    assert torch.equal(target, weight[:, : WIDTH // 2])


def test_pages_to_write_are_there_and_keep_what_they_hold(arena: Path) -> None:
    index, weight = save(arena)
    slots = sorted(map(str, arena.glob("slot-*")))
    writer = SlotWriter(slots, arena_map(LAYOUT, TP2, (0, 1)), LAYOUT, place(TP2, 1))
    Ahead(writer.ranges()).wait()
    assert mapped_bytes(Path(slots[1])) >= ROWS * WIDTH * 2
    target = torch.zeros(ROWS, WIDTH)
    Snapshot(str(index)).fill({"weight": target}, LAYOUT, place(ONE, 0))
    assert torch.equal(target, weight)


@pytest.mark.parametrize("damage", ["no index", "no layout", "no file", "no JSON"])
def test_what_is_not_there_is_left_to_the_restore(arena: Path, damage: str) -> None:
    index, _ = save(arena)
    gone = {"no index": [index], "no layout": arena.glob("layout-*"), "no file": arena.glob("slot-*"), "no JSON": []}
    for path in list(gone[damage]):
        path.unlink()
    if damage == "no JSON":
        index.write_text(json.dumps({"v": 1})[:-3])
    source = Source(str(index), place(ONE, 0))
    source.ahead.wait()
    assert source.end().folder == arena


def test_it_ends_when_told(arena: Path) -> None:
    index, _ = save(arena)
    (data,) = Snapshot(str(index)).ranges(LAYOUT, place(TP2, 0))

    def endless() -> Iterator[Bytes]:
        while True:
            yield data

    Ahead(endless()).end()
