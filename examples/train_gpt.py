"""A byte-level GPT on the source of Python's standard library, with tensor, pipeline and data parallelism.

    tenplexrun --nproc-per-node 4 --tp 2 examples/train_gpt.py       goes on, from memory, when workers or nodes are
                                                                     lost or added, or the parallelism is changed
    TENPLEX_TP=2 torchrun --nproc-per-node 4 examples/train_gpt.py   the same training, without that
    python examples/train_gpt.py                                     and in one process

It computes in float64 and without dropout: each step's loss is the same up to rounding, whatever the parallelism.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tenplexrun

VOCABULARY = 256


class Block(nn.Module):
    """One transformer layer. No biases: the true gradient of a key's is zero, AdamW would follow its rounding noise."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        # rows ordered (head, q/k/v, channel): a shard of dim 0 is whole heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, seq, dim] → the same."""
        rows, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, seq, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [rows, local heads, seq, head_dim]
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, seq, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """One pipeline stage: the layers of `items`, named by their global numbers; embeddings first, head last."""

    def __init__(self, args: argparse.Namespace, items: range) -> None:
        super().__init__()
        if 0 in items:
            self.token = nn.Embedding(VOCABULARY, args.dim)
            self.position = nn.Embedding(args.seq_len, args.dim)
        self.layers = nn.ModuleDict({str(item): Block(args.dim, args.heads) for item in items})
        if args.layers - 1 in items:
            self.norm = nn.LayerNorm(args.dim, bias=False)
            self.head = nn.Linear(args.dim, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Bytes [rows, seq] or activations [rows, seq, dim] → activations or logits [rows, seq, 256]."""
        if hasattr(self, "token"):
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def build(args: argparse.Namespace, job: tenplexrun.Job, items: range) -> GPT:
    """The stage with its matrices sharded over tp. A weight's first value depends on its name alone."""
    model = GPT(args, items).to(job.device)
    for fqn, weight in model.named_parameters():
        if weight.dim() > 1:
            digest = hashlib.blake2b(f"{args.seed}/{fqn}".encode(), digest_size=7).digest()
            generator = torch.Generator(job.device).manual_seed(int.from_bytes(digest, "big"))
            nn.init.normal_(weight, std=0.02, generator=generator)
    plan = {
        "layers.*.qkv": ColwiseParallel(),
        "layers.*.out": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }
    if hasattr(model, "head"):
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, job.mesh["tp"], plan, src_data_rank=None)
    return model


def weighted_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`target` [rows, seq + 1]: the next bytes and, last, the row's weight. A sum over rows: see `average_over_dp`."""
    losses = F.cross_entropy(logits.flatten(0, 1), target[:, :-1].long().flatten(), reduction="none")
    return (losses.view(len(logits), -1).mean(1) * target[:, -1]).sum()


def make_schedules(args: argparse.Namespace, job: tenplexrun.Job, model: GPT):
    """A pipeline schedule for each number of micro-batches: an epoch's last step may have fewer."""
    stage, num_stages = job.coord["pp"], job.parallel.pp
    shape = (args.micro_batch, args.seq_len)
    # the shapes that stages exchange, so that they need not be sent at the start
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(*shape, args.dim, device="meta", requires_grad=True)
    logits = torch.empty(*shape, VOCABULARY, device="meta", requires_grad=True)

    @functools.cache
    def schedule(num_micro_batches: int) -> ScheduleGPipe:
        pipeline = PipelineStage(
            model,
            stage,
            num_stages,
            job.device,
            input_args=tokens if stage == 0 else hidden,
            output_args=logits if stage == num_stages - 1 else hidden,
            group=job.mesh["pp"].get_group(),
        )
        return ScheduleGPipe(pipeline, num_micro_batches, loss_fn=weighted_loss, scale_grads=False)

    return schedule


def average_over_dp(job: tenplexrun.Job, model: GPT, losses: list[torch.Tensor]) -> float:
    """One all-reduce of all gradients and the loss. A step's weights sum to dp: the mean over dp is the true mean."""
    grads = [weight.grad for weight in model.parameters()]
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    loss = sum(losses, torch.zeros((), device=job.device)).detach()
    flat = torch.cat([*(grad.flatten() for grad in grads), loss.view(1)])
    dist.all_reduce(flat, group=job.mesh["dp"].get_group())
    flat /= job.parallel.dp
    for grad, mean in zip(grads, flat[:-1].split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
    return float(flat[-1])


def train(args: argparse.Namespace, job: tenplexrun.Job) -> None:
    torch.manual_seed(args.seed)
    stages = tenplexrun.Stages("layers.{}.", args.layers, first=("token", "position"), last=("norm", "head"))
    model = build(args, job, stages.items_of(job.coord["pp"], job.parallel.pp))
    matrices = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    others = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps, eta_min=args.lr / 10)
    schedule = make_schedules(args, job, model)

    job.state(model=model, optimizer=optimizer, scheduler=scheduler, stages=stages)
    source = f"bytes:{args.source}?glob=**/*.py&exclude=*site-packages/*"
    loader = job.loader(
        f"{source}&sample_bytes={args.seq_len + 1}",
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        seed=args.seed,
    )
    first, last = job.coord["pp"] == 0, job.coord["pp"] == job.parallel.pp - 1
    metrics = Metrics(args, job) if last and job.coord["tp"] == 0 else None
    moments_to_drop = job.round == args.drop_moments_at_round

    for step, batch in job.steps(loader, until=args.steps):
        if moments_to_drop:
            moments_to_drop = False
            for moments in optimizer.state.values():
                moments["exp_avg"].zero_()
                moments["exp_avg_sq"].zero_()
        rows = torch.from_numpy(batch.rows).to(job.device, torch.int64)  # [rows, seq + 1]
        weights = torch.from_numpy(batch.weights).to(job.device)
        target = torch.cat([rows[:, 1:].double(), weights[:, None]], dim=1) if last else None
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule(batch.num_micro_batches).step(
            *([rows[:, :-1]] if first else []), target=target, losses=losses, return_outputs=False
        )
        loss = average_over_dp(job, model, losses)
        optimizer.step()
        scheduler.step()
        if metrics:
            metrics.write(step, loss, batch.ids[batch.weights > 0].tolist())
        time.sleep(args.pause)


class Metrics:
    """A line of JSON a step, in a file for each round and dp rank."""

    def __init__(self, args: argparse.Namespace, job: tenplexrun.Job) -> None:
        self.round, self.dp_rank, self.path = job.round, job.coord["dp"], None
        if args.metrics_dir:
            args.metrics_dir.mkdir(parents=True, exist_ok=True)
            self.path = args.metrics_dir / f"round-{job.round:03d}-dp{self.dp_rank:03d}.jsonl"

    def write(self, step: int, loss: float, ids: list[int]) -> None:
        if self.dp_rank == 0:
            print(f"round {self.round} step {step} loss {loss:.6f}", flush=True)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "round": self.round, "loss": loss, "ids": ids}) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 100, "layers": 2, "heads": 4, "dim": 64, "seq_len": 64, "global_batch": 16, "micro_batch": 8}
    for name, value in {**sizes, "seed": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"(default {value})")
    parser.add_argument("--lr", type=float, default=1e-3, help="(default 0.001)")
    library = sysconfig.get_paths()["stdlib"]
    parser.add_argument("--source", default=library, help="folder whose *.py it learns (default: that of Python)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="seconds to sleep after each step")
    parser.add_argument("--metrics-dir", type=Path, help="write loss and sample ids of every step there")
    parser.add_argument("--drop-moments-at-round", type=int, help="forget AdamW's moments there: the loss must differ")
    return parser.parse_args()


def refuse(job: tenplexrun.Job, problem: str) -> None:
    """One line, from one rank, on behalf of all; then leave."""
    if job.rank == 0:
        print(f"train_gpt.py: {problem}", file=sys.stderr, flush=True)
    dist.barrier()
    sys.exit(2)


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    job = tenplexrun.init()
    pp, tp = job.parallel.pp, job.parallel.tp
    if args.dim % args.heads or args.heads % tp:
        refuse(job, f"--heads {args.heads} must divide --dim {args.dim} and be a multiple of tp={tp}: change one")
    if args.layers % pp:
        refuse(job, f"--layers {args.layers} cannot be cut into pp={pp} equal stages: make it a multiple of {pp}")
    train(args, job)


if __name__ == "__main__":
    main(parse())
