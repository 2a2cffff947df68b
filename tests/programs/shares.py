"""Four ranks, uneven shares of each step: are the gradients of DDP, FSDP2 and a pipeline those of one rank?

shares.py RANK STORE ROWS.npy          21 rows of 6 float64
"""

import multiprocessing
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tenplexrun.worker.data import open_loader

WORLD = 4
STEPS = [(0, 11), (11, 7), (18, 7)]  # (consumed, global batch), which changes; the last step has 3 rows only
MICRO_BATCH = 4


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 1, bias=False)).double()


def row_losses(output):
    return output.square().squeeze(1)


def grads(model):
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def one_rank(rows):
    model = build()
    row_losses(model(torch.from_numpy(rows))).mean().backward()
    return grads(model)


def data_parallel(batch, wrap, sync):
    model = build()
    wrapped = wrap(model)
    parts = list(batch.micro_batches())
    for number, (rows, weights) in enumerate(parts):
        sync(wrapped, number == len(parts) - 1)
        (row_losses(wrapped(torch.from_numpy(rows))) * torch.from_numpy(weights)).sum().backward()
    return grads(model)


def fsdp(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def pipeline(batch, mesh, schedule_class):
    """Two stages, two data-parallel ranks each."""
    stage = mesh.get_local_rank("pp")
    part = build()[:1] if stage == 0 else build()[1:]
    pipe = PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())

    def loss(output, weights):
        return (row_losses(output) * weights).sum()

    schedule = schedule_class(pipe, batch.num_micro_batches, loss_fn=loss, scale_grads=False)
    if stage == 0:
        schedule.step(torch.from_numpy(batch.rows))
    else:
        schedule.step(target=torch.from_numpy(batch.weights))
    found = grads(part)
    for grad in found:
        dist.all_reduce(grad, group=mesh["dp"].get_group())
        grad /= 2
    return stage, found


def main(rank, store, path):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    everything, mesh = np.load(path), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def batch_of(dp_rank, dp_size, consumed, batch):
        shape = {"global_batch": batch, "micro_batch": MICRO_BATCH, "seed": 3}
        return open_loader(f"npy:{path}", **shape, dp_rank=dp_rank, dp_size=dp_size, consumed=consumed).next_batch()

    for consumed, size in STEPS:
        expected = one_rank(batch_of(0, 1, consumed, size).rows[: min(size, len(everything) - consumed)])
        own = batch_of(rank, WORLD, consumed, size)
        ddp = data_parallel(
            own, DistributedDataParallel, lambda m, last: setattr(m, "require_backward_grad_sync", last)
        )
        torch.testing.assert_close(ddp, expected)
        sharded = data_parallel(own, fsdp, lambda m, last: m.set_requires_gradient_sync(last))
        torch.testing.assert_close(sharded, expected)
        for schedule in (ScheduleGPipe, Schedule1F1B):
            batch = batch_of(mesh.get_local_rank("dp"), 2, consumed, size)
            if schedule is Schedule1F1B and batch.num_micro_batches < 2:
                continue  # it refuses fewer micro-batches than stages
            stage, staged = pipeline(batch, mesh, schedule)
            torch.testing.assert_close(staged, expected[stage : stage + 1])
    print(rank, "ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # torch is imported once
    ranks = [fork.Process(target=main, args=(rank, *sys.argv[1:])) for rank in range(WORLD)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(abs(each.exitcode) for each in ranks))
