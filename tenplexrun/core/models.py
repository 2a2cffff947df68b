"""Well-known models with Adam as Megatron-Core lays them out, for planning without a job.

Parameters are bfloat16; the optimizer has a float32 master copy and two moments of each, sharded like the parameter.
Sizes are those of the papers' and the published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tenplexrun.core.layout import Layout, Op, Order, Pad, Shard, Stage, TensorSpec
from tenplexrun.errors import LayoutError

OPTIMIZER = ("master", "exp_avg", "exp_avg_sq")
VOCAB_MULTIPLE = 128
"""Megatron's `--make-vocab-size-divisible-by`; times tp."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder. `groups`: key-value heads; `ffn`: width of the (each expert's) inner layer; `gated`: SwiGLU.

    `bias`: linear layers and norms have one, and positions are learnt. `experts`: 0 is a dense model.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    gated: bool = True
    bias: bool = False
    tied: bool = False
    positions: int = 0
    experts: int = 0


SIZES: Mapping[str, Transformer] = {
    "gpt3-175b": Transformer(96, 12288, 49152, 96, 96, 50257, gated=False, bias=True, tied=True, positions=2048),
    "llama3-70b": Transformer(80, 8192, 28672, 64, 8, 128256),
    "mixtral-8x7b": Transformer(32, 4096, 14336, 32, 8, 32000, experts=8),
}


def layout(name: str) -> Layout:
    """The whole state of a model of `SIZES`. Raises LayoutError for another name."""
    if name not in SIZES:
        raise LayoutError(f"no model is called {name!r}; use one of {', '.join(SIZES)}, or a layout's JSON file")
    return with_adam(parameters(SIZES[name]))


def with_adam(params: list[TensorSpec]) -> Layout:
    """Parameters, their optimizer state, and the step."""
    specs = list(params)
    for kind in OPTIMIZER:
        specs += [replace(spec, fqn=f"optim.{spec.fqn}.{kind}", dtype="float32", aliases=()) for spec in params]
    return Layout((*specs, TensorSpec("optim.step", (), "int64")))


def parameters(model: Transformer) -> list[TensorSpec]:
    """The parameters of a model, in model order."""
    hidden, last = model.hidden, Stage(model.layers - 1, model.layers)
    first = Stage(0, model.layers)
    rows: tuple[Op, ...] = (Pad(0, VOCAB_MULTIPLE, ("tp",)), Shard(0, "tp", "even"))
    embed = TensorSpec("model.embed.weight", (model.vocab, hidden), "bfloat16", rows, first)
    specs = [replace(embed, copies=(last,), aliases=("model.head.weight",)) if model.tied else embed]
    if model.positions:
        specs.append(TensorSpec("model.positions.weight", (model.positions, hidden), "bfloat16", (), first))
    for layer in range(model.layers):
        specs += _layer(model, f"model.layers.{layer}", Stage(layer, model.layers))
    specs += _norm(model, "model.norm", last)
    if not model.tied:
        specs.append(TensorSpec("model.head.weight", (model.vocab, hidden), "bfloat16", rows, last))
    return specs


def _layer(model: Transformer, name: str, stage: Stage) -> list[TensorSpec]:
    hidden, head = model.hidden, model.hidden // model.heads
    parts = (model.heads * head, model.groups * head, model.groups * head)
    tp = Shard(0, "tp", "even")
    qkv: tuple[Op, ...] = (Order(0, model.groups, parts), tp)
    specs = [
        *_norm(model, f"{name}.norm1", stage),
        *_linear(model, f"{name}.attention.qkv", (sum(parts), hidden), qkv, qkv, stage),
        *_linear(model, f"{name}.attention.out", (hidden, hidden), (Shard(1, "tp", "even"),), (), stage),
        *_norm(model, f"{name}.norm2", stage),
    ]
    inner = model.ffn * (2 if model.gated else 1)
    segs = (1, 1) if model.gated else ()
    if not model.experts:
        up: tuple[Op, ...] = (replace(tp, segs=segs),)
        return [
            *specs,
            *_linear(model, f"{name}.mlp.up", (inner, hidden), up, up, stage),
            *_linear(model, f"{name}.mlp.down", (hidden, model.ffn), (Shard(1, "tp", "even"),), (), stage),
        ]
    ep = Shard(0, "ep", "even")
    up, down = (ep, Shard(1, "etp", "even", segs)), (ep, Shard(2, "etp", "even"))
    return [
        *specs,
        TensorSpec(f"{name}.router.weight", (model.experts, hidden), "bfloat16", (), stage),
        TensorSpec(f"{name}.experts.up", (model.experts, inner, hidden), "bfloat16", up, stage),
        TensorSpec(f"{name}.experts.down", (model.experts, hidden, model.ffn), "bfloat16", down, stage),
    ]


def _norm(model: Transformer, name: str, stage: Stage) -> list[TensorSpec]:
    kinds = ("weight", "bias") if model.bias else ("weight",)
    return [TensorSpec(f"{name}.{kind}", (model.hidden,), "bfloat16", (), stage) for kind in kinds]


def _linear(
    model: Transformer, name: str, shape: tuple[int, int], ops: tuple[Op, ...], bias: tuple[Op, ...], stage: Stage
) -> list[TensorSpec]:
    weight = TensorSpec(f"{name}.weight", shape, "bfloat16", ops, stage)
    return [weight, TensorSpec(f"{name}.bias", shape[:1], "bfloat16", bias, stage)] if model.bias else [weight]
