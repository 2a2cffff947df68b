"""PURE: files that ranks write, as state: each rank's row of one tensor of bytes, so that snapshots carry them.

A row is its content's length (8 bytes, big-endian), the content, and whatever fills it up.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

from tenplexrun.core.layout import Layout
from tenplexrun.core.ops import Shard
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Holding, SnapshotId
from tenplexrun.core.spec import TensorSpec

FQN = "files"
LENGTH = struct.Struct("!Q")
_STEP = re.compile(r"step-(\d{1,15})")


def files_layout(config: ParallelConfig, row_bytes: int) -> Layout:
    """uint8 [ranks, row_bytes], a row for each rank of `config`."""
    return Layout((TensorSpec(FQN, (config.world_size, row_bytes), "uint8", (Shard(0, config.order),)),))


def row(rank: int, row_bytes: int) -> Region:
    return Region((rank, 0), (1, row_bytes))


def is_of(snapshot: SnapshotId | None, holdings: Iterable[Holding], config: ParallelConfig, row_bytes: int) -> bool:
    """Whether `snapshot` holds the files of the ranks of this very layout: plain files fit no other one."""
    if snapshot is None or snapshot.digest != files_layout(config, row_bytes).digest:
        return False
    made = (claim.config for holding in holdings if holding.snapshot == snapshot for claim in holding.claims)
    return all(one == config for one in made)


def step_name(step: int) -> str:
    return f"step-{step}"


def steps_in(names: Iterable[str]) -> set[int]:
    """The steps that are whole in a folder with these entries: those that have been renamed to step-N."""
    return {int(match[1]) for name in names if (match := _STEP.fullmatch(name)) and name == step_name(int(match[1]))}
