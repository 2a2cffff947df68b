"""Rows that a node does not keep: from the dataset's files, ahead of who reads them, within bounds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenplexrun.core.ahead import Ahead, Chunk
from tenplexrun.core.extents import Placement, Plan
from tenplexrun.core.order import DataOrder
from tenplexrun.errors import DataChangedError, DataError
from tenplexrun.samples import Extents
from tenplexrun.vfs.data import Data, Reader
from tenplexrun.vfs.remote import Remote
from tenplexrun.vfs.rows import Limits

SAMPLES, SIZE = 4096, 1024
ORDER = DataOrder(SAMPLES, 3, 32, 4)
DEADLINE_S = 60.0

Open = Callable[..., Data]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def alone(budget: int) -> Placement:
    return Placement("a", {"a": ""}, {"a": budget}, {})


@pytest.fixture
def rows(tmp_path: Path) -> np.ndarray:
    rows = np.random.default_rng(0).integers(0, 256, size=(SAMPLES, SIZE), dtype=np.uint8)
    (tmp_path / "files").mkdir()
    np.save(tmp_path / "files" / "rows.npy", rows)
    return rows


@pytest.fixture
def told() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of rows that are read from the files, one by one."""
    found: list[int] = []
    gather = Remote.gather

    def counting(self: Remote, ids: np.ndarray) -> np.ndarray:
        values = gather(self, ids)
        found.extend(ids.tolist())
        return values

    monkeypatch.setattr(Remote, "gather", counting)
    return found


@pytest.fixture
def open_data(tmp_path: Path, rows: np.ndarray, told: list[dict[str, Any]]) -> Iterator[Open]:
    opened: list[Data] = []

    def open_data(name: str = "rows", window: int = 256 << 10, patience_s: float = 60.0) -> Data:
        def tell(kind: str, **fields: Any) -> None:
            told.append({"kind": kind, **fields})

        limits = Limits(window, patience_s)
        opened.append(Data(f"npy:{tmp_path}/files/{name}.npy", tmp_path / "extents", ("", None), limits, tell))
        return opened[-1]

    yield open_data
    for data in opened:
        data.stop()


def reader(data: Data, budget: int, rank: int = 0, size: int = 1, consumed: int = 0, name: str = "v") -> Extents:
    plan = data.follow(alone(budget))
    data.keeper.wait(DEADLINE_S)
    return shown(data, plan, name, ORDER, rank, size, consumed)


def shown(data: Data, plan: Plan, name: str, order: DataOrder, rank: int, size: int, consumed: int) -> Extents:
    found = data.reader(plan, Reader(name, Path("/view") / name, order, rank, size, consumed), 0.0)
    assert isinstance(found, Extents)
    return found


def settle(data: Data) -> None:
    """Wait until all windows are full."""

    def settled() -> bool:
        with data.rows._changed:
            return data.rows._next(data.keeper.here()) is None and data.rows._busy is None

    until(settled)


def files_bytes(data: Data) -> int:
    return sum(path.stat().st_size for path in data.keeper.home.glob("ahead-*.rows"))


def test_an_epoch_is_read_through_the_window(open_data: Open, rows: np.ndarray, read: list[int]) -> None:
    """Each row that is not kept is read once from the files, and the memory for them stays bounded."""
    data = open_data()
    extents = reader(data, 1 << 20)
    assert sum(path.stat().st_size for path in data.keeper.home.glob("extent-*.bin")) == 1 << 20
    begin = 0
    while begin < SAMPLES:
        ids, _, _ = ORDER.share(begin, 0, 1)
        np.testing.assert_array_equal(extents.gather(ids, begin), rows[ids])
        assert files_bytes(data) <= 2 * (256 << 10)
        begin = ORDER.step(begin).stop
    numbers = np.arange(SAMPLES) // data.catalogue.samples_per_extent
    absent = np.flatnonzero(~np.isin(numbers, extents.here)).tolist()
    assert set(read) == set(absent)
    assert len(read) <= len(absent) + 2 * 256, "but for what the next epoch begins with, once"


def test_a_change_of_layout_keeps_what_was_fetched(open_data: Open, rows: np.ndarray, read: list[int]) -> None:
    data = open_data()
    reader(data, 0)
    until(lambda: len(read) >= 224)  # the window has 248 rows
    settle(data)
    before = set(read)
    data.rows.close("v")
    half = reader(data, 0, rank=1, size=2, consumed=64, name="w")
    ids, _, _ = ORDER.share(64, 1, 2)
    np.testing.assert_array_equal(half.gather(ids, 64), rows[ids])
    until(lambda: len(read) > len(before))
    settle(data)
    assert len(read) == len(set(read)), "nothing was read twice"
    assert set(ids.tolist()) <= before


def test_a_process_that_is_started_again_has_what_the_one_before_it_fetched(
    open_data: Open, rows: np.ndarray, read: list[int]
) -> None:
    data = open_data()
    extents = reader(data, 0)
    for begin in range(0, 320, 32):
        settle(data)  # a reader that comes before its rows fetches them itself
        extents.gather(ORDER.share(begin, 0, 1)[0], begin)
    settle(data)
    data.stop()
    before = len(read)
    again = open_data()
    extents = reader(again, 0)
    settle(again)
    for begin in (320, 352):
        ids, _, _ = ORDER.share(begin, 0, 1)
        np.testing.assert_array_equal(extents.gather(ids, begin), rows[ids])
    assert len(read) == len(set(read)), "nothing was read twice"
    assert len(read) - before <= 128, "only what lies further ahead"


def test_rows_of_extents_that_take_long_are_fetched_ahead(
    open_data: Open, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a node has been lost that had many of them, and their files are slow."""
    gate, read = threading.Event(), Remote.read

    def slow(self: Remote, offset: int, num_bytes: int) -> bytes:
        gate.wait(DEADLINE_S)
        return read(self, offset, num_bytes)

    monkeypatch.setattr(Remote, "read", slow)
    data = open_data()
    plan = data.follow(alone(1 << 30))
    extents = shown(data, plan, "v", ORDER, 0, 1, 0)
    assert extents.all_here, "or soon will be"
    until(lambda: files_bytes(data) > 64 << 10)
    settle(data)
    for begin in range(0, 128, 32):
        ids, _, _ = ORDER.share(begin, 0, 1)
        np.testing.assert_array_equal(extents.gather(ids, begin), rows[ids])
    gate.set()
    assert data.keeper.wait(DEADLINE_S)
    np.testing.assert_array_equal(extents.gather(ids, 96), rows[ids])


def test_nobody_waits_while_the_next_chunk_is_worked_out(open_data: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have many thousands of small steps: a view that was dropped meanwhile hung, and was killed for it."""
    gate, begun, next_chunk = threading.Event(), threading.Event(), Ahead.next_chunk

    def slow(self: Ahead) -> Chunk | None:
        begun.set()
        gate.wait(DEADLINE_S)
        return next_chunk(self)

    monkeypatch.setattr(Ahead, "next_chunk", slow)
    data = open_data()
    reader(data, 0)
    assert begun.wait(DEADLINE_S)
    closing = threading.Thread(target=data.leave, args=("v",))
    closing.start()
    closing.join(DEADLINE_S / 2)
    assert not closing.is_alive()
    gate.set()


def test_any_rows_may_be_asked_for(open_data: Open, rows: np.ndarray) -> None:
    extents = reader(open_data(), 1 << 20)
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, SAMPLES, size=seed * 7 + 1)
        np.testing.assert_array_equal(extents.gather(ids, None if seed % 2 else seed * 640), rows[ids])
    with pytest.raises(BlockingIOError):
        extents.gather(np.arange(SAMPLES), None, wait=False)


def test_files_that_are_away_are_an_error_where_a_row_is_needed(
    open_data: Open, rows: np.ndarray, tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    data = open_data(patience_s=0.5)
    extents = reader(data, 0)
    ids, _, _ = ORDER.share(0, 0, 1)
    np.testing.assert_array_equal(extents.gather(ids, 0), rows[ids])
    settle(data)
    (tmp_path / "files").rename(tmp_path / "away")
    data._remote._local = type(data._remote._local)()  # files that are open stay readable
    ids, _, _ = ORDER.share(32, 0, 1)
    np.testing.assert_array_equal(extents.gather(ids, 32), rows[ids])
    until(lambda: any("rows of npy:" in one["message"] for one in told if one["kind"] == "failed"))
    far, _, _ = ORDER.share(2048, 0, 1)
    with pytest.raises(DataError, match=r"rows\.npy.*tried again for 0\.5 s"):
        extents.gather(far, 2048)
    (tmp_path / "away").rename(tmp_path / "files")
    np.testing.assert_array_equal(extents.gather(far, 2048), rows[far])
    until(lambda: any(one["kind"] == "recovered" for one in told))
    assert [one["kind"] for one in told if "message" in one] == ["failed", "recovered"]


def test_a_file_that_has_changed_is_an_error_at_once(
    open_data: Open, rows: np.ndarray, tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    data, path = open_data(), tmp_path / "files" / "rows.npy"
    extents = reader(data, 0)
    ids, _, _ = ORDER.share(0, 0, 1)
    np.testing.assert_array_equal(extents.gather(ids, 0), rows[ids])
    os.truncate(path, 1 << 20)
    with pytest.raises(DataChangedError, match=r"rows\.npy has shrunk since the job began; restore it, and start"):
        extents.gather(np.arange(SAMPLES - 32, SAMPLES))
    path.unlink()
    data._remote._local = type(data._remote._local)()  # files that are open stay readable
    with pytest.raises(DataChangedError, match=r"rows\.npy has gone since the job began"):
        extents.gather(np.arange(64))
    until(lambda: any("rows of npy:" in one.get("message", "") for one in told))
    assert not any("tried again" in one.get("message", "") for one in told)


def test_a_file_that_was_written_to_is_looked_at_again(
    open_data: Open, rows: np.ndarray, tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    data, path = open_data(), tmp_path / "files" / "rows.npy"
    extents = reader(data, 0)
    np.testing.assert_array_equal(extents.gather(np.arange(64)), rows[:64])
    path.touch()
    np.testing.assert_array_equal(extents.gather(np.arange(500, 600)), rows[500:600])
    [line] = [one["message"] for one in told if "message" in one]
    assert "rows.npy was written to since the job began" in line
    assert line.endswith("where it was compared it is, and so is read on")
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([255 - rows[-1, -1]]))
    with pytest.raises(DataChangedError, match=r"is not what it was: .*rows\.npy was written to .* restore it"):
        extents.gather(np.arange(2000, 2100))


def test_an_outage_is_told_once_though_some_rows_come(
    open_data: Open, rows: np.ndarray, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two views, one reads what is there, again and again."""
    data, down = open_data(patience_s=0.5), {"rows": 0}
    gather, half = Remote.gather, SAMPLES // 2

    def failing(self: Remote, ids: np.ndarray) -> np.ndarray:
        if down["rows"] and (ids >= half).any():
            down["rows"] += 1
            raise DataError("its server does not answer")
        return gather(self, ids)

    monkeypatch.setattr(Remote, "gather", failing)
    down["rows"] = 1
    plan = data.follow(alone(0))
    whole = shown(data, plan, "whole", ORDER, 0, 1, 0)
    until(lambda: down["rows"] > 1)
    lower = DataOrder(half, 3, 32, 4)
    for begin in range(0, half, 32):
        extents = shown(data, plan, f"lower {begin}", lower, 0, 1, begin)
        ids, _, _ = lower.share(begin, 0, 1)
        np.testing.assert_array_equal(extents.gather(ids, begin), rows[ids])
        data.rows.close(f"lower {begin}")
    until(lambda: down["rows"] > 3)
    assert [one["kind"] for one in told if "message" in one] == ["failed"]
    down["rows"] = 0
    ids, _, _ = ORDER.share(0, 0, 1)
    np.testing.assert_array_equal(whole.gather(ids, 0), rows[ids])
    until(lambda: any(one["kind"] == "recovered" for one in told))
    assert [one["kind"] for one in told if "message" in one] == ["failed", "recovered"]


def test_extents_cut_short_or_without_checksums_are_fetched_anew(
    open_data: Open, rows: np.ndarray, told: list[dict[str, Any]]
) -> None:
    data = open_data()
    extents, size = reader(data, 8 << 20), data.catalogue.extent_bytes
    first, second, third = (data.keeper.home / f"extent-0000{number}.bin" for number in (1, 2, 3))
    for path, length in ((first, 0), (second, size // 2)):
        path.chmod(0o600)
        os.truncate(path, length)
    third.with_suffix(".xxh3").unlink()
    ids = np.arange(SAMPLES)
    np.testing.assert_array_equal(extents.gather(ids), rows)
    until(lambda: all(path.exists() and path.stat().st_size == size for path in (first, second, third)))
    until(lambda: third.with_suffix(".xxh3").exists())
    assert sum("is damaged, fetched anew" in one.get("message", "") for one in told) == 3
    np.testing.assert_array_equal(extents.gather(ids), rows)


def test_datasets_share_the_budget(
    open_data: Open, rows: np.ndarray, tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    np.save(tmp_path / "files" / "more.npy", rows[::-1])
    first = reader(open_data(), 3 << 20)
    second = open_data("more")
    plan = second.follow(alone(3 << 20))
    until(lambda: any("no room for more of npy:" in one.get("message", "") for one in told))
    extents = shown(second, plan, "w", ORDER, 0, 1, 0)
    total = sum(path.stat().st_size for path in (tmp_path / "extents").glob("*/extent-*.bin"))
    assert total == 3 << 20
    until(lambda: files_bytes(second) > 0)  # ahead of who reads, as those that no node owns
    ids = np.arange(0, SAMPLES, 5)
    np.testing.assert_array_equal(extents.gather(ids), rows[::-1][ids])
    np.testing.assert_array_equal(first.gather(ids), rows[ids])
