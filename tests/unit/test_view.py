"""The virtual files of a view against the order itself; the farm against the virtual files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from extents_of import extents_of

from tenplexrun.core.order import DataOrder
from tenplexrun.errors import ArenaFullError, DataError
from tenplexrun.samples import Extents
from tenplexrun.vfs import view as view_module
from tenplexrun.vfs.farm import Farm
from tenplexrun.vfs.nodes import Directory, File, Link
from tenplexrun.vfs.view import tree
from tenplexrun.vfs.window import Window, window


@pytest.fixture
def extents(tmp_path: Path) -> Extents:
    rows = np.random.default_rng(0).integers(0, 256, size=(103, 7), dtype=np.uint8)
    np.save(tmp_path / "rows.npy", rows)
    return extents_of(f"npy:{tmp_path}/rows.npy", tmp_path / "extents")


def content(directory: Directory, name: str) -> bytes:
    file = directory.entries[name]
    assert isinstance(file, File)
    return bytes(file.read(0, file.num_bytes))


def walked(order: DataOrder, consumed: int, rank: int, size: int) -> tuple[list[int], list[float], list[int], int]:
    """The same window, step by step through `DataOrder.share`: ids, weights, rows of each step, consumed after."""
    ids: list[int] = []
    weights: list[float] = []
    sizes = []
    consumed = order.step(consumed).start
    end = (order.epoch_of(consumed) + 1) * order.num_samples
    while consumed < end and order.step(consumed).start == consumed:
        step_ids, step_weights, _ = order.share(consumed, rank, size)
        ids, weights = ids + step_ids.tolist(), weights + step_weights.tolist()
        sizes.append(len(step_ids))
        consumed = order.step(consumed).stop
    return ids, weights, sizes, consumed


CASES = [
    (batch, micro, tail, rank, size, consumed)
    for batch, micro in ((24, 4), (10, 3), (1, 1), (103, 8))
    for tail in ("short", "wrap", "drop")
    for rank, size in ((0, 1), (1, 3), (4, 5))
    for consumed in (0, 72, 102, 103, 5 * 103 + 17)
]


@pytest.mark.parametrize(("batch", "micro", "tail", "rank", "size", "consumed"), CASES)
def test_rows_of_a_window_are_those_of_its_steps(
    batch: int, micro: int, tail: str, rank: int, size: int, consumed: int
) -> None:
    order = DataOrder(103, 5, batch, micro, tail)
    shown = window(order, rank, size, consumed)
    ids, weights, sizes, end = walked(order, consumed, rank, size)
    assert (shown.num_rows, shown.end) == (len(ids), end)
    assert shown.ids(0, shown.num_rows).tolist() == ids
    assert shown.weights(0, shown.num_rows).tolist() == weights
    full, tail_rows = shown.batch_sizes
    assert [full] * shown.full_steps + [tail_rows] * (shown.tail_rows > 0) == sizes
    later = shown.at_epoch(order.epoch_of(shown.start) + 3)
    while shown.start < later.start:
        shown = window(order, rank, size, shown.end)
    assert shown == later


def test_longer_batch_than_the_dataset() -> None:
    assert window(DataOrder(10, 0, 24, 4), 0, 1, 10) == Window(DataOrder(10, 0, 24, 4), 0, 1, 10, 0, 10)
    with pytest.raises(DataError, match="rank 2 is not below"):
        window(DataOrder(10, 0, 4, 2), 2, 2, 0)


def test_files(extents: Extents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "PACK_BYTES", 150)  # 21 rows of 7 bytes
    order = DataOrder(103, 5, 24, 4)
    directory = tree(window(order, 1, 2, 24), extents)
    ids, weights, sizes, end = walked(order, 24, 1, 2)
    packs = content(directory, "list.txt").decode().split()
    assert packs == [f"pack-{number:05d}.bin" for number in range(2)]
    records = b"".join(content(directory, pack) for pack in packs)
    assert records == extents.gather(np.array(ids)).tobytes()
    assert np.load(io.BytesIO(content(directory, "order.npy"))).tolist() == ids
    assert np.load(io.BytesIO(content(directory, "weights.npy"))).tolist() == weights
    assert [int(line) for line in content(directory, "batch-sizes.txt").split()] == sizes
    index = json.loads(content(directory, "index.json"))
    assert index["rows"] == len(ids)
    assert index["packs"] == [
        {"name": "pack-00000.bin", "first_row": 0, "rows": 21},
        {"name": "pack-00001.bin", "first_row": 21, "rows": len(ids) - 21},
    ]
    cursor = json.loads(content(directory, "cursor.json"))
    assert (cursor["consumed"], cursor["consumed_after"], cursor["steps"]) == (24, end, len(sizes))
    assert DataOrder.from_json(cursor["order"]) == order
    links = directory.entries["extents"]
    assert isinstance(links, Directory)
    assert links.entries == {"extent-00000.bin": Link(f"{extents.directory}/extent-00000.bin")}


def test_any_part_of_a_file_can_be_read(extents: Extents) -> None:
    directory = tree(window(DataOrder(103, 5, 10, 3), 1, 2, 0), extents)
    for name, file in directory.entries.items():
        if isinstance(file, File):
            whole = content(directory, name)
            assert len(whole) == file.num_bytes
            for offset in (0, 1, 6, 7, 127, 128, 129, file.num_bytes - 1, file.num_bytes, file.num_bytes + 9):
                for count in (0, 1, 8, 200, 10**6):
                    assert file.read(offset, count) == whole[offset : offset + count], (name, offset, count)


def test_later_epochs_are_there_by_name(extents: Extents) -> None:
    order = DataOrder(103, 5, 24, 4)
    directory = tree(window(order, 0, 1, 103 + 24), extents)
    later = directory.hidden("epoch-3")
    assert later is not None
    assert np.load(io.BytesIO(content(later, "order.npy"))).tolist()[:103] == [
        *order.sample_at(np.arange(3 * 103, 4 * 103))
    ]
    for name in ("epoch-0", "epoch-1", "epoch-x", "round-3", "epoch-"):
        assert directory.hidden(name) is None


def test_huge_datasets_cost_nothing_to_show() -> None:
    order = DataOrder(10**12, 5, 512, 4)
    shown = window(order, 3, 7, 10**12 + 512)
    assert shown.num_rows > 10**11
    assert shown.ids(shown.num_rows - 5, 5).shape == (5,)
    around = shown.ids(3 * 8192 - 4, 8)  # over the edge of a block
    assert around.tolist() == order.sample_at(shown.positions(3 * 8192 - 4, 8)).tolist()


def test_farm_writes_the_same_files(extents: Extents, tmp_path: Path) -> None:
    farm = Farm(tmp_path / "view")
    farm.start()
    shown = window(DataOrder(103, 5, 24, 4), 0, 2, 0)
    directory = tree(shown, extents)
    for number in (1, 2):
        farm.show("dp-0000", f"round-{number}", directory, current=True)
    place = tmp_path / "view" / "dp-0000" / "current"
    assert place.readlink() == Path("round-2")
    for name, file in directory.entries.items():
        if isinstance(file, File):
            assert (place / name).read_bytes() == content(directory, name)
    assert (place / "extents" / "extent-00000.bin").stat().st_size == 103 * 7
    farm.drop("dp-0000", "round-1")
    assert sorted(entry.name for entry in place.parent.iterdir()) == ["current", "round-2"]
    farm.drop("dp-0000", "round-2")
    assert list(place.parent.iterdir()) == []
    farm.close()
    assert list((tmp_path / "view").iterdir()) == []


def test_a_bounded_window_ends_at_a_step(extents: Extents) -> None:
    order = DataOrder(103, 5, 24, 4)
    assert window(order, 0, 1, 0).cut(50).num_rows == 48
    assert window(order, 0, 1, 0).cut(1).num_rows == 24
    assert window(order, 0, 1, 0).cut(10**6) == window(order, 0, 1, 0)
    assert window(order, 0, 1, 96).cut(10).num_rows == 8
    assert window(order, 0, 1, 0).cut(96).end == 96


def test_full_memory_is_named(tmp_path: Path) -> None:
    def full(offset: int, count: int) -> bytes:
        raise OSError(28, "No space left on device")

    farm = Farm(tmp_path / "view")
    farm.start()
    with pytest.raises(ArenaFullError, match="smaller --view-window"):
        farm.show("dp-0000", "round-1", Directory({"x": File(5, full)}), current=True)
    assert list((tmp_path / "view" / "dp-0000").iterdir()) == []
