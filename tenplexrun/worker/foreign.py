"""What a checkpoint calls the job's tensors: our own, and those that plain torch has written.

The latter are flat forms of nested state dicts: {"model": ..., "optimizer": {"state": ..., "param_groups": ...}},
also below "app" or with "optim", or the model's state dict alone at the top. Param groups may be listed, or flattened
by parameter (`flatten_optimizer_state_dict`). `step` and `consumed` are used where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tenplexrun.core import durable
from tenplexrun.core import values as plain
from tenplexrun.core.layout import Layout
from tenplexrun.errors import LayoutError
from tenplexrun.worker.dcp import Directory, load
from tenplexrun.worker.folders import Folder

Record = dict[str, Any]
SHOWN = 5
_MODEL = ("model.", "app.model.", "")
_OPTIMIZER = ("optimizer.", "optim.", "app.optimizer.", "app.optim.")
_SCHEDULER = ("scheduler", "lr_scheduler")


@dataclass(frozen=True, slots=True)
class Names:
    """`keys`: the flat name of each tensor of the layout. `prefixes` of model and optimizer there.

    `existing`, `optional`: `exists` entries of parameters that have optimizer state, and what may be missing because
    they have none.
    """

    keys: Mapping[str, str]
    model: str
    optimizer: str
    existing: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


def own_names(layout: Layout) -> Names:
    keys = {fqn: durable.key_of(path) for fqn, path in durable.paths_of(layout).items()}
    return Names(keys, "model.", "optimizer.")


def foreign_names(layout: Layout, directory: Directory) -> Names:
    paths = durable.paths_of(layout)
    there = {*directory.tensors, *directory.values}
    of_model = [fqn for fqn, path in paths.items() if path[0] == "model"]
    of_optimizer = {fqn: durable.key_of(path[1:]) for fqn, path in paths.items() if path[0] == "optimizer"}
    model = _prefix(_MODEL, of_model, there)
    optimizer = _prefix(_OPTIMIZER, of_optimizer.values(), there)
    keys = {fqn: model + fqn for fqn in of_model}
    keys |= {fqn: optimizer + key for fqn, key in of_optimizer.items()}
    keys |= {fqn: durable.key_of(path) for fqn, path in paths.items() if path[0] == durable.OWN}
    stateful = {str(paths[fqn][2]) for fqn in of_optimizer if keys[fqn] in there}
    stateless = {fqn for fqn in of_optimizer if str(paths[fqn][2]) not in stateful} if stateful else set()
    marks = {fqn for fqn, path in paths.items() if path[0] == durable.OWN and layout.spec(fqn).at is None}
    existing = {fqn for fqn in marks if fqn.removeprefix("optim.").removesuffix(".exists") in stateful}
    return Names(keys, model, optimizer, frozenset(existing), frozenset(marks | stateless))


def _prefix(prefixes: Collection[str], names: Collection[str], there: Collection[str]) -> str:
    """The one under which most of `names` are found; the first of equals."""
    return max(prefixes, key=lambda prefix: sum(prefix + name in there for name in names))


def check(url: str, directory: Directory, layout: Layout, names: Names) -> frozenset[str]:
    """Raises LayoutError naming tensors that are missing, too many, or of another shape or type. Returns those that
    may be missing, and are."""
    missing: list[str] = []
    wrong: list[str] = []
    absent: list[str] = []
    for spec in layout.tensors:
        key = names.keys[spec.fqn]
        there = directory.tensors.get(key)
        if there is not None and (there.shape, there.dtype) != (spec.shape, spec.dtype):
            wrong.append(f"{spec.fqn} is {there.dtype} {there.shape} there, {spec.dtype} {spec.shape} here")
        elif there is None and (key not in directory.values or spec.shape):
            may_be = spec.at is not None or spec.fqn in names.optional
            (absent if may_be else missing).append(spec.fqn)
    problems = [
        f"{what} {', '.join(sorted(some)[:SHOWN])}{f' and {len(some) - SHOWN} more' if len(some) > SHOWN else ''}"
        for what, some in (
            ("it lacks", missing),
            ("it has also", _extra(directory, names)),
            ("sizes or types differ:", wrong),
        )
        if some
    ]
    if problems:
        raise LayoutError(
            f"checkpoint {url} is of another model: {'; '.join(problems)}. Give the same model and optimizer, or name "
            "another --checkpoint-dir"
        )
    return frozenset(absent)


def _extra(directory: Directory, names: Names) -> list[str]:
    """Tensors of a model or optimizer that this job has not."""
    known = {*names.keys.values()}
    states = f"{names.optimizer}state."
    others = tuple(f"{word}." for word in (durable.OWN, *_SCHEDULER, "app", "optimizer", "optim", "model"))
    extra = []
    for key in directory.tensors.keys() - known:
        at_top = not names.model and not key.startswith(others) and key not in ("step", "consumed")
        in_model = at_top if not names.model else key.startswith(names.model)
        with_optimizer = key.startswith(states) and any(name.startswith(states) for name in known)
        if in_model or with_optimizer:
            extra.append(key)
    return extra


def whole_number(folder: Folder, directory: Directory, name: str) -> int:
    """What a foreign checkpoint says, as a value or a tensor of one element; else 0."""
    value = _values(folder, directory, {name: name}).get(name)
    return int(value) if isinstance(value, int | float) and value >= 0 else 0


def foreign_values(folder: Folder, directory: Directory, names: Names, groups: Mapping[str, int]) -> Record:
    """Hyper-parameters and scheduler, as far as they are there, as a snapshot's values have them (encoded)."""
    found: Record = {"foreign": True}
    groups_there = _param_groups(folder, directory, f"{names.optimizer}param_groups.", groups)
    if groups_there:
        found["optimizer"] = groups_there
    for word in _SCHEDULER:
        flat = {key: key for key in directory.values if key.startswith(f"{word}.")}
        nested: Record = {}
        for key, value in _values(folder, directory, flat).items():
            path = [str(part) for part in directory.paths.get(key, key.split("."))][1:]
            inner = nested
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = value
        if nested:
            found["scheduler"] = nested
    encoded: Record = plain.encode(found)
    return encoded


def _param_groups(folder: Folder, directory: Directory, prefix: str, groups: Mapping[str, int]) -> list[Record]:
    """For each group of this job's optimizer, the values of the group there that has its first parameter."""
    listed: dict[str, str] = {}  # by parameter, the prefix of its group's values
    for key in directory.values:
        if key.startswith(prefix) and key.endswith(".params"):
            names = load(folder.read(directory.values[key]), f"{key} of {folder.url}")
            listed.update((name, key.removesuffix("params")) for name in names)
    found: list[Record] = []
    for number in range(max(groups.values(), default=-1) + 1):
        first = min(fqn for fqn, own in groups.items() if own == number)
        start = listed.get(first, f"{prefix}{first}.")
        wanted = {
            name: key
            for key in {*directory.values, *directory.tensors}
            if key.startswith(start) and "." not in (name := key.removeprefix(start)) and name != "params"
        }
        found.append(_values(folder, directory, wanted))
    return found if any(found) else []


def _values(folder: Folder, directory: Directory, keys: Mapping[str, str]) -> Record:
    """By name, what stands under these keys; tensors of one element as numbers."""
    found = {}
    for name, key in keys.items():
        stored: Iterable[Any] = [directory.values[key]] if key in directory.values else ()
        if key in directory.tensors:
            stored = directory.tensors[key].chunks
        for one in stored:
            value = load(folder.read(one), f"{key} of {folder.url}")
            found[name] = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return found
