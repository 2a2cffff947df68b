"""Durable checkpoints: when one is due, how it is named, who writes what of it, what its tensors are called. Pure.

A checkpoint is a folder `step-<N>` in the format of torch.distributed.checkpoint (DCP). Names are those of
`dcp.load({"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, ...)`; what only we
know stands below `tenplexrun.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tenplexrun.core.arena import spread
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.pace import Interval
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region

OWN = "tenplexrun"
DCP = "dcp"
"""Before the names of tensors, and of the values, that were saved as a state dict: they keep their own names."""
VALUES = f"{OWN}.values"
"""The entry with a snapshot's values, as JSON: it makes a checkpoint one of ours."""
CHECKSUMS = f"{OWN}.checksums."
"""Before a part's number: the entry with the xxh3_64 of each region, as JSON."""

Path = tuple[str | int, ...]
"""Where a value stands in the nested state dict whose flat form a checkpoint is."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable checkpoint that can be read: its folder, the completed steps and the samples that they consumed."""

    url: str
    step: int
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What was found for round `round`, `refused` folders left out: a checkpoint, none, or why it must not go on
    without."""

    round: int
    refused: tuple[str, ...]
    checkpoint: Checkpoint | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Cadence:
    """What the node that decides remembers of the checkpoints of a round: the step and the time (monotonic, s) of the
    last one, or of the round's start. `every`: steps or seconds."""

    every: Interval
    step: int
    at: float

    def due(self, step: int, now: float, last: bool) -> bool:
        """Whether the snapshot of `step` is to be written; `last`: the job's last one always is."""
        if step <= self.step:
            return False
        if last:
            return True
        if self.every.steps is not None:
            return step // self.every.steps > self.step // self.every.steps
        assert self.every.seconds is not None
        return now - self.at >= self.every.seconds

    def begun(self, step: int, now: float) -> Cadence:
        return replace(self, step=step, at=now)


def folder_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step of a folder that we may have written; None: it is none of ours."""
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


def retired(steps: Iterable[int], keep: int) -> list[int]:
    """Of the steps whose checkpoints are complete, those that go, the oldest first."""
    return sorted(set(steps))[:-keep]


def paths_of(layout: Layout) -> dict[str, Path]:
    """For each tensor of the state its place in the nested state dict of plain torch.

    `optim.<fqn>.<slot>` is the optimizer's, if `<fqn>` is a tensor of the model and has an `exists`.
    """
    names = {spec.fqn for spec in layout.tensors}
    paths: dict[str, Path] = {}
    for spec in layout.tensors:
        owner, _, slot = spec.fqn.removeprefix("optim.").rpartition(".")
        if spec.fqn.startswith(f"{DCP}/"):
            paths[spec.fqn] = (spec.fqn.removeprefix(f"{DCP}/"),)
        elif spec.at is not None:
            paths[spec.fqn] = (OWN, spec.fqn)
        elif spec.fqn.startswith("optim.") and owner in names and f"optim.{owner}.exists" in names:
            paths[spec.fqn] = (OWN, spec.fqn) if slot == "exists" else ("optimizer", "state", owner, slot)
        else:
            paths[spec.fqn] = ("model", spec.fqn)
    return paths


def key_of(path: Path) -> str:
    """DCP's flat name of a place in a nested state dict."""
    return ".".join(map(str, path))


def shares(layout: Layout, config: ParallelConfig, ranks: Sequence[Sequence[int]]) -> list[list[tuple[str, Region]]]:
    """For each node, whose global ranks are given, the regions that it writes: each distinct one once, balanced.

    Where replicas may differ (`first`) the lowest rank's counts, as in a recovery.
    """
    owners: dict[tuple[str, Region], list[int]] = {}
    for node, node_ranks in enumerate(ranks):
        held: Mapping[str, tuple[Region, ...]] = layout.regions_at((config, rank) for rank in node_ranks)
        for fqn, regions in held.items():
            for region in regions:
                owners.setdefault((fqn, region), []).append(node)
    for key in owners:
        if layout.spec(key[0]).replicas == "first":
            owners[key] = owners[key][:1]
    sizes = {(fqn, region): region.num_elements * item_bytes(layout.spec(fqn).dtype) for fqn, region in owners}
    found: list[list[tuple[str, Region]]] = [[] for _ in ranks]
    for key, node in sorted(spread(owners, sizes).items()):
        found[node].append(key)
    return found
