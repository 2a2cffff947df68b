"""A state that was saved and put back trains bit by bit as one that was never touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, OneCycleLR, SequentialLR

from tenplexrun.core.parallel import AXES, ParallelConfig
from tenplexrun.core.values import decode
from tenplexrun.errors import LayoutError, UsageError
from tenplexrun.worker.launch import Launch, Place, parallel_from_env
from tenplexrun.worker.state import State
from tenplexrun.worker.streams import Streams

CPU = torch.device("cpu")
ALONE = Place(ParallelConfig(), dict.fromkeys(AXES, 0), CPU)
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


class Net(nn.Module):
    """`late` sees its first gradient in step 2: until then it has no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
        self.late = nn.Parameter(torch.ones(4))
        self.tied = self.body[0]

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y = self.body(x)
        return (y * self.late if step >= 2 else y).square().sum()


def make(optimizer: str, schedule: Callable[..., Any] | None = None) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, schedule(made) if schedule else None


def run(job: tuple[Net, torch.optim.Optimizer, Any], steps: range) -> list[float]:
    model, optimizer, scheduler = job
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randn(6, 4), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def declare(job: tuple[Net, torch.optim.Optimizer, Any]) -> State:
    return State(job[0], job[1], job[2], None, {}, ALONE)


def carry_over(source: State, target: State) -> None:
    """What a snapshot and a restore do, without files."""
    assert source.layout() == target.layout()
    taken = {fqn: tensor.clone() for fqn, tensor in source.read().items()}
    filled = target.blank()
    assert filled.keys() == taken.keys()
    with torch.no_grad():
        for fqn, tensor in filled.items():
            tensor.copy_(taken[fqn])
    target.adopt(filled, source.values())
    assert target.adopt_streams(filled, 1, 1) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_declaring_changes_nothing(name: str) -> None:
    plain, watched = make(name), make(name)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    state = declare(watched)
    state.layout()
    state.read()
    assert torch.equal(torch.get_rng_state(), before)
    assert len(watched[1].state) == len(plain[1].state)
    expected, losses = run(plain, range(5)), []
    for step in range(5):
        losses += run(watched, range(step, step + 1))
        state.read()
    assert losses == expected


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_at_any_step(name: str, at: int) -> None:
    """Also where some parameters have no state yet, and from a process whose own first steps went elsewhere."""
    expected = run(make(name), range(6))
    source = make(name)
    assert run(source, range(at)) == expected[:at]
    target = make(name)
    run(target, range(10, 12))
    carry_over(declare(source), declare(target))
    assert run(target, range(at, 6)) == expected[at:]


SCHEDULES: dict[str, Callable[..., Any]] = {
    "cosine": lambda o: CosineAnnealingLR(o, 7),
    "steps": lambda o: MultiStepLR(o, [2, 2, 4], 0.5),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=8),
    "sequence": lambda o: SequentialLR(o, [LambdaLR(o, lambda step: step / 3), CosineAnnealingLR(o, 5)], [3]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on_with_the_exact_rate(name: str) -> None:
    expected = run(make("AdamW", SCHEDULES[name]), range(7))
    source = make("AdamW", SCHEDULES[name])
    run(source, range(3))
    target = make("AdamW", SCHEDULES[name])
    carry_over(declare(source), declare(target))
    assert target[1].param_groups[0]["lr"] == source[1].param_groups[0]["lr"]
    assert run(target, range(3, 7)) == expected[3:]


def test_hooks_and_wrappers_of_the_real_optimizer_see_no_probe() -> None:
    job = make("AdamW", SCHEDULES["cosine"])
    calls: list[str] = []
    job[1].register_step_pre_hook(lambda *_: calls.append("pre"))
    job[1].register_step_post_hook(lambda *_: calls.append("post"))
    declare(job).layout()
    assert calls == []
    assert len(job[1].state) == 0
    run(job, range(1))
    assert calls == ["pre", "post"]


def test_names_do_not_show_wrappers_and_tied_tensors_have_each_name() -> None:
    job = make("SGD momentum")
    names = {spec.fqn for spec in declare(job).layout().tensors}
    assert {"body.0.weight", "tied.weight", "optim.tied.weight.momentum_buffer", "body.1.running_mean"} <= names
    compiled = State(torch.compile(job[0]), job[1], None, None, {}, ALONE)
    assert {spec.fqn for spec in compiled.layout().tensors} == names


def test_what_a_state_refuses() -> None:
    model, optimizer, _ = make("AdamW")
    with pytest.raises(LayoutError, match="is none of the model"):
        State(nn.Linear(2, 2), optimizer, None, None, {}, ALONE)
    with pytest.raises(LayoutError, match=r"two tensors of the model are called weight"):
        State([nn.Linear(2, 2), nn.Linear(2, 2)], None, None, None, {}, ALONE)
    with pytest.raises(LayoutError, match="made without optimizer, this script is with one"):
        declare((model, optimizer, None)).adopt({}, {"seed": 1})
    gathered = nn.Linear(2, 2)
    gathered.register_state_dict_post_hook(lambda _, found, *__: found.update(weight=torch.ones(2, 2)))
    with pytest.raises(LayoutError, match="weight of the model is a copy that a state_dict hook made"):
        State(gathered, None, None, None, {}, ALONE)
    optimizer.param_groups[0]["note"] = random.Random(1)
    with pytest.raises(UsageError, match=r"note.*Random"):
        declare((model, optimizer, None)).values()


def draw() -> list[float]:
    return [torch.randn(1).item(), random.random(), random.gauss(), np.random.rand(), np.random.randn()]


def test_streams_go_by_coordinate() -> None:
    here = Streams(CPU, {"pp": 0, "dp": 1, "cp": 0, "tp": 0})
    torch.manual_seed(5)
    saved = {fqn: state.clone() for fqn, state in here.read().items()}
    assert list(saved) == [f"rng.{kind}.pp0.dp1.cp0.tp0" for kind in ("cpu", "python", "numpy")]
    assert dict(here.specs()[0].coordinate) == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    expected = draw()
    here.adopt(saved)
    assert draw() == expected
    saved = {fqn: state.clone() for fqn, state in here.read().items()}  # now half of a pair of Gaussians is left
    expected = draw()
    here.adopt(saved)
    assert draw() == expected
    draws = []
    for coord, step in (((0, 1), 4), ((0, 1), 4), ((0, 2), 4), ((0, 1), 5)):
        Streams(CPU, {"pp": coord[0], "dp": coord[1], "cp": 0, "tp": 0}).derive(5, step)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert all(len(set(column)) == 3 for column in zip(*draws, strict=True))


def test_values_are_json_that_comes_back() -> None:
    job = make("AdamW", SCHEDULES["steps"])
    values = decode(declare(job).values())
    assert values["optimizer"][0]["betas"] == (0.9, 0.999)
    assert type(values["scheduler"]["milestones"]).__name__ == "Counter"
    assert values["seed"] == 3


def test_launch_from_the_environment() -> None:
    assert Launch.from_env({}).world_size == 1
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "TENPLEX_TP": "2"}
    assert list(Launch.from_env(env).node_ranks) == [4, 5]
    assert parallel_from_env(env, 8) == ParallelConfig(dp=4, tp=2)
    with pytest.raises(UsageError, match="WORLD_SIZE='many'"):
        Launch.from_env({"WORLD_SIZE": "many"})
    with pytest.raises(UsageError, match="come together"):
        Launch.from_env({"TENPLEX_AGENT": "unix:/nowhere"})
    for sizes in ({"TENPLEX_PP": "3"}, {"TENPLEX_TP": "16"}, {"TENPLEX_DP": "3"}, {"TENPLEX_TP": "-2"}):
        with pytest.raises(UsageError, match="8 workers cannot be a mesh"):
            parallel_from_env(sizes, 8)
