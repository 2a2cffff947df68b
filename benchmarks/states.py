"""What the benchmarks of moving state share: a GPT with Adam's moments in float32, processes that hold its parts, and
stores that hold snapshots of it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region
from tenplexrun.store.client import StoreClient
from tenplexrun.worker.launch import Place

torch.set_num_threads(1)  # forked processes must not inherit a pool
T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
MIB, GIB = 1 << 20, 1 << 30
CPU = torch.device("cpu")
DEADLINE_S = 120.0


def gpt(num_bytes: int, across: bool = False) -> Layout:
    """About `num_bytes` of parameters and two moments, in layers of width 1024 (512 below 512 MiB) over tp.

    Embedding, QKV and the MLP's first layer are cut along dim 0, the projections back along dim 1; `across`: each the
    other way.
    """
    width = 1024 if num_bytes >= GIB // 2 else 512
    layers = num_bytes * 5 // 6 // 12 // (12 * width * width)
    vocab = (num_bytes // 12 - layers * 12 * width * width) // width // 64 * 64
    specs = [_spec("embed.weight", (vocab, width), 0, across)]
    for layer in range(layers):
        name = f"layers.{layer}"
        for part, shape, dim in (
            ("qkv", (3 * width, width), 0),
            ("out", (width, width), 1),
            ("up", (4 * width, width), 0),
            ("down", (width, 4 * width), 1),
        ):
            specs.append(_spec(f"{name}.{part}.weight", shape, dim, across))
            specs.append(_spec(f"{name}.{part}.bias", shape[:1], 0 if dim == 0 else None, False))
        specs += [_spec(f"{name}.norm{n}.{part}", (width,), None, False) for n in (1, 2) for part in ("weight", "bias")]
    moments = [
        TensorSpec(f"{spec.fqn}.{kind}", spec.shape, spec.dtype, spec.ops)
        for kind in ("exp_avg", "exp_avg_sq")
        for spec in specs
    ]
    return Layout((*specs, *moments))


def _spec(fqn: str, shape: tuple[int, ...], dim: int | None, across: bool) -> TensorSpec:
    ops = () if dim is None else (Shard(1 - dim if across else dim, "tp"),)
    return TensorSpec(fqn, shape, "float32", ops)


def place(config: ParallelConfig, rank: int) -> Place:
    return Place(config, config.coord(rank), CPU)


def regions(layout: Layout, config: ParallelConfig, rank: int) -> dict[str, Region]:
    """The one region of each tensor that a rank holds."""
    return {fqn: region for fqn, (region,) in layout.regions_of(config, rank).items()}


def targets(held: dict[str, Region]) -> Tensors:
    """Tensors to fill, whose pages exist."""
    return {fqn: torch.zeros(region.lengths) for fqn, region in held.items()}


def numbered(fqn: str, shape: Sequence[int], region: Region) -> torch.Tensor:
    """A part of the tensor whose values are its own indices, modulo 2^23, plus a number of its name."""
    index = torch.full((), zlib.crc32(fqn.encode()) % 1000, dtype=torch.int32)
    for offset, length, width in zip(region.offsets, region.lengths, shape, strict=True):
        index = (index * width).unsqueeze(-1) + torch.arange(offset, offset + length, dtype=torch.int32)
    return (index & 0x7FFFFF).to(torch.float32)


def verify(layout: Layout, held: dict[str, Region], tensors: Tensors) -> None:
    """Raises SystemExit unless every element is there; zeroes the tensors for the next time."""
    for fqn, region in held.items():
        if not torch.equal(tensors[fqn], numbered(fqn, layout.spec(fqn).shape, region)):
            raise SystemExit(f"{fqn} {region} is not what was saved")
        tensors[fqn].zero_()


class Crew:
    """Processes forked from this one. Each has a dict `held`; `run` calls a function with it in all of them at once."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs, rank, size), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> tuple[float, list[Any]]:
        """Seconds from the order to the last one's end, and all results. Raises SystemExit where one has failed.

        `cpu`: what all of them took together, processor seconds.
        """
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [pipe.recv() for pipe in self._pipes]
        for problem in (answer for ended, _, answer in answers if ended is None):
            raise SystemExit(f"a process of the benchmark failed: {problem}")
        self.cpu = sum(cpu for _, cpu, _ in answers)
        return max(ended for ended, _, _ in answers) - began, [answer for _, _, answer in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with suppress(OSError):
                pipe.send(None)  # closing would not do: later processes have inherited this end
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def crew(size: int) -> Iterator[Crew]:
    made = Crew(size)
    try:
        yield made
    finally:
        made.close()


def _member(pipe: Any, rank: int, size: int) -> None:
    held: dict[str, Any] = {"rank": rank, "size": size}
    while True:
        order = pipe.recv()
        if order is None:
            os._exit(0)
        function, args = order
        cpu = time.process_time()
        try:
            result = function(held, *args)
            pipe.send((time.monotonic(), time.process_time() - cpu, result))
        except BaseException as error:
            pipe.send((None, 0.0, repr(error)))


class Store:
    """A store process in `folder`; `prefix`: words before its command."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True)
        (folder / "token").write_text("secret\n")
        files = {"token_file": str(folder / "token"), "socket": str(folder / "store.sock")}
        config = json.dumps({"dir": str(folder), "host": host, **files})
        argv = [*prefix, sys.executable, "-m", "tenplexrun.store.server", config]
        self.process = subprocess.Popen(argv, cwd="/")
        self._host, self._socket = host, files["socket"]

    async def client(self) -> StoreClient:
        client = StoreClient(self._socket)
        self.address = f"{self._host}:{await client.hello()}"
        return client

    def processor_s(self) -> float:
        """What the process has used so far, to 1/100 s."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def store(folder: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[Store]:
    made = Store(folder, host, prefix)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@contextmanager
def shared_folder(needed: int) -> Iterator[Path]:
    """A folder in shared memory, removed at the end. Raises SystemExit where there is not as much as `needed`."""
    free = shutil.disk_usage("/dev/shm").free
    if free < needed:
        raise SystemExit(f"/dev/shm has {free >> 20} MiB free, this needs {needed >> 20}; use --quick, or enlarge it")
    folder = Path(tempfile.mkdtemp(prefix="tenplexrun-bench-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def do(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def fill_slot(path: str, layout: Layout, config: ParallelConfig, ranks: Sequence[int]) -> None:
    """What workers of these ranks write into a slot of their node's arena."""
    from tenplexrun.core.arena import arena_map
    from tenplexrun.worker.slots import SlotWriter

    arena = arena_map(layout, config, ranks)
    for rank in ranks:
        held = regions(layout, config, rank)
        tensors = {fqn: numbered(fqn, layout.spec(fqn).shape, region) for fqn, region in held.items()}
        SlotWriter([path], arena, layout, place(config, rank)).write(0, tensors)
