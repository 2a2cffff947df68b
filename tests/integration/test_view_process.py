"""The view's process as the agent runs it: real FUSE mounts, the farm, kill -9, hangs, errors."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extents_of import loader_of
from fuse_views import skip_or_fail

from tenplexrun.errors import DataError
from tenplexrun.vfs.client import ViewClient
from tenplexrun.vfs.mounts import clear, minors_at
from tenplexrun.worker.data import Loader, open_loader, open_view

DEADLINE_S = 60.0


class Process:
    """A view process on a node directory in shared memory."""

    def __init__(self, home: Path, mode: str, prefix: tuple[str, ...] = (), **options: Any) -> None:
        self.home, self.socket, self.mode, self.prefix = home, home / "view.sock", mode, prefix
        self.options = options
        self.running: subprocess.Popen[str] | None = None

    def start(self) -> Process:
        config = {"dir": str(self.home), "socket": str(self.socket), "mode": self.mode, **self.options}
        command = [*self.prefix, sys.executable, "-m", "tenplexrun.vfs.server", json.dumps(config)]
        self.running = subprocess.Popen(command, cwd=self.home.parent, stderr=subprocess.PIPE, text=True)
        return self

    def ask(self, question: Callable[[ViewClient], Awaitable[Any]]) -> Any:
        async def asking() -> Any:
            client = ViewClient(str(self.socket))
            try:
                await client.hello()
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(asking())

    def show(self, number: int, order: dict[str, Any], rank: int = 0, size: int = 2, consumed: int = 0) -> Path:
        return Path(self.ask(lambda client: client.show(number, order, rank, size, consumed)))

    def end(self, signum: int) -> tuple[int, str]:
        """Exit code and what it said."""
        assert self.running is not None
        self.running.send_signal(signum)
        _, said = self.running.communicate(timeout=DEADLINE_S)
        return self.running.returncode, said


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Process]]:
    """Starts view processes; skips the test where FUSE is asked for and refused."""
    started: list[Process] = []

    def start(mode: str, prefix: tuple[str, ...] = (), **options: Any) -> Process:
        process = Process(home, mode, prefix, **options)
        started.append(process.start())
        assert process.running is not None
        until(lambda: process.socket.exists() or process.running.poll() is not None)  # type: ignore[union-attr]
        if mode == "fuse" and process.running.poll() is not None:
            skip_or_fail(*process.end(0))
        return process

    yield start
    for process in started:
        if process.running is not None and process.running.poll() is None:
            process.running.kill()
            process.running.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@pytest.fixture
def rows(tmp_path: Path) -> np.ndarray:
    rows = np.random.default_rng(0).integers(0, 256, size=(1003, 100), dtype=np.uint8)
    np.save(tmp_path / "rows.npy", rows)
    return rows


@pytest.fixture
def order(rows: np.ndarray, tmp_path: Path) -> dict[str, Any]:
    return {"dataset": f"npy:{tmp_path}/rows.npy", "global_batch": 24, "micro_batch": 4, "seed": 5}


def direct(order: dict[str, Any], rank: int = 0, size: int = 2, consumed: int = 0) -> Loader:
    fields = {name: value for name, value in order.items() if name != "dataset"}
    return open_loader(order["dataset"], **fields, dp_rank=rank, dp_size=size, consumed=consumed)


@pytest.mark.parametrize("mode", ["fuse", "farm"])
def test_files_and_loader_read_the_order(
    mode: str, start: Callable[..., Process], order: dict[str, Any], rows: np.ndarray
) -> None:
    view = start(mode)
    assert view.ask(lambda client: client.hello())["mode"] == mode
    place = view.show(1, order, 1, 2, 48)
    assert place == view.show(1, order, 1, 2, 48)
    shelf = place.parent
    assert (shelf.name, os.readlink(shelf / "current")) == ("dp-0001", "round-1")
    ids, weights = np.load(place / "order.npy", mmap_mode="r"), np.load(place / "weights.npy", mmap_mode="r")
    packs = b"".join((place / name).read_bytes() for name in (place / "list.txt").read_text().split())
    assert packs == rows[ids].tobytes()
    assert len(ids) == sum(int(line) for line in (place / "batch-sizes.txt").read_text().split())

    shown = loader_of(place, 1, 2, 48)
    plain, first = direct(order, 1, 2, 48), 0
    assert shown.order == plain.order
    while first < len(ids):
        ours, theirs = shown.next_batch(), plain.next_batch()
        last = first + len(ours.ids)
        np.testing.assert_array_equal(ours.ids, ids[first:last])
        np.testing.assert_array_equal(ours.weights, weights[first:last])
        np.testing.assert_array_equal(ours.rows, theirs.rows)
        first = last
    assert shown.next_batch().consumed_after == 1003 + 24  # the next epoch

    code, said = view.end(signal.SIGTERM)
    assert (code, said) == (0, "")
    assert minors_at(view.home / "view") == []
    assert sorted(entry.name for entry in view.home.iterdir()) == ["extents", "view"]
    assert list((view.home / "view").iterdir()) == []


@pytest.mark.parametrize("mode", ["fuse", "farm"])
def test_rounds_come_and_go(mode: str, start: Callable[..., Process], order: dict[str, Any]) -> None:
    view = start(mode)
    first = view.show(1, order)
    inode, (pack,) = (first / "pack-00000.bin").stat().st_ino, (first / "list.txt").read_text().split()
    with open(first / pack, "rb") as reader:
        second = view.show(2, order, consumed=240)
        other = view.show(2, {**order, "seed": 6}, consumed=240)  # a second loader of the same round
        assert (second / pack).stat().st_ino != inode
        assert (second.parent / "current" / "cursor.json").read_text() == (second / "cursor.json").read_text()
        assert other.name == "round-2.2"
        whole = (first / pack).read_bytes()
        view.ask(lambda client: client.drop(1))
        until(lambda: not first.exists())
        assert reader.read() == whole
    assert sorted(entry.name for entry in second.parent.iterdir()) == ["current", "round-2", "round-2.2"]
    view.ask(lambda client: client.drop(2))
    view.ask(lambda client: client.drop(2))
    assert list(second.parent.iterdir()) == []


@pytest.mark.parametrize("mode", ["fuse", "farm"])
def test_whole_files_are_links_into_shared_memory(mode: str, start: Callable[..., Process], tmp_path: Path) -> None:
    """A script that reads a list of files, or a folder for each class, needs nothing else."""
    for number in range(101):
        folder = tmp_path / "pictures" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(bytes([number]) * (number + 1))
    order = {"dataset": f"images:{tmp_path}/pictures", "global_batch": 24, "micro_batch": 4, "seed": 5}
    view = start(mode)
    place, later = view.show(1, order, 1), view.show(2, order, 1, consumed=48)
    for shown in (place, later, place.parent / "current"):
        names = (shown / "list.txt").read_text().splitlines()
        ids = np.load(shown / "order.npy")
        by_number = sorted(range(101), key=lambda number: f"{('cat', 'dog')[number % 2]}/{number}.png")
        assert [(shown / name).read_bytes()[0] for name in names] == [by_number[number] for number in ids]
        assert all((shown / name).resolve().is_relative_to(view.home / "extents") for name in names)
        assert sorted(os.listdir(shown / "files")) == ["cat", "dog"]
    names = (later / "list.txt").read_text().splitlines()
    first = (place / "list.txt").read_text().splitlines()[0]
    with open(place / first, "rb") as reader:
        view.ask(lambda client: client.drop(1))
        until(lambda: not place.exists())
        assert reader.read(1)
    described = view.ask(lambda client: client.describe(order["dataset"]))
    assert (described["num_samples"], described["sample_bytes"]) == (101, 0)
    expected = [(later / name).read_bytes() for name in names]
    view.end(signal.SIGKILL)
    shutil.rmtree(tmp_path / "pictures")  # not needed again
    again = start(mode)
    again.ask(lambda client: client.hello())
    assert [(later / name).read_bytes() for name in names] == expected
    assert again.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("mode", ["fuse", "farm"])
def test_lines_are_packed(mode: str, start: Callable[..., Process], tmp_path: Path) -> None:
    lines = [json.dumps({"number": number, "text": "x" * (number % 7)}) for number in range(101)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    order = {"dataset": f"jsonl:{tmp_path}/x.jsonl", "global_batch": 24, "micro_batch": 4, "seed": 5}
    place = start(mode).show(1, order, consumed=24)
    ids = np.load(place / "order.npy").tolist()
    packs = [(place / name).read_text() for name in (place / "list.txt").read_text().split()]
    assert [json.loads(line)["number"] for line in "".join(packs).splitlines()] == ids
    offsets = np.load(place / "offsets.npy")
    assert np.diff(offsets).tolist() == [len(lines[number]) + 1 for number in ids]


def test_fuse_serves_what_files_cannot(start: Callable[..., Process], order: dict[str, Any], rows: np.ndarray) -> None:
    place = start("fuse").show(1, order)
    later = np.load(place / "epoch-4" / "order.npy")
    assert later[0] == direct(order, consumed=4 * 1003).next_batch().ids[0]
    assert "epoch-4" not in os.listdir(place)
    with pytest.raises(OSError, match="Read-only"):
        (place / "new").write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        (place / "epoch-0").stat()
    ids = np.load(place / "order.npy")
    mapped = np.memmap(place / "pack-00000.bin", dtype=np.uint8, mode="r", shape=(len(ids), 100))
    np.testing.assert_array_equal(mapped[::7], rows[ids[::7]])


@pytest.mark.parametrize("mode", ["fuse", "farm"])
def test_killed_and_started_again_at_the_same_path(
    mode: str, start: Callable[..., Process], order: dict[str, Any]
) -> None:
    """Case D7."""
    view = start(mode)
    place = view.show(3, order, consumed=240)
    loader = loader_of(place, 0, 2, 240)
    expected = (place / "pack-00000.bin").read_bytes()
    view.end(signal.SIGKILL)
    if mode == "fuse":
        with pytest.raises(OSError, match="not connected"):
            (place / "list.txt").read_text()
        with pytest.raises(DataError, match="is its process alive"):
            open_view(str(place), patience_s=0)
    loader.next_batch()  # needs the extents only, and so goes on meanwhile

    again = start(mode)
    assert again.ask(lambda client: client.hello())["mode"] == mode
    assert len(minors_at(view.home / "view")) == (mode == "fuse")
    assert (place / "pack-00000.bin").read_bytes() == expected
    assert os.readlink(place.parent / "current") == "round-3"
    assert again.show(3, order, consumed=240) == place
    reopened = loader_of(place, 0, 2, 240)
    np.testing.assert_array_equal(reopened.next_batch().rows, direct(order, consumed=240).next_batch().rows)


def test_a_hung_view_is_replaced_and_its_readers_freed(start: Callable[..., Process], order: dict[str, Any]) -> None:
    hung = start("fuse")
    place = hung.show(1, order)
    assert hung.running is not None
    hung.running.send_signal(signal.SIGSTOP)
    script = "import sys; open(sys.argv[1], 'rb').read()"
    reader = subprocess.Popen([sys.executable, "-c", script, str(place / "list.txt")], stderr=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(1.0)
    hung.socket.unlink()
    again = start("fuse")
    assert reader.wait(DEADLINE_S) != 0
    reader.communicate()
    assert (place / "list.txt").read_text() == "pack-00000.bin\n"
    hung.end(signal.SIGKILL)
    assert again.ask(lambda client: client.hello())["mode"] == "fuse"
    assert (place / "list.txt").read_text() == "pack-00000.bin\n"


def test_a_failed_read_is_an_error_of_that_read_only(
    start: Callable[..., Process], order: dict[str, Any], tmp_path: Path
) -> None:
    """Case D6: here the extents vanish under the view, and the dataset with them."""
    view = start("fuse", patience_s=0.5)
    place = view.show(1, order)
    (tmp_path / "rows.npy").rename(tmp_path / "gone.npy")
    (view.home / "extents").rename(view.home / "gone")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        (place / "pack-00000.bin").read_bytes()
    assert caught.value.errno == errno.EIO
    (view.home / "gone").rename(view.home / "extents")
    assert len((place / "pack-00000.bin").read_bytes()) == (place / "pack-00000.bin").stat().st_size
    code, said = view.end(signal.SIGTERM)
    assert code == 0
    assert "read failed: DataError" in said
    assert "(tried again for 0.5 s)" in said


def test_lost_and_damaged_extents_are_read_anew(
    start: Callable[..., Process], order: dict[str, Any], rows: np.ndarray
) -> None:
    view = start("fuse")
    place = view.show(1, order)
    [extent] = (view.home / "extents").glob("*/extent-*.bin")
    extent.unlink()
    loader = loader_of(place, 0, 2, 0)
    batch = loader.next_batch()
    np.testing.assert_array_equal(batch.rows, rows[batch.ids])
    until(extent.exists)
    ids = np.load(place / "order.npy")
    assert (place / "pack-00000.bin").read_bytes() == rows[ids].tobytes()

    place = view.show(2, order)
    extent.chmod(0o600)
    with open(extent, "r+b") as file:
        file.seek(100 * int(ids[5]))
        file.write(bytes([rows[ids[5], 0] ^ 255]))
    loader, inode = loader_of(place, 0, 2, 0), extent.stat().st_ino
    batch = loader.next_batch()
    np.testing.assert_array_equal(batch.rows, rows[batch.ids])
    until(lambda: extent.exists() and extent.stat().st_ino != inode)
    assert (place / "pack-00000.bin").read_bytes() == rows[ids].tobytes()


@pytest.mark.parametrize("mode", ["fuse", "farm"])
def test_refusals_keep_their_class_and_the_process(
    mode: str, start: Callable[..., Process], order: dict[str, Any]
) -> None:
    view = start(mode)
    fine = view.show(1, order)
    for change, message in (
        ({"dataset": "npy:/no/such.npy"}, "does not exist"),
        ({"dataset": "zip:/x"}, "should be FORMAT:PATH"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"fingerprint": "xxh3-0"}, "fingerprint was 'xxh3-0'"),
        ({"num_samples": 1004}, "num_samples was 1004"),
        ({"surprise": 1}, "unknown fields"),
    ):
        with pytest.raises(DataError, match=message):
            view.show(2, {**order, **change})
    with pytest.raises(DataError, match="rank 2 is not below"):
        view.show(2, order, 2, 2)
    with pytest.raises(DataError, match="not a request"):
        view.show(2, {})
    described = view.ask(lambda client: client.describe(order["dataset"]))
    assert described == {"num_samples": 1003, "sample_bytes": 100, "fingerprint": direct(order).order.fingerprint}
    assert view.show(1, {**order, **{k: described[k] for k in ("num_samples", "fingerprint")}}) == fine


def test_ended_by_somebody_elses_unmount(start: Callable[..., Process], order: dict[str, Any]) -> None:
    view = start("fuse")
    view.show(1, order)
    clear(view.home / "view")
    code, said = view.end(0)
    assert code == 73
    assert "start it again" in said


def test_a_farm_writes_as_much_as_it_may(start: Callable[..., Process], order: dict[str, Any]) -> None:
    """A row takes 100 bytes, its id and its weight 8 each; a step has 12 rows of this rank."""
    place = start("farm", window_bytes=40 * 116).show(1, order)
    assert (place / "pack-00000.bin").stat().st_size == 36 * 100
    assert json.loads((place / "cursor.json").read_text())["steps"] == 3
