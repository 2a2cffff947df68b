"""Samples from shared memory: the loader, packed files, whole files, and how long a new round's view takes.

    goal (medians)                                                  limit
    loader: processor time for a row / that of numpy's gather       1/0.7
    loader: 200,000 / rows of 4 KiB in a second of one core         1
    packed files, read again: /dev/shm's rate / the view's          1/0.6
    packed files, read for the first time: 1 GB/s / the rate        1
    whole files of 4 MiB: /dev/shm's rate / the view's              1/0.9
    the next round's view of 10,000 whole files is there            0.05 s

Measured through a view's process as the agent runs it, mounted if FUSE is to be had. loader: batches of 512 random
samples from extents, order, weights and commit included. numpy: `array[ids]`, the array in the process's own memory and
the ids made before. The file system: one `pread` a row. Packed and whole files: by 1 MiB into a buffer that is kept.
torchdata's StatefulDataLoader over the same array, and MosaicML's StreamingDataset over a local copy, shuffled, one
process each, where `make peers` has installed them. All take turns; each has run before.

    benchmarks/data.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import states
from launchers import ROOT, Goal, cell, finish, median

from tenplexrun.vfs.client import ViewClient
from tenplexrun.worker.data import Loader, open_loader

SAMPLE_BYTES, BATCH, CHUNK = 4096, 512, 1 << 20
FILES, LARGE, MIDDLE = 10_000, 4 * states.MIB, 110 * 1024
PEERS = ROOT / "build" / "peers" / "bin" / "python"
Seconds = dict[str, list[float]]


class View:
    """A view's process on a node's folder, and the rounds that are shown."""

    def __init__(self, home: Path) -> None:
        self._socket, self._round = home / "view.sock", 0
        config = {"dir": str(home), "socket": str(self._socket), "mode": "auto"}
        self._process = subprocess.Popen([sys.executable, "-m", "tenplexrun.vfs.server", json.dumps(config)], cwd="/")
        self.mode = self._ask(lambda client: client.hello())["mode"]

    def next_round(self, order: dict[str, Any], size: int = 1, consumed: int = 0) -> tuple[Path, float]:
        """Show rank 0's share, and drop the round before. Returns the folder and the seconds until it was there."""

        async def show(client: ViewClient) -> tuple[Path, float]:
            await client.hello()
            began = time.perf_counter()
            folder = Path(await client.show(self._round, order, 0, size, consumed))
            seconds = time.perf_counter() - began
            await client.drop(self._round - 1)
            return folder, seconds

        self._round += 1
        return self._ask(show)

    def _ask(self, question: Callable[[ViewClient], Awaitable[Any]]) -> Any:
        async def asking() -> Any:
            client = ViewClient(str(self._socket))
            try:
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(asyncio.wait_for(asking(), states.DEADLINE_S))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(states.DEADLINE_S)


@contextmanager
def view(home: Path) -> Iterator[View]:
    home.mkdir()
    made = View(home)
    try:
        yield made
    finally:
        made.close()


def in_turns(contenders: dict[str, Callable[[], float]], runs: int) -> Seconds:
    """What each says it took, after one turn that does not count."""
    seconds: Seconds = {name: [] for name in contenders}
    for number in range(-1, runs):
        for name, run in contenders.items():
            took = run()
            if number >= 0:
                seconds[name].append(took)
    return seconds


# -- rows -------------------------------------------------------------------------------------------------------


def rows(shown: View, path: Path, array: np.ndarray, steps: int, runs: int) -> Seconds:
    """Processor seconds for `steps` batches."""

    def show(order: dict[str, Any]) -> str:
        return str(shown.next_round(order)[0])

    loader = open_loader(f"npy:{path}", global_batch=BATCH, micro_batch=32, seed=1, show=show)
    check(loader, array)
    random, file = np.random.default_rng(0), os.open(path, os.O_RDONLY)
    header = path.stat().st_size - array.nbytes

    def ours() -> None:
        for _ in range(steps):
            loader.next_batch()
            loader.commit()

    def gather(ids: np.ndarray) -> None:
        for some in ids:
            array[some]

    def pread(ids: np.ndarray) -> None:
        for some in ids.tolist():
            b"".join([os.pread(file, SAMPLE_BYTES, header + number * SAMPLE_BYTES) for number in some])

    def drawn(run: Callable[[np.ndarray], None]) -> float:
        ids = random.integers(0, len(array), size=(steps, BATCH))
        return processor(lambda: run(ids))

    try:
        return in_turns(
            {
                "tenplexrun": lambda: processor(ours),
                "numpy's gather": lambda: drawn(gather),
                "pread": lambda: drawn(pread),
            },
            runs,
        )
    finally:
        os.close(file)


def processor(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def check(loader: Loader, array: np.ndarray) -> None:
    """Raises SystemExit unless rows are what they should be."""
    batch = loader.next_batch()
    if not np.array_equal(batch.rows, array[batch.ids]):
        raise SystemExit("the loader's rows are not the dataset's")
    loader.begin(0)


def peers(path: Path, folder: Path, runs: int) -> dict[str, list[float]]:
    """Rows a second of other loaders, by name; none where they are not installed."""
    if not PEERS.exists():
        return {}
    script = str(ROOT / "benchmarks" / "data_peers.py")
    command = [str(PEERS), script, str(path), str(folder), str(BATCH), str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise SystemExit(f"{script} failed: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- files ------------------------------------------------------------------------------------------------------

BUFFER = bytearray(CHUNK)


def read_files(paths: Sequence[Path]) -> float:
    """Seconds to read all of them."""
    began = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(BUFFER):
                pass
    return time.perf_counter() - began


def listed(folder: Path) -> list[Path]:
    return [folder / name for name in (folder / "list.txt").read_text().splitlines()]


def packs(shown: View, path: Path, folder: Path, runs: int) -> tuple[Seconds, int]:
    """Seconds, and bytes of the packs that were read."""
    order = {"dataset": f"npy:{path}", "global_batch": BATCH, "micro_batch": 32, "seed": 1}
    plain = [folder / "plain"]
    seconds: Seconds = {"for the first time": [], "again": [], "/dev/shm": []}
    for number in range(-1, runs):
        files = listed(shown.next_round(order, size=2)[0])
        if not plain[0].exists():
            plain[0].write_bytes(b"".join(file.read_bytes() for file in files))
            files = listed(shown.next_round(order, size=2)[0])
        found = [read_files(files), read_files(files), read_files(plain)]
        for name, took in zip(seconds, found, strict=True):
            seconds[name] += [took] if number >= 0 else []
    num_bytes = plain[0].stat().st_size
    plain[0].unlink()
    return seconds, num_bytes


def pictures(folder: Path, count: int, num_bytes: int) -> dict[str, Any]:
    """An order over a dataset of whole files in ten folders; what is in them is not looked at."""
    content = os.urandom(num_bytes)
    for number in range(count):
        place = folder / f"class-{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpeg").write_bytes(content)
    return {"dataset": f"images:{folder}", "global_batch": 8, "micro_batch": 8, "seed": 1}


def whole(shown: View, order: dict[str, Any], runs: int) -> Seconds:
    """Seconds to read all files: by the view, and where they are."""
    files = listed(shown.next_round(order)[0])
    direct = [file.resolve() for file in files]
    return in_turns({"view": lambda: read_files(files), "/dev/shm": lambda: read_files(direct)}, runs)


def switch(shown: View, order: dict[str, Any], runs: int) -> list[float]:
    """Seconds until the next round is shown."""
    return [shown.next_round(order, consumed=8 * number)[1] for number in range(runs + 1)][1:]


# -- all of it --------------------------------------------------------------------------------------------------


def measure(folder: Path, quick: bool, runs: int) -> dict[str, Any]:
    count = 32_768 if quick else 131_072
    array = np.random.default_rng(0).integers(0, 256, size=(count, SAMPLE_BYTES), dtype=np.uint8)
    np.save(folder / "rows.npy", array)
    found: dict[str, Any] = {"samples": count, "steps": count // BATCH}
    with view(folder / "node") as shown:
        found["mode"] = shown.mode
        found["rows"] = rows(shown, folder / "rows.npy", array, found["steps"], runs)
        found["peers"] = peers(folder / "rows.npy", folder / "peers", min(runs, 3))
        del array
        found["packs"], found["pack_bytes"] = packs(shown, folder / "rows.npy", folder, runs)
    (folder / "rows.npy").unlink()
    for name, number, num_bytes in (("large", 32 if quick else 64, LARGE), ("middle", 500 if quick else 2000, MIDDLE)):
        with view(folder / f"node-{name}") as shown:
            found[name] = whole(shown, pictures(folder / name, number, num_bytes), runs)
            found[f"{name}_bytes"] = number * num_bytes
    with view(folder / "node-many") as shown:
        found["switch"] = switch(shown, pictures(folder / "many", FILES, 100), runs)
    return found


def show(found: dict[str, Any], runs: int) -> None:
    count = found["steps"] * BATCH
    print(f"rows of 4 KiB of {found['samples']} samples, {BATCH} a batch; thousands a second of one core\n")
    print(f"{'':30}  {'median':>8}   {'least … most'}")
    for name, seconds in found["rows"].items():
        print(f"  {name:28}  {cell([count / each / 1e3 for each in seconds], runs)}")
    for name, rates in found["peers"].items():
        print(f"  {name:28}  {cell([rate / 1e3 for rate in rates], len(rates))}")
    if not found["peers"]:
        print("  others                        not installed: make peers")
    tables = (
        ("packed files", "packs", "pack_bytes"),
        ("whole files of 4 MiB", "large", "large_bytes"),
        ("whole files of 110 KiB", "middle", "middle_bytes"),
    )
    print(f"\nGB/s, view by {found['mode']}")
    for title, key, num_bytes in tables:
        print(title)
        for name, seconds in found[key].items():
            print(f"  {name:28}  {cell([found[num_bytes] / each / 1e9 for each in seconds], runs)}")
    print(f"seconds until the next round's {FILES} files are shown\n  {'':28}  {cell(found['switch'], runs)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer runs, smaller datasets")
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    runs = 3 if args.quick else max(3, args.runs)
    with states.shared_folder((1 if args.quick else 3) * states.GIB) as folder:
        found = measure(folder, args.quick, runs)
    show(found, runs)
    seconds = {key: {name: median(each) for name, each in found[key].items()} for key in ("rows", "packs", "large")}
    loader, packed, files = seconds["rows"], seconds["packs"], seconds["large"]
    rate = found["steps"] * BATCH / loader["tenplexrun"]
    goals = [
        Goal("loader: numpy's time, times", loader["tenplexrun"] / loader["numpy's gather"], round(1 / 0.7, 3), "×"),
        Goal("loader: 200,000 rows a second of a core / ours", 200_000 / rate, 1.0, ""),
        Goal("packs again: /dev/shm's time, times", packed["again"] / packed["/dev/shm"], round(1 / 0.6, 3), "×"),
        Goal("packs first: 1 GB/s / ours", 1e9 * packed["for the first time"] / found["pack_bytes"], 1.0, ""),
        Goal("whole files: /dev/shm's time, times", files["view"] / files["/dev/shm"], round(1 / 0.9, 3), "×"),
        Goal("next round of 10,000 files", median(found["switch"]), 0.05),
    ]
    return finish("data", goals, found, args.check)


if __name__ == "__main__":
    sys.exit(main())
