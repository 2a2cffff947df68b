"""The environment of a worker: torchrun's variables, and ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenplexrun.core.parallel import ALL_AXES, AXES, OPTIONAL, ParallelConfig
from tenplexrun.core.rounds import Round
from tenplexrun.errors import UsageError


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is the same for all workers of a node in all rounds."""

    run_id: str
    virtual_local_rank: bool
    signals: str
    max_restarts: int
    snapshot_every: str
    grace_s: float
    node_dir: str
    store: str
    token_file: str
    agent: str
    control: str
    checkpoints: bool = False


def worker_env(base: Mapping[str, str], round_: Round, node: str, local_rank: int, facts: NodeFacts) -> dict[str, str]:
    """All variables of one worker. Names as torchrun 2.13 sets them, then `TENPLEX_*`.

    Raises UsageError when --virtual-local-rank meets fewer visible devices than workers.
    """
    index = round_.nodes.index(node)
    mine = round_.participants[index]
    rank, world = mine.first_rank + local_rank, round_.parallel.world_size
    assert round_.master is not None
    role = mine.role
    before = [p.num_workers for p in round_.participants[:index] if p.role == role]
    env = dict(base)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(mine.num_workers),
        GROUP_RANK=str(index),
        GROUP_WORLD_SIZE=str(len(round_.participants)),
        ROLE_NAME=role,
        ROLE_RANK=str(sum(before) + local_rank),
        ROLE_WORLD_SIZE=str(sum(p.num_workers for p in round_.participants if p.role == role)),
        MASTER_ADDR=round_.master[0],
        MASTER_PORT=str(round_.master[1]),
        TORCHELASTIC_RESTART_COUNT=str(round_.failures),
        TORCHELASTIC_MAX_RESTARTS=str(facts.max_restarts),
        TORCHELASTIC_RUN_ID=facts.run_id,
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_SIGNALS_TO_HANDLE=facts.signals,
        TENPLEX_RUN_ID=facts.run_id,
        TENPLEX_LOCAL_RANK=str(local_rank),
        TENPLEX_ROUND=str(round_.number),
        TENPLEX_NODE_DIR=facts.node_dir,  # what the sweep knows a node's processes by, also those that workers exec
        TENPLEX_STORE=facts.store,
        TENPLEX_TOKEN_FILE=facts.token_file,
        TENPLEX_AGENT=facts.agent,
        TENPLEX_CONTROL=facts.control,
        TENPLEX_SNAPSHOT_EVERY=facts.snapshot_every,
        TENPLEX_RESUME_STEP=str(round_.start_step),
        TENPLEX_CHECKPOINTS=str(int(facts.checkpoints)),
        TENPLEX_GRACE_S=f"{facts.grace_s:g}",
    )
    env.update(_mesh(round_.parallel, rank))
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if facts.virtual_local_rank:
        env.update(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=_only_device(base.get("CUDA_VISIBLE_DEVICES"), local_rank))
    if mine.num_workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def _mesh(parallel: ParallelConfig, rank: int) -> dict[str, str]:
    """Sizes and this rank's index on each axis; what is by default is not said, as `parallel_from_env` wants it."""
    coord = parallel.expand(parallel.coord(rank))
    env = {f"TENPLEX_{axis.upper()}": str(parallel.size(axis)) for axis in (*AXES, "ep")}
    env |= {f"TENPLEX_{axis.upper()}_RANK": str(coord[axis]) for axis in ALL_AXES}
    env |= {f"TENPLEX_{name.upper()}": str(size) for name in OPTIONAL if (size := getattr(parallel, name))}
    if parallel.order != AXES:
        env["TENPLEX_MESH_ORDER"] = "-".join(parallel.order)
    return env


def _only_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}; show as "
            f"many devices as --nproc-per-node asks for"
        )
    return devices[local_rank].strip()
