"""A small job with all kinds of state, under `tenplexrun` or, with --plain, without us: saved and loaded by plain DCP.

tenplexrun ... checkpointed.py OUT UNTIL        trains; writes OUT/losses-*.jsonl and, at the end, OUT/full.pt
python checkpointed.py OUT UNTIL --load URL     plain torch: loads a checkpoint, writes OUT/full.pt
python checkpointed.py OUT UNTIL --save URL     plain torch: trains, and saves before the last step; also by torchrun,
                                                --sharded over TENPLEX_TP; --fsdp: another model, by FSDP2 over dp
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tenplexrun

WIDTH = 8


class Net(nn.Module):
    """[rows, WIDTH] → one loss a row. `up` is sharded over tp, `scale` is bfloat16, `seen` a buffer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 12, bias=False)
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        up = self.up.weight
        up = up.to_local() if isinstance(up, DTensor) else up
        return ((x + self.bias) @ up.T).square().sum(1) * self.scale.double().sum()


def build(mesh=None):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    net = Net()
    if mesh is not None:
        whole = distribute_tensor(net.up.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        net.up.weight = nn.Parameter(whole)
    optimizer = torch.optim.AdamW(
        [{"params": [net.up.weight]}, {"params": [net.scale, net.bias], "weight_decay": 0.0}], lr=0.05
    )
    return net, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5, 40], 0.5)


def build_fsdp(mesh):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def step_fsdp(job, net, optimizer, scheduler, batch):
    optimizer.zero_grad()
    rows = net(torch.from_numpy(batch.rows).double() / 256).square().sum(1)
    loss = (rows * torch.from_numpy(batch.weights)).sum()
    loss.backward()
    optimizer.step()
    scheduler.step()
    loss = loss.detach()
    dist.all_reduce(loss, group=job.mesh["dp"].get_group())
    return loss.item() / job.parallel.dp


def nested(net, optimizer):
    return {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}


def save_full(net, optimizer, path):
    """All tensors as whole ones, and the param groups."""
    whole = {}
    for name, tensor in net.state_dict().items():
        whole[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    for name, param in net.named_parameters():
        for key, value in optimizer.state[param].items():
            whole[f"{name}/{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if not dist.is_initialized() or dist.get_rank() == 0:
        tensors = {name: tensor.detach().clone() for name, tensor in whole.items()}
        torch.save({"tensors": tensors, "groups": groups}, path)


def step(job, net, optimizer, scheduler, batch):
    x = torch.from_numpy(batch.rows).double() / 256
    optimizer.zero_grad()
    loss = (net(x) * torch.from_numpy(batch.weights)).sum()
    loss.backward()
    parallel = job.parallel
    loss = loss.detach()[None]
    dist.all_reduce(loss, group=job.mesh["tp"].get_group())
    for param in (net.scale, net.bias):
        grad = param.grad.double()
        dist.all_reduce(grad, group=job.mesh["tp"].get_group())
        param.grad = grad.to(param.dtype)
    grads = [net.up.weight.grad.to_local() if isinstance(net.up.weight.grad, DTensor) else net.up.weight.grad]
    for grad in (loss, *grads, net.bias.grad):
        dist.all_reduce(grad, group=job.mesh["dp"].get_group())
        grad /= parallel.dp
    small = net.scale.grad.double()
    dist.all_reduce(small, group=job.mesh["dp"].get_group())
    net.scale.grad = (small / parallel.dp).to(torch.bfloat16)
    net.seen += int((batch.weights > 0).sum())
    optimizer.step()
    scheduler.step()
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("until", type=int)
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--data", help="(default: OUT/data)")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    job = tenplexrun.init()
    if args.fsdp:
        net, optimizer, scheduler = build_fsdp(job.mesh["dp"])
    else:
        plain = (args.load or args.save) and not args.sharded
        net, optimizer, scheduler = build(None if plain else job.mesh["tp"])
    if args.load:
        state = nested(net, optimizer)
        dcp.load(state, checkpoint_id=args.load)
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
        save_full(net, optimizer, args.out / "full.pt")
        return
    job.state(model=net, optimizer=optimizer, scheduler=scheduler)
    data = args.data or args.out / "data"
    loader = job.loader(f"bytes:{data}?sample_bytes={WIDTH}", global_batch=10, micro_batch=2, seed=args.seed)
    for number, batch in job.steps(loader, until=args.until):
        if args.save and number == args.until - 1:
            progress = {"scheduler": scheduler.state_dict(), "step": number, "consumed": loader.consumed}
            dcp.save({**nested(net, optimizer), **progress}, checkpoint_id=args.save)
        loss = (step_fsdp if args.fsdp else step)(job, net, optimizer, scheduler, batch)
        if job.rank % job.parallel.tp == 0:
            ids = batch.ids[batch.weights > 0].tolist()
            with (args.out / f"losses-{job.round}-{job.coord['dp']}.jsonl").open("a") as file:
                file.write(json.dumps({"step": number, "loss": loss, "ids": ids}) + "\n")
        if args.pause:
            import time

            time.sleep(args.pause)
    save_full(net, optimizer, args.out / "full.pt")


if __name__ == "__main__":
    main()
