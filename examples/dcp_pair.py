"""Code written for torch.distributed.checkpoint, with its storage changed to the job's memory. FSDP2 over TP, AdamW.

tenplexrun ... dcp_pair.py OUT UNTIL [--pause S]     each step's loss goes to OUT/losses.jsonl
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tenplexrun

WIDTH = 16
ROWS = 24  # of all ranks together


def build(mesh):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)).double()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("until", type=int)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    tensor = int(os.environ.get("TENPLEX_TP", "1"))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    model, optimizer = build(mesh)
    own, optim = get_state_dict(model, optimizer)
    state = {"model": own, "optim": optim, "step": 0, "name": ("pair", None)}
    reader = tenplexrun.StorageReader()
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert state["name"] == ("pair", None)
        assert state["step"] == reader.step
    writer = tenplexrun.StorageWriter()
    share = ROWS // mesh["data"].size()
    first = mesh["data"].get_local_rank() * share
    for step in range(state["step"], args.until):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = rows[first : first + share]
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach(), group=mesh["data"].get_group())
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim, "step": step + 1, "name": ("pair", None)}, storage_writer=writer)
        if dist.get_rank() == 0:
            with (args.out / "losses.jsonl").open("a") as file:
                record = {"step": step, "loss": loss.item() / mesh["data"].size(), "world": dist.get_world_size()}
                file.write(json.dumps(record) + "\n")
        time.sleep(args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
