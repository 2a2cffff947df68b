"""A script that knows nothing of tenplexrun and keeps its state in files of its own, in $TENPLEX_STATE_DIR.

tenplexrun --nnodes 2 --nproc-per-node 1 --state-files 16M examples/plain_files.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
PAUSE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


def newest(home: Path) -> int:
    """The step to go on from: that of the folder step-N that was there at the start; 0 if there is none."""
    return max((int(folder.name.removeprefix("step-")) for folder in home.glob("step-*")), default=0)


def save(home: Path, step: int, state: dict) -> None:
    """Every rank, the same steps. It counts once it is renamed; tenplexrun removes older ones."""
    folder = home / f"step-{step}.tmp"
    folder.mkdir()
    torch.save(state, folder / "state.pt")
    folder.rename(home / f"step-{step}")


def main() -> None:
    dist.init_process_group("gloo")
    rank, home = dist.get_rank(), Path(os.environ["TENPLEX_STATE_DIR"])
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    begin = newest(home)
    if begin:
        state = torch.load(home / f"step-{begin}" / "state.pt", weights_only=True)
        assert (state["rank"], state["step"]) == (rank, begin), "somebody else's files"
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    print(f"rank {rank} begins at step {begin}", flush=True)
    for step in range(begin, STEPS):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(PAUSE_S)
        weights, moments = model.state_dict(), optimizer.state_dict()
        save(home, step + 1, {"rank": rank, "step": step + 1, "model": weights, "optimizer": moments})
        print(f"rank {rank} step {step} loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
