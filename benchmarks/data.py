"""Samples from shared memory: the loader, packed files, whole files, and how long a new round's view takes.

    goal (medians)                                                  limit
    loader: processor time for a row / that of numpy's gather       1/0.7
    loader: 200,000 / rows of 4 KiB in a second of one core         1
    packed files, read again: /dev/shm's rate / the view's          1/0.6
    packed files, read for the first time: 1 GB/s / the rate        1
    whole files of 4 MiB, by their links: /dev/shm's rate / ours    1/0.9
    whole files of 110 KiB, by paths.txt: /dev/shm's rate / ours    1/0.9
    the next round's view of 10,000 whole files is there            0.05 s
    remote, 5 ms a request: 10 × read-ahead's rate / the loader's   1

Measured through a view's process as the agent runs it, mounted if FUSE is to be had. loader: batches of 1,024 rows,
each once an epoch, with order, weights and commit. numpy: `array[ids]`, the array in the process's own memory and the
ids a permutation made before; /dev/shm: from a mapped file, as ours, with small pages. The file system: one `pread` a
row. Packed and whole files: by 1 MiB into a buffer that is kept. torchdata's StatefulDataLoader over the same array,
and MosaicML's StreamingDataset over a local copy, shuffled, one process each, where `make peers` has installed them.
All take turns; each has run before. remote: rows of a file behind a local HTTP server that waits before each answer;
the loader's first epoch of 64 MiB, from the moment in which the view is told of it, beside fsspec's read-ahead cache
that reads row by row in the same order.

    benchmarks/data.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import states
from launchers import ROOT, Goal, cell, finish, median
from views import View, server, view

from tenplexrun.core.order import DataOrder
from tenplexrun.worker.data import Loader, open_loader

SAMPLE_BYTES, BATCH, CHUNK = 4096, 1024, 1 << 20
REMOTE_ROWS, READ_AHEAD_ROWS, LATENCY_S = 16_384, 100, 0.005
FILES, LARGE, MIDDLE = 10_000, 4 * states.MIB, 110 * 1024
PEERS = ROOT / "build" / "peers" / "bin" / "python"
Seconds = dict[str, list[float]]


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

    mapped = np.load(path, mmap_mode="r")

    def gather(rows: np.ndarray, ids: np.ndarray) -> None:
        for some in ids:
            rows[some]

    def pread(ids: np.ndarray) -> None:
        for some in ids.tolist():
            b"".join([os.pread(file, SAMPLE_BYTES, header + number * SAMPLE_BYTES) for number in some])

    def drawn(run: Callable[[np.ndarray], None]) -> float:
        ids = random.permutation(len(array)).reshape(steps, BATCH)  # each row once, too: no cache helps
        return processor(lambda: run(ids))

    try:
        return in_turns(
            {
                "tenplexrun": lambda: processor(ours),
                "numpy's gather": lambda: drawn(functools.partial(gather, array)),
                "numpy's gather, /dev/shm": lambda: drawn(functools.partial(gather, mapped)),
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


def listed(folder: Path, name: str = "list.txt") -> list[Path]:
    return [folder / line for line in (folder / name).read_text().splitlines()]


def copy(files: Sequence[Path], folder: Path) -> None:
    """With a list of their own."""
    folder.mkdir()
    for number, file in enumerate(files):
        shutil.copyfile(file, folder / str(number))
    (folder / "list.txt").write_text("".join(f"{number}\n" for number in range(len(files))))


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


def whole(shown: View, order: dict[str, Any], home: Path, runs: int) -> Seconds:
    """Seconds to read all files: by the view, and copies that are nowhere but in /dev/shm."""
    folder, _ = shown.next_round(order)
    copy(listed(folder), home)
    ways = {
        "links": lambda: listed(folder),
        "paths.txt": lambda: listed(folder, "paths.txt"),
        "/dev/shm": lambda: listed(home),
    }
    return in_turns({name: lambda find=find: read_files(find()) for name, find in ways.items()}, runs)


def switch(shown: View, order: dict[str, Any], runs: int) -> list[float]:
    """Seconds until the next round is shown."""
    return [shown.next_round(order, consumed=8 * number)[1] for number in range(runs + 1)][1:]


# -- remote -----------------------------------------------------------------------------------------------------


def remote(folder: Path, runs: int) -> dict[str, list[float]]:
    """Rows a second by name."""
    (folder / "remote").mkdir()
    array = np.random.default_rng(0).integers(0, 256, size=(REMOTE_ROWS, SAMPLE_BYTES), dtype=np.uint8)
    np.save(folder / "remote" / "rows.npy", array)
    found: dict[str, list[float]] = {"tenplexrun": [], "read-ahead": []}
    with server(folder / "remote", LATENCY_S) as url:
        for number in range(runs):
            with view(folder / f"node-remote-{number}") as shown:
                began = time.perf_counter()
                loader = open_loader(
                    f"npy:{url}/rows.npy",
                    global_batch=BATCH,
                    micro_batch=32,
                    seed=1,
                    show=lambda order, shown=shown: str(shown.next_round(order)[0]),
                )
                for _ in range(REMOTE_ROWS // BATCH):
                    batch = loader.next_batch()
                    if not np.array_equal(batch.rows, array[batch.ids]):
                        raise SystemExit("rows that came over HTTP are not the dataset's")
                    loader.commit()
                found["tenplexrun"].append(REMOTE_ROWS / (time.perf_counter() - began))
            found["read-ahead"].append(read_ahead(f"{url}/rows.npy", loader.order))
    return found


def read_ahead(url: str, order: DataOrder) -> float:
    """Rows a second of fsspec's cache, its defaults."""
    with fsspec.open(url, cache_type="readahead") as file:
        header = file.size - REMOTE_ROWS * SAMPLE_BYTES
        began = time.perf_counter()
        for number in order.sample_at(np.arange(READ_AHEAD_ROWS)).tolist():
            file.seek(header + number * SAMPLE_BYTES)
            file.read(SAMPLE_BYTES)
        return READ_AHEAD_ROWS / (time.perf_counter() - began)


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
            found[name] = whole(shown, pictures(folder / name, number, num_bytes), folder / f"copies-{name}", runs)
            found[f"{name}_bytes"] = number * num_bytes
    found["remote"] = remote(folder, min(runs, 3))
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
    print(f"remote, {LATENCY_S * 1e3:.0f} ms a request; rows a second")
    for name, rates in found["remote"].items():
        print(f"  {name:28}  {cell(rates, len(rates))}")
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
    keys = ("rows", "packs", "large", "middle")
    loader, packed, large, middle = ({name: median(each) for name, each in found[key].items()} for key in keys)
    rate = found["steps"] * BATCH / loader["tenplexrun"]
    far = {name: median(rates) for name, rates in found["remote"].items()}
    goals = [
        Goal("loader: numpy's time, times", loader["tenplexrun"] / loader["numpy's gather"], round(1 / 0.7, 3), "×"),
        Goal("loader: 200,000 rows a second of a core / ours", 200_000 / rate, 1.0, ""),
        Goal("packs again: /dev/shm's time, times", packed["again"] / packed["/dev/shm"], round(1 / 0.6, 3), "×"),
        Goal("packs first: 1 GB/s / ours", 1e9 * packed["for the first time"] / found["pack_bytes"], 1.0, ""),
        Goal("files of 4 MiB: /dev/shm's time, times", large["links"] / large["/dev/shm"], round(1 / 0.9, 3), "×"),
        Goal("of 110 KiB: /dev/shm's time, times", middle["paths.txt"] / middle["/dev/shm"], round(1 / 0.9, 3), "×"),
        Goal("next round of 10,000 files", median(found["switch"]), 0.05),
        Goal("remote: 10 × read-ahead's rate / ours", 10 * far["read-ahead"] / far["tenplexrun"], 1.0, ""),
    ]
    return finish("data", goals, found, args.check)


if __name__ == "__main__":
    sys.exit(main())
