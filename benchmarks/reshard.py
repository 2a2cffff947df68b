"""From a snapshot in shared memory to the new workers' tensors, on one host: tp2 → other layouts of a GPT with Adam.

    goal, for each change of the layout (medians)                                         limit
    tenplexrun / DCP's load of the same state, from files in shared memory                1/6
    tenplexrun / DCP's load from its safetensors files there                              1/2
    limit / tenplexrun                                                                    0.7 at least

Measured: from the plan on, the new workers, which run already, fill the tensors that they have. As in a job, the store
has proved every checksum before there was a plan, when the round was gathered ("with the proof of checksums": both
together), the workers have had the pages of the snapshot's files ahead, while their scripts built the model ("nothing
had ahead": without), and a thread unmaps them, which is not counted. DCP: `torch.distributed.checkpoint.load` into the
same tensors as DTensors, gloo, as many processes; it verifies nothing. safetensors: the same with
HuggingFaceStorageReader (left out where safetensors is not installed). limit: two processes that copy the same boxes
with numpy from maps that they have, to warm memory, with nothing parsed and nothing verified ("with new maps": which
they must make first); where it takes more than 1/6 of DCP's time itself, nobody could meet that goal. All take turns.
Every contender's tensors are compared with what was saved, element by element, outside of the time.

    benchmarks/reshard.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import states
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launchers import Goal, cell, finish, median
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import Index, Piece, copies
from tenplexrun.worker.ahead import Source
from tenplexrun.worker.slots import Snapshot

warnings.filterwarnings("ignore", category=FutureWarning)
TP2 = ParallelConfig(tp=2)
CASES = {
    "tp2 → tp4": (ParallelConfig(tp=4), False),
    "tp2 → tp2, the other dim": (TP2, True),
    "tp2 → 1": (ParallelConfig(), False),
    "tp2 → dp2·tp2": (ParallelConfig(dp=2, tp=2), False),
}
Held = dict[str, Any]
Times = dict[str, list[float]]
Note = Callable[[str, float, float], None]


# -- in the workers ---------------------------------------------------------------------------------------------


def begin(held: Held, layout: Layout, config: ParallelConfig, port: int) -> None:
    held.update(layout=layout, place=states.place(config, held["rank"]))
    held["regions"] = states.regions(layout, config, held["rank"])
    held["targets"] = states.targets(held["regions"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=held["rank"], world_size=held["size"])
    mesh = init_device_mesh("cpu", (config.dp, config.tp), mesh_dim_names=("dp", "tp"))
    held["dtensors"] = {}
    for fqn, tensor in held["targets"].items():
        ops = layout.spec(fqn).ops
        placements = [Replicate(), Shard(ops[0].dim) if ops else Replicate()]
        held["dtensors"][fqn] = DTensor.from_local(tensor, mesh, placements, run_check=False)


def set_numbers(held: Held) -> None:
    for fqn, region in held["regions"].items():
        held["targets"][fqn].copy_(states.numbered(fqn, held["layout"].spec(fqn).shape, region))


def verify(held: Held) -> None:
    states.verify(held["layout"], held["regions"], held["targets"])


def have_ahead(held: Held, index: str) -> None:
    source = Source(index, held["place"])
    source.aim(held["layout"])
    source.ahead.wait()
    held["ahead"] = source.end()


def fill(held: Held, index: str) -> int:
    threads = max(1, len(os.sched_getaffinity(0)) // held["size"])
    snapshot = Snapshot(index, held.pop("ahead", None))
    filled, num_bytes = snapshot.fill(held["targets"], held["layout"], held["place"], threads)
    held["done"] = snapshot
    assert filled.keys() == held["targets"].keys()
    return num_bytes


def let_go(held: Held) -> None:
    held.pop("done")


def dcp_save(held: Held, folder: str, safetensors: bool) -> None:
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True) if safetensors else None
    dcp.save(held["dtensors"], storage_writer=writer or dcp.FileSystemWriter(folder))


def dcp_load(held: Held, folder: str, safetensors: bool) -> None:
    reader = dcp.HuggingFaceStorageReader(folder) if safetensors else dcp.FileSystemReader(folder)
    dcp.load(held["dtensors"], storage_reader=reader)


def end(held: Held) -> None:
    dist.destroy_process_group()


# -- in the two processes of the limit ---------------------------------------------------------------------------


def prepare_copies(held: Held, index: str, layout: Layout, config: ParallelConfig) -> None:
    """This process's half of the boxes of all target ranks: (target, file, where in it, shape and box there)."""
    record, folder = Index.from_json(json.loads(Path(index).read_bytes())), Path(index).parent
    by_fqn: dict[str, list[Piece]] = {}
    for piece in record.pieces:
        by_fqn.setdefault(piece.fqn, []).append(piece)
    wanted = [box for rank in range(config.world_size) for box in states.regions(layout, config, rank).items()]
    wanted.sort(key=lambda box: -box[1].num_elements)  # dealt in turn, the halves are alike
    held["copies"] = []
    for fqn, region in wanted[held["rank"] :: held["size"]]:
        target = np.zeros(region.lengths, np.float32)
        for move in copies(region, by_fqn[fqn]):
            held["copies"].append((target[move.dest.slices], move.piece, move.source.slices))
    held["files"] = {piece.file: folder / piece.file for piece in record.pieces}
    held["maps"] = map_files(held)


def map_files(held: Held) -> dict[str, Any]:
    return {name: np.asarray(np.memmap(path, np.uint8, "r")) for name, path in held["files"].items()}


def copy_boxes(held: Held, warm: bool) -> None:
    maps = held["maps"] if warm else map_files(held)
    for target, piece, box in held["copies"]:
        source = maps[piece.file][piece.offset : piece.offset + piece.num_bytes].view(np.float32)
        np.copyto(target, source.reshape(piece.region.lengths)[box])


# -- the benchmark ----------------------------------------------------------------------------------------------


class Saved:
    """One state at tp2: sealed in a store, and saved by DCP in each of its formats."""

    def __init__(self, store: states.Store, folder: Path, num_bytes: int, formats: dict[str, bool]) -> None:
        self.store, self.folder, self.formats, self.num_bytes = store, folder, formats, num_bytes
        layout = states.gpt(num_bytes)
        self._snapshot = states.do(self._seal(layout))
        with states.crew(2) as crew:
            crew.run(begin, layout, TP2, free_port())
            crew.run(set_numbers)
            for name, safetensors in formats.items():
                crew.run(dcp_save, str(folder / name), safetensors)
            crew.run(end)

    async def _seal(self, layout: Layout) -> dict[str, Any]:
        client = await self.store.client()
        opened = await client.open_round(0, layout.to_json(), TP2.to_json(), [0, 1])
        states.fill_slot(opened["slots"][0], layout, TP2, [0, 1])
        snapshot = await client.seal(0, 1, 0, {"step": 1, "consumed": 1})
        await client.commit(0, 1)
        await client.close()
        return snapshot

    def prove(self) -> tuple[float, float, str]:
        """Seconds to verify all checksums, processor seconds of the store meanwhile; the snapshot's index."""

        async def ask() -> tuple[float, float, str]:
            client = await self.store.client()
            began, cpu = time.monotonic(), self.store.processor_s()
            (holding,) = await client.inventory()
            index = await client.index(self._snapshot)
            seconds, cpu = time.monotonic() - began, self.store.processor_s() - cpu
            await client.close()
            assert not holding["except"], holding
            return seconds, cpu, index

        return states.do(ask())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def measure(
    saved: Saved, config: ParallelConfig, across: bool, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall-clock and processor seconds by contender."""
    layout = states.gpt(saved.num_bytes, across)
    seconds: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}

    def note(name: str, value: float, cpu: float) -> None:
        seconds.setdefault(name, []).append(value)
        processor.setdefault(name, []).append(cpu)

    with states.crew(config.world_size) as workers, states.crew(2) as pair:
        workers.run(begin, layout, config, free_port())
        _, _, index = saved.prove()
        pair.run(prepare_copies, index, layout, config)
        pair.run(copy_boxes, True)

        def ours(keep: Note) -> None:
            proof, proof_cpu, index = saved.prove()
            workers.run(have_ahead, index)
            filled, cpu = workers.run(fill, index)[0], workers.cpu
            keep("tenplexrun", filled, cpu)
            keep("· with the proof of checksums", proof + filled, proof_cpu + cpu)
            workers.run(let_go)
            keep("· nothing had ahead", workers.run(fill, index)[0], workers.cpu)
            workers.run(let_go)

        def peer(keep: Note, name: str) -> None:
            keep(name, workers.run(dcp_load, str(saved.folder / name), saved.formats[name])[0], workers.cpu)

        contenders: list[Callable[[Note], None]] = [ours]
        contenders += [lambda keep, name=name: peer(keep, name) for name in saved.formats]
        for run in contenders:  # warms each, and proves what it has read
            run(lambda *_: None)
            workers.run(verify)
        for number in range(rounds):
            for run in contenders[number % 2 :: 1] + contenders[: number % 2]:
                run(note)
            note("limit", pair.run(copy_boxes, True)[0], pair.cpu)
            note("· with new maps", pair.run(copy_boxes, False)[0], pair.cpu)
        workers.run(end)
    return seconds, processor


def goals_of(case: str, seconds: dict[str, list[float]]) -> list[Goal]:
    ours, limit = median(seconds["tenplexrun"]), median(seconds["limit"])
    goals = []
    for name, most in (("DCP", 1 / 6), ("safetensors", 1 / 2)):
        if name in seconds:
            goals.append(Goal(f"{case}: as a part of {name}'s", ours / median(seconds[name]), round(most, 4), "×"))
    goals.append(Goal(f"{case}: limit's time for copying, times", ours / limit, round(1 / 0.7, 3), "×"))
    return goals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: 256 MiB, fewer runs")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", type=int, help="one case, by number")
    args = parser.parse_args()
    num_bytes, rounds = (states.GIB // 4, 3) if args.quick else (states.GIB, max(3, args.runs))
    formats = {"DCP": False}
    if importlib.util.find_spec("safetensors"):
        formats["safetensors"] = True
    else:
        print("safetensors is not installed: its column is left out")
    goals, data, processor = [], {}, {}
    with states.shared_folder(5 * num_bytes) as folder, states.store(folder / "node") as store:
        saved = Saved(store, folder, num_bytes, formats)
        chosen = list(CASES.items()) if args.only is None else [list(CASES.items())[args.only]]
        for case, (config, across) in chosen:
            data[case], processor[case] = measure(saved, config, across, rounds)
            goals += goals_of(case, data[case])
    print(f"{states.gpt(num_bytes).num_bytes / states.GIB:.2f} GiB at tp2 in shared memory → new workers, seconds\n")
    print(f"{'':32}  {'processor':>9}  {'median':>8}   {'least … most'}")
    for case, seconds in data.items():
        print(case)
        for name, values in seconds.items():
            print(f"  {name:30}  {median(processor[case][name]):9.3f}  {cell(values, rounds)}")
    return finish("reshard", goals, {"seconds": data, "processor_seconds": processor, "bytes": num_bytes}, args.check)


if __name__ == "__main__":
    sys.exit(main())
