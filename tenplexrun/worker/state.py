"""The state of a training job on one rank: model, optimizer, scheduler, random streams, as tensors and values."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tenplexrun.core import values as plain
from tenplexrun.core.layout import Layout, Stages
from tenplexrun.errors import LayoutError
from tenplexrun.worker.launch import Place
from tenplexrun.worker.optim import OptimizerState
from tenplexrun.worker.placements import Rules, check_local, local, spec_of
from tenplexrun.worker.streams import Streams

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Segments that torch.compile and activation checkpointing put into names."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class State:
    """Everything of a job that a new round needs, but for the data's position.

    `layout()` describes this rank's tensors, `read()` gives their local parts, `load()` puts back what was saved.
    Raises LayoutError when something in it cannot be described.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        scheduler: Stateful | None,
        stages: Stages | None,
        rules: Rules,
        place: Place,
    ) -> None:
        models = [model] if isinstance(model, nn.Module) else model
        self._models = [one.module if isinstance(one, DistributedDataParallel) else one for one in models]
        self._scheduler, self._place = scheduler, place
        self._streams = Streams(place.device, place.coord)
        tensors = self._model_tensors()
        # replicas of parameters agree; those of buffers need not: BatchNorm's means follow each rank's own rows
        self._specs = {
            fqn: spec_of(
                fqn,
                tensor,
                place.config,
                rules,
                stages.stage_of(fqn) if stages else None,
                "agree" if isinstance(tensor, nn.Parameter) else "first",
            )
            for fqn, tensor in tensors.items()
        }
        self._optimizer = None if optimizer is None else OptimizerState(optimizer, tensors, self._specs, place.config)

    def layout(self) -> Layout:
        """This rank's part of the layout, each entry checked against the tensor that is really there."""
        specs = [*self._specs.values(), *(self._optimizer.specs() if self._optimizer else ()), *self._streams.specs()]
        layout = Layout(tuple(specs))
        layout.check(self._place.config)
        for fqn, tensor in self.read().items():
            check_local(layout, fqn, tensor, self._place)
        return layout

    def read(self) -> dict[str, torch.Tensor]:
        """Local parts by fqn, detached; those of parameters and moments share their memory."""
        tensors = {fqn: local(tensor).detach() for fqn, tensor in self._model_tensors().items()}
        if self._optimizer is not None:
            tensors.update(self._optimizer.read())
        tensors.update(self._streams.read())
        return tensors

    def values(self) -> dict[str, Any]:
        """The same on every rank: hyper-parameters, the scheduler, the seed. Encoded by `core.values`."""
        found: dict[str, Any] = {"seed": torch.initial_seed()}
        if self._optimizer is not None:
            found["optimizer"] = self._optimizer.values()
        if self._scheduler is not None:
            found["scheduler"] = self._scheduler.state_dict()
        encoded: dict[str, Any] = plain.encode(found)
        return encoded

    def groups(self) -> dict[str, int]:
        """The optimizer's param group of each parameter here."""
        return self._optimizer.groups if self._optimizer is not None else {}

    def blank(self) -> dict[str, torch.Tensor]:
        """Where a restore writes, by fqn: the model's own memory, and new tensors for all that `adopt` takes over."""
        return {
            **{fqn: tensor.detach() for fqn, tensor in self._model_tensors().items()},
            **(self._optimizer.blank() if self._optimizer else {}),
            **{fqn: torch.empty_like(state) for fqn, state in self._streams.read().items()},
        }

    @property
    def stream_names(self) -> frozenset[str]:
        """What a coordinate that did not exist before finds in no snapshot."""
        return frozenset(self._streams.names().values())

    def adopt(self, filled: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Go on from tensors that `blank` gave and a restore filled, and from `values` as saved.

        Values of a checkpoint that was not written by us (`foreign`) say no more than was found there; what it lacks
        stays as the script made it. Raises LayoutError when the saved values are of another kind of job.
        """
        saved = plain.decode(dict(values))
        if saved.get("foreign"):
            mine: dict[str, Any] = {}
            if self._optimizer is not None:
                mine["optimizer"] = [{} for _ in self._optimizer.values()]
            if self._scheduler is not None:
                mine["scheduler"] = self._scheduler.state_dict()
            saved = {name: _overlaid(value, saved[name]) if name in saved else value for name, value in mine.items()}
        for name, own in (("optimizer", self._optimizer), ("scheduler", self._scheduler)):
            if (name in saved) != (own is not None):
                there, here = ("with", "without") if name in saved else ("without", "with")
                raise LayoutError(f"the snapshot was made {there} {name}, this script is {here} one; run the same job")
        if self._optimizer is not None:
            self._optimizer.adopt(filled)
            self._optimizer.set_values(saved["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(saved["scheduler"])

    def adopt_streams(self, filled: Mapping[str, torch.Tensor], seed: int, step: int) -> int | None:
        """Go on with the saved random streams; without any, derive new ones and return their seed."""
        if self.stream_names <= filled.keys():
            self._streams.adopt(filled)
            return None
        return self._streams.derive(seed, step)

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by global fqn; tied ones under each of their names."""
        found: dict[str, torch.Tensor] = {}
        for model in self._models:
            own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
            for name, tensor in model.state_dict(keep_vars=True).items():
                fqn = _clean(name)
                if not isinstance(tensor, torch.Tensor):
                    raise LayoutError(f"{fqn} of the model is a {type(tensor).__name__}; make it a tensor in a buffer")
                if fqn in found:
                    raise LayoutError(f"two tensors of the model are called {fqn}; give names that are unique")
                if id(tensor) not in own:
                    raise LayoutError(
                        f"{fqn} of the model is a copy that a state_dict hook made, so it cannot be restored in place; "
                        "shard with fully_shard or DTensors instead of a wrapper that gathers"
                    )
                found[fqn] = tensor
        return found


def _overlaid(own: Any, found: Any) -> Any:
    """`found`, whose dicts have only strings for keys as DCP flattens them, in the form of `own`."""
    if not isinstance(own, dict) or not isinstance(found, dict):
        return found
    names = {str(key): key for key in own}
    result = copy.copy(own)
    for name, value in found.items():
        key = names.get(name, name)
        result[key] = _overlaid(own.get(key), value)
    return result


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
