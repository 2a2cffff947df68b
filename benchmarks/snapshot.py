"""How long a script stands still for a snapshot: only until its tensors have been copied. 256 MiB on one rank.

    goal                                                       limit
    tenplexrun / memcpy of the same bytes, medians             1.25
    tenplexrun / torch's best stager, medians                  1

Measured: `State.read` and `SlotWriter.write`, which is all that the boundary of a step waits for; sealing (checksums,
index) is the store's, while training goes on. A model of linear layers with AdamW, float32. torch: the stagers of
`torch.distributed.checkpoint.staging` with buffers that are kept and, where the CPU has that, shared or pinned. memcpy:
one numpy copy of as many bytes; "tensor by tensor": of the same tensors to warm memory, one after another. A copy of
many MB is written around the caches, one of a few MB is not, and so moves a half more between memory and processor:
that is out of our hands. All take turns, and each has run before.

    benchmarks/snapshot.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import states
import torch
from launchers import Goal, cell, finish, median
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from tenplexrun.core.arena import arena_map
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import Claim
from tenplexrun.store.arena import Arena
from tenplexrun.worker.slots import SlotWriter
from tenplexrun.worker.state import State

RANK_BYTES = 256 * states.MIB
ONE = ParallelConfig()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers like a GPT's, and an optimizer that has made a step: its moments exist."""
    width, blocks = 512, RANK_BYTES // 12 // (12 * 512 * 512)
    layers = [
        nn.ModuleDict(
            {
                "norm1": nn.LayerNorm(width),
                "qkv": nn.Linear(width, 3 * width),
                "out": nn.Linear(width, width),
                "norm2": nn.LayerNorm(width),
                "up": nn.Linear(width, 4 * width),
                "down": nn.Linear(4 * width, width),
            }
        )
        for _ in range(blocks)
    ]
    model = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def stagers(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """torch's that run here, and why others do not."""
    made: dict[str, Callable[[], Any]] = {
        "DefaultStager": lambda: DefaultStager(StagingOptions(False, False, False, False)),
        "DefaultStager, shared": lambda: DefaultStager(StagingOptions(False, True, False, False)),
        "DefaultStager, pinned": lambda: DefaultStager(StagingOptions(True, False, False, False)),
        "BlockingAsyncStager": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
    }
    able, unable = {}, {}
    for name, make in made.items():
        try:
            stager = make()
            stager.stage(tensors)
            able[name] = lambda stager=stager: stager.stage(tensors)
        except (RuntimeError, AssertionError) as error:
            unable[name] = str(error).splitlines()[0]
    return able, unable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer runs")
    parser.add_argument("--runs", type=int, default=40)
    args = parser.parse_args()
    runs = 10 if args.quick else max(5, args.runs)
    place = states.place(ONE, 0)
    model, optimizer = build()
    state = State(model, optimizer, None, None, {}, place)
    layout, tensors = state.layout(), state.read()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    threads = len(os.sched_getaffinity(0))
    with states.shared_folder(3 * num_bytes) as folder:
        arena = Arena.open(folder / "arena")
        slots = [str(path) for path in arena.open_round(0, layout, Claim(ONE, (0,)))]
        writer = SlotWriter(slots, arena_map(layout, ONE, (0,)), layout, place, threads)
        source, copy = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        pairs = [(np.ones_like(tensor.numpy()), tensor.numpy()) for tensor in tensors.values()]
        turn = iter(range(1 << 30))
        able, unable = stagers(tensors)
        contenders: dict[str, Callable[[], Any]] = {
            "tenplexrun": lambda: writer.write(next(turn) % 2, state.read()),
            "memcpy": lambda: np.copyto(copy, source),
            "· tensor by tensor": lambda: [np.copyto(*pair) for pair in pairs],
            **able,
        }
        seconds = interleaved(contenders, runs)
        check(arena, tensors)
    print(f"{num_bytes / states.MIB:.0f} MiB in {len(tensors)} tensors of one rank, seconds\n")
    print(f"{'':26}  {'median':>8}   {'least … most'}")
    for name, values in seconds.items():
        print(f"{name:26}  {cell(values, runs)}")
    for name, reason in unable.items():
        print(f"{name:26}  not here: {reason}")
    ours = median(seconds["tenplexrun"])
    best = min(median(seconds[name]) for name in able)
    goals = [
        Goal("as a part of memcpy's", ours / median(seconds["memcpy"]), 1.25, "×"),
        Goal("as a part of torch's best stager's", ours / best, 1.0, "×"),
    ]
    return finish("snapshot", goals, {"seconds": seconds, "bytes": num_bytes, "unable": unable}, args.check)


def interleaved(contenders: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-2, runs):  # both slots once before it counts
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def check(arena: Arena, tensors: dict[str, torch.Tensor]) -> None:
    """Raises SystemExit unless both slots hold the tensors."""
    for slot in range(2):
        snapshot = arena.seal(0, slot + 1, slot, None)
        for piece in arena.get(snapshot).pieces:
            data = arena.file(piece.file).view[piece.offset : piece.offset + piece.num_bytes]
            if bytes(data) != tensors[piece.fqn].numpy().tobytes():
                raise SystemExit(f"{piece.fqn} in slot {slot} is not what was written")


if __name__ == "__main__":
    sys.exit(main())
