"""What the launcher tells a worker through its environment: torchrun's variables and `TENPLEX_*`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenplexrun.core.pace import Interval
from tenplexrun.core.parallel import AXES, OPTIONAL, ParallelConfig
from tenplexrun.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: the sizes of the mesh, its own coordinate (axis → index), its device."""

    config: ParallelConfig
    coord: Mapping[str, int]
    device: torch.device


@dataclass(frozen=True, slots=True)
class Launch:
    """One worker's part in a round. Without a launcher: the only rank of a world of one, and no `agent`."""

    rank: int
    local_rank: int
    """Index on its node, also where LOCAL_RANK is 0 for all (--virtual-local-rank)."""
    world_size: int
    local_world_size: int
    round: int
    run_id: str
    agent: str
    """Address of the agent's socket; "" where no agent runs."""
    control: str
    """Path of the control page; "" where no agent runs."""
    snapshot_every: Interval
    checkpoints: bool
    """Whether durable checkpoints are written."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Launch:
        """Raises UsageError, naming the variable, when one is no number or half of a pair is missing."""
        launch = cls(
            rank=_number(env, "RANK", 0),
            local_rank=_number(env, "TENPLEX_LOCAL_RANK", _number(env, "LOCAL_RANK", 0)),
            world_size=_number(env, "WORLD_SIZE", 1),
            local_world_size=_number(env, "LOCAL_WORLD_SIZE", 1),
            round=_number(env, "TENPLEX_ROUND", 0),
            run_id=env.get("TENPLEX_RUN_ID", ""),
            agent=env.get("TENPLEX_AGENT", ""),
            control=env.get("TENPLEX_CONTROL", ""),
            snapshot_every=_every(env),
            checkpoints=bool(_number(env, "TENPLEX_CHECKPOINTS", 0)),
        )
        if bool(launch.agent) != bool(launch.control):
            raise UsageError("TENPLEX_AGENT and TENPLEX_CONTROL come together; start the script with `tenplexrun`")
        return launch

    @property
    def threads(self) -> int:
        """This worker's share of the processors that it may use: how many threads copy while it waits."""
        return max(1, len(os.sched_getaffinity(0)) // self.local_world_size)

    @property
    def node_ranks(self) -> range:
        """Global ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def parallel_from_env(env: Mapping[str, str], world_size: int) -> ParallelConfig:
    """Sizes from `TENPLEX_PP` and so on, which `tenplexrun` sets and a user of torchrun may; dp is what is left.

    Raises UsageError when the world cannot be divided like this.
    """
    sizes = {axis: _number(env, f"TENPLEX_{axis.upper()}", 1) for axis in ("pp", "cp", "ep", "tp")}
    inner = sizes["pp"] * sizes["cp"] * sizes["tp"]
    dp = world_size // max(1, inner)
    if inner < 1 or inner * dp != world_size or _number(env, "TENPLEX_DP", dp) != dp:
        raise UsageError(
            f"{world_size} workers cannot be a mesh of pp={sizes['pp']} cp={sizes['cp']} tp={sizes['tp']}"
            f"{' dp=' + env['TENPLEX_DP'] if 'TENPLEX_DP' in env else ''}; choose sizes whose product divides the world"
        )
    try:
        more = {name: _number(env, f"TENPLEX_{name.upper()}", 0) for name in OPTIONAL}
        order = tuple((env.get("TENPLEX_MESH_ORDER") or "-".join(AXES)).split("-"))
        return ParallelConfig.from_json({**sizes, **more, "dp": dp, "order": order})
    except ValueError as error:
        raise UsageError(f"{error}; correct the TENPLEX_* sizes") from None


def _every(env: Mapping[str, str]) -> Interval:
    try:
        return Interval.parse(env.get("TENPLEX_SNAPSHOT_EVERY") or "1")
    except ValueError as error:
        raise UsageError(f"TENPLEX_SNAPSHOT_EVERY: {error}; start the script with `tenplexrun`") from None


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, "") or default)
    except ValueError:
        raise UsageError(f"{name}={env[name]!r} is not a whole number; start the script with `tenplexrun`") from None
