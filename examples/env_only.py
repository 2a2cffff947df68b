"""A script that knows nothing of tenplexrun: it reads environment variables and plain files, as under torchrun.

tenplexrun --nproc-per-node 2 --data 'bytes:/usr/lib?sample_bytes=64' --global-batch 8 examples/env_only.py
torchrun --nproc-per-node 2 examples/env_only.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 5


def my_batches(directory: str):
    """This dp rank's batches, one a step: bytes [rows, bytes of a sample], from the packed files of the view."""
    home = Path(directory)
    index = json.loads((home / "index.json").read_text())
    sample_bytes = torch.Size(index["samples"]["shape"]).numel()
    packs = [(home / name).open("rb") for name in (home / "list.txt").read_text().split()]
    for rows in map(int, (home / "batch-sizes.txt").read_text().split()):
        data = b""
        while packs and len(data) < rows * sample_bytes:
            part = packs[0].read(rows * sample_bytes - len(data))
            data += part
            if not part:
                packs.pop(0)
        yield torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, sample_bytes)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = " ".join(f"{axis.lower()}={os.environ.get(f'TENPLEX_{axis}', '1')}" for axis in ("PP", "DP", "CP", "TP"))
    print(f"rank {rank} of {world_size}, round {os.environ.get('TENPLEX_ROUND', '0')}, mesh {mesh}", flush=True)
    directory = os.environ.get("TENPLEX_DATA_DIR")
    batches = my_batches(directory) if directory else iter([torch.full((1, 1), rank + 1)] * STEPS)
    for step, batch in zip(range(STEPS), batches, strict=False):
        total = batch.sum(dtype=torch.int64)
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} sum over all ranks {int(total)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
