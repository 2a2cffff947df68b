"""The newest snapshot as .npy files: bytes, boxes and parts, and none of a snapshot that has gone."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.arena import arena_map
from tenplexrun.core.layout import Layout
from tenplexrun.core.ops import Order, Shard
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import row_major_boxes
from tenplexrun.core.snapshots import Claim
from tenplexrun.core.spec import TensorSpec
from tenplexrun.store.arena import Arena
from tenplexrun.vfs.nodes import Directory, File, Link, Live
from tenplexrun.vfs.state import Snapshots

CONFIG = ParallelConfig(tp=2)
LAYOUT = Layout(
    (
        TensorSpec("a/b", (6, 5), "float32", (Shard(0, "tp"),)),
        TensorSpec("columns", (4, 6), "bfloat16", (Shard(1, "tp"),)),
        TensorSpec("woven", (8, 3), "int64", (Order(0, 2, (4, 4)), Shard(0, "tp"))),
        TensorSpec("scale", (), "float64", ()),
        TensorSpec("flag", (3,), "bool", ()),
    )
)


def whole(fqn: str) -> np.ndarray:
    spec = LAYOUT.spec(fqn)
    kind = {"bfloat16": "u2", "bool": "?"}.get(spec.dtype, spec.dtype)
    return (np.arange(np.prod(spec.shape, dtype=int)).reshape(spec.shape) + len(fqn)).astype(kind)


def snapshot(arena: Arena, step: int, ranks: tuple[int, ...] = (0, 1), commit: bool = True) -> None:
    claim = Claim(CONFIG, ranks)
    slot = step % 2
    path = arena.open_round(3, LAYOUT, claim)[slot]
    memory = np.memmap(path, np.uint8, "r+")
    for entry in arena_map(LAYOUT, CONFIG, ranks).entries:
        part = np.ascontiguousarray(whole(entry.fqn)[entry.region.slices])
        memory[entry.offset : entry.offset + entry.num_bytes] = np.frombuffer(part.tobytes(), np.uint8)
    arena.seal(3, step, slot, {"consumed": 8 * step})
    if commit:
        arena.commit(3, step)


def content(directory: Directory, name: str) -> bytes:
    file = directory.entries[name]
    assert isinstance(file, File)
    return file.read(0, file.num_bytes)


def newest(snapshots: Snapshots, name: str) -> Directory:
    entries = snapshots()
    assert set(entries) == {name, "current"}
    assert entries["current"] == Link(name, moves=True)
    found = entries[name]
    assert isinstance(found, Live)
    return Directory(found.entries())


def facts(directory: Directory, name: str) -> Any:
    return json.loads(content(directory, f"{name}.json"))


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.open(tmp_path / "arena")


def test_a_node_that_holds_all_shows_whole_tensors_put_together(arena: Arena, tmp_path: Path) -> None:
    snapshot(arena, 4)
    shown = newest(Snapshots(tmp_path / "arena"), "4")
    for fqn, name in (("a/b", "a%2Fb"), ("columns",) * 2, ("woven",) * 2, ("scale",) * 2, ("flag",) * 2):
        np.testing.assert_array_equal(np.load(io.BytesIO(content(shown, f"{name}.npy"))), whole(fqn))
        said = facts(shown, name)
        assert (said["fqn"], said["dtype"], said["whole"]) == (fqn, LAYOUT.spec(fqn).dtype, True)
    assert json.loads(content(shown, "snapshot"))["consumed"] == 32


def test_a_node_shows_the_box_that_it_has_or_each_of_its_parts(arena: Arena, tmp_path: Path) -> None:
    snapshot(arena, 4, ranks=(1,))
    shown = newest(Snapshots(tmp_path / "arena"), "4")
    said = facts(shown, "columns")
    assert said["files"] == [{"name": "columns.npy", "offsets": [0, 3], "lengths": [4, 3]}]
    assert (said["shape"], said["whole"]) == ([4, 6], False)
    np.testing.assert_array_equal(np.load(io.BytesIO(content(shown, "columns.npy"))), whole("columns")[:, 3:])
    parts = facts(shown, "woven")["files"]
    assert len(parts) == 2, "interleaved: no single box"
    for part in parts:
        rows = slice(part["offsets"][0], part["offsets"][0] + part["lengths"][0])
        np.testing.assert_array_equal(np.load(io.BytesIO(content(shown, part["name"]))), whole("woven")[rows])


def test_any_part_of_a_file_can_be_read(arena: Arena, tmp_path: Path) -> None:
    snapshot(arena, 4)
    shown = newest(Snapshots(tmp_path / "arena"), "4")
    for name in ("a%2Fb.npy", "columns.npy", "woven.npy"):
        file, all_of_it = shown.entries[name], content(shown, name)
        assert isinstance(file, File)
        for offset in range(0, len(all_of_it), 3):
            for count in (1, 7, 50):
                assert file.read(offset, count) == all_of_it[offset : offset + count]


def test_the_newest_committed_one_is_shown_and_one_that_has_gone_is_an_error(arena: Arena, tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "arena")
    assert snapshots() == {}
    snapshot(arena, 4)
    first = newest(snapshots, "4")
    snapshot(arena, 5, commit=False)
    assert newest(snapshots, "4").entries is first.entries
    content(first, "flag.npy")
    arena.commit(3, 5)
    assert newest(snapshots, "5").entries is not first.entries
    with pytest.raises(OSError, match="Stale") as caught:
        content(first, "flag.npy")
    assert caught.value.errno == errno.ESTALE
    arena.open_round(4, LAYOUT, Claim(CONFIG, (0,)))
    content(newest(snapshots, "5"), "flag.npy")


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(lengths: list[int], data: st.DataObject) -> None:
    array = np.arange(np.prod(lengths, dtype=int)).reshape(lengths)
    first = data.draw(st.integers(0, array.size))
    last = data.draw(st.integers(first, array.size))
    boxes = list(row_major_boxes(lengths, first, last))
    found = [number for box in boxes for number in array[box.slices].ravel().tolist()]
    assert found == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(lengths) - 1)
