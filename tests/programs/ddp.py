"""A plain DDP script: it knows neither tenplexrun nor a checkpoint. Prints the final loss.

With --stamps FILE every rank appends a line of JSON after its first optimizer step, and after every --stamp-every.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def stamp(path, **fields):
    if path:
        with open(path, "a") as file:
            file.write(json.dumps({"t": time.time(), "rank": dist.get_rank(), "pid": os.getpid(), **fields}) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--stamps")
    parser.add_argument("--stamp-every", type=int, default=1 << 40)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(args.steps):
        x = torch.randn(32, 64, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.stamp_every == 0:
            stamp(args.stamps, step=step)
        if args.pause:
            time.sleep(args.pause)
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"final loss {total.item() / dist.get_world_size():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
