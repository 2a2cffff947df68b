"""An optimizer's state as named tensors, without waiting for its first step.

Optimizers make their state at the first step that sees a gradient. To know names, shapes and types before, one step of
the same class is run on a stand-in of each kind of parameter: zeros, with a zero gradient. The real parameters, state
and hyper-parameters are never touched. Whether a parameter's state exists yet is state, too (`optim.<fqn>.exists`):
what was restored trains bit by bit as what was never stopped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tenplexrun.core.layout import TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.errors import LayoutError
from tenplexrun.worker import device
from tenplexrun.worker.placements import local, spec_of

SCALARS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Plain numbers in an optimizer's state travel as 0-d tensors."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One entry of a parameter's state, of type `kind`. `example` is None for tensors shaped as the parameter."""

    key: str
    kind: type
    dtype: torch.dtype
    example: torch.Tensor | None

    def blank(self, param: torch.Tensor) -> torch.Tensor:
        source = param if self.example is None else self.example
        return torch.zeros_like(source, dtype=self.dtype, requires_grad=False)


class OptimizerState:
    """The state of `optimizer` keyed by parameter names.

    `params` gives the local model's parameters by fqn, `specs` their entries in the layout.
    Raises LayoutError where a parameter of the optimizer is none of the model's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, torch.Tensor],
        specs: Mapping[str, TensorSpec],
        config: ParallelConfig,
    ) -> None:
        self._optimizer, self._specs, self._config = optimizer, specs, config
        names: dict[int, list[str]] = {}
        for fqn, param in params.items():
            names.setdefault(id(param), []).append(fqn)
        self._params: dict[str, torch.Tensor] = {}
        self._slots: dict[str, tuple[Slot, ...]] = {}
        probed: dict[Any, tuple[Slot, ...]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise LayoutError(
                        f"a parameter of shape {tuple(param.shape)} in the optimizer's group {number} is none of the "
                        "model; give job.state the model that the optimizer was made for"
                    )
                slots = self._slots_of(param, number, probed)
                for fqn in names[id(param)]:
                    self._params[fqn], self._slots[fqn] = param, slots

    def specs(self) -> Iterator[TensorSpec]:
        """Entries in the layout: shaped and sharded as their parameters, or whole on each rank that has them."""
        for fqn, param in self._params.items():
            owner = self._specs[fqn]
            yield TensorSpec(f"optim.{fqn}.exists", (), "bool", stage=owner.stage)
            for slot in self._slots[fqn]:
                yield self._spec(f"optim.{fqn}.{slot.key}", slot, param, owner)

    def read(self) -> dict[str, torch.Tensor]:
        """This rank's local tensors by fqn; zeros where there is no state yet."""
        found = {}
        for fqn, param in self._params.items():
            state = self._optimizer.state.get(param) or {}
            found[f"optim.{fqn}.exists"] = torch.tensor(bool(state))
            for slot in self._slots[fqn]:
                value = state.get(slot.key)
                if value is None:
                    value = slot.blank(param)
                elif not isinstance(value, torch.Tensor):
                    value = torch.tensor(value, dtype=slot.dtype)
                found[f"optim.{fqn}.{slot.key}"] = local(value)
        return found

    def blank(self) -> dict[str, torch.Tensor]:
        """New tensors of the same names, DTensors among them, to be filled and given to `adopt`."""
        found = {}
        for fqn, param in self._params.items():
            found[f"optim.{fqn}.exists"] = torch.empty((), dtype=torch.bool)
            for slot in self._slots[fqn]:
                found[f"optim.{fqn}.{slot.key}"] = slot.blank(param)
        return found

    def adopt(self, filled: Mapping[str, torch.Tensor]) -> None:
        """Make `filled` the optimizer's state."""
        for fqn, param in self._params.items():
            if not filled[f"optim.{fqn}.exists"].item():
                self._optimizer.state.pop(param, None)
                continue
            state = self._optimizer.state[param]
            for slot in self._slots[fqn]:
                value = filled[f"optim.{fqn}.{slot.key}"]
                state[slot.key] = value if slot.kind is torch.Tensor else slot.kind(value.item())

    @property
    def groups(self) -> dict[str, int]:
        """The number of each parameter's param group, by fqn."""
        groups = enumerate(self._optimizer.param_groups)
        numbers = {id(param): number for number, group in groups for param in group["params"]}
        return {fqn: numbers[id(param)] for fqn, param in self._params.items()}

    def values(self) -> list[dict[str, Any]]:
        """Hyper-parameters of the param groups; tensors of one element (a capturable learning rate) as numbers."""
        return [
            {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for group in self._optimizer.param_groups
        ]

    def set_values(self, groups: list[dict[str, Any]]) -> None:
        """Raises LayoutError when the saved optimizer had another number of groups."""
        own = self._optimizer.param_groups
        if len(groups) != len(own):
            raise LayoutError(f"the snapshot's optimizer has {len(groups)} param groups, this one has {len(own)}")
        for group, saved in zip(own, groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def _spec(self, name: str, slot: Slot, param: torch.Tensor, owner: TensorSpec) -> TensorSpec:
        dtype = device.dtype_name(slot.dtype)
        if slot.example is None:
            return TensorSpec(name, owner.shape, dtype, owner.ops, owner.stage)
        if isinstance(slot.example, DTensor) or slot.example.dim() == 0 or not owner.ops:
            return spec_of(name, slot.example, self._config, {}, owner.stage)
        raise LayoutError(
            f"{name} has the shape {tuple(slot.example.shape)}, neither 0-d nor that of its sharded parameter: "
            "how it is sharded is not known; use an optimizer whose state is shaped as its parameters"
        )

    def _slots_of(self, param: torch.Tensor, group: int, probed: dict[Any, tuple[Slot, ...]]) -> tuple[Slot, ...]:
        state = self._optimizer.state.get(param)
        if state:
            return tuple(_slot(key, value, param) for key, value in sorted(state.items()) if value is not None)
        placement = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        kind = (group, tuple(param.shape), param.dtype, param.device, param.stride(), placement)
        if kind not in probed:
            state = _probe(self._optimizer, group, param)
            probed[kind] = tuple(_slot(key, value, param) for key, value in sorted(state.items()) if value is not None)
        return probed[kind]


def _probe(optimizer: torch.optim.Optimizer, group: int, param: torch.Tensor) -> dict[str, Any]:
    """The state that the first step would make for `param`."""
    stand_in = torch.zeros_like(param, requires_grad=True)
    stand_in.grad = torch.zeros_like(param, requires_grad=False)
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.state = type(optimizer.state)(dict)
    double.param_groups = [{**optimizer.param_groups[group], "params": [stand_in]}]
    # hooks and a scheduler's wrapper around `step` belong to the real optimizer alone
    double._optimizer_step_pre_hooks = OrderedDict()
    double._optimizer_step_post_hooks = OrderedDict()
    with torch.random.fork_rng(devices=[]):
        type(optimizer).step(double)
    return dict(double.state[stand_in])


def _slot(key: str, value: Any, param: torch.Tensor) -> Slot:
    if isinstance(value, torch.Tensor):
        like = value.shape == param.shape and isinstance(value, DTensor) == isinstance(param, DTensor)
        return Slot(key, torch.Tensor, value.dtype, None if like and value.dim() else value.detach())
    if type(value) in SCALARS:
        return Slot(key, type(value), SCALARS[type(value)], torch.empty((), dtype=SCALARS[type(value)]))
    raise LayoutError(
        f"the optimizer's state {key!r} is a {type(value).__name__}: only tensors and numbers can be kept; "
        "use another optimizer"
    )
