"""Data parallel training in which one replica goes its own way: from step --drift on dp rank 1 has another weight."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import tenplexrun


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--drift", type=int, default=1 << 40)
    args = parser.parse_args()
    job = tenplexrun.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    job.state(model=model, optimizer=optimizer)
    loader = job.loader(f"bytes:{__file__}?sample_bytes=16", global_batch=16, micro_batch=8)
    for step, batch in job.steps(loader, until=args.steps):
        model(torch.from_numpy(batch.rows) / 256).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        if step == args.drift and job.coord["dp"] == 1:
            with torch.no_grad():
                model[2].weight[0, 3] += 1e-3
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
