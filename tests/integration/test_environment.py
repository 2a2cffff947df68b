"""A worker's environment: beside torchrun's in one run, and against torch's own ranks on unequal nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import BIN

from tenplexrun.agent.environment import NodeFacts, worker_env
from tenplexrun.core.forming import Selection
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Cause, Member, Round
from tenplexrun.errors import UsageError

SHOW = "import json, os; open(os.environ['OUT'] + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))"
OWN = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "OUT"}  # new in each launch
OF_THE_PARENT = {"_", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # a shell's, and what torch sets for its own forks


def _shown(launcher: list[str], folder: Path) -> list[dict[str, str]]:
    folder.mkdir()
    path = folder / "show.py"
    path.write_text(SHOW)
    env = {**os.environ, "OUT": f"{folder}/", "CUDA_VISIBLE_DEVICES": "4,5", "MINE": "a b"}
    env.pop("OMP_NUM_THREADS", None)
    flags = ["--nproc_per_node=2", "--max_restarts=3", "--role=r", "--signals-to-handle=SIGTERM,SIGINT"]
    subprocess.run([*launcher, *flags, str(path)], env=env, check=True, capture_output=True, timeout=200)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("extra", [[], ["--virtual-local-rank"]], ids=["plain", "virtual local rank"])
def test_it_is_that_of_torchrun_and_ours_on_top(extra: list[str], tmp_path: Path) -> None:
    theirs = _shown([sys.executable, "-m", "torch.distributed.run", *extra], tmp_path / "theirs")
    ours = _shown([str(BIN / "tenplexrun"), *extra], tmp_path / "ours")
    for expected, found in zip(theirs, ours, strict=True):
        assert {name for name in found.keys() - expected.keys() if not name.startswith("TENPLEX_")} == set()
        for name in expected.keys() - OWN - OF_THE_PARENT:
            assert found.get(name) == expected[name], name
        assert found.keys() >= OWN
        assert Path(found["TENPLEX_NODE_DIR"]).parent == Path("/dev/shm"), (
            "by which the sweep knows what a worker execs"
        )
        assert len(found["TORCHELASTIC_RUN_ID"]) == len(expected["TORCHELASTIC_RUN_ID"])


NODES = [("trainer", 2), ("reader", 3), ("trainer", 1), ("judge", 1), ("reader", 2)]


def _round() -> Round:
    members = [Member(f"n{i}", f"h{i}", "l", "s", size, i, role) for i, (role, size) in enumerate(NODES)]
    world = sum(size for _, size in NODES)
    parallel = ParallelConfig(dp=world)
    participants = Selection(tuple(members), (), parallel).participants()
    cause = Cause("start", "", 0.0)
    return Round(0, "running", cause, "d", parallel, participants, parallel, master=("h0", 1234))


def _facts(virtual_local_rank: bool = False) -> NodeFacts:
    return NodeFacts("id", virtual_local_rank, "SIGTERM", 0, 1, 30.0, "n", "s", "t", "a", "c")


def test_ranks_on_unequal_nodes_are_those_of_torch() -> None:
    """All agents of torch at once, on a store in memory, each asking for the ranks of its workers."""
    dist = pytest.importorskip("torch.distributed")
    api = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    store, found = dist.HashStore(), {}

    def ask(index: int, role: str, size: int) -> None:
        spec: Any = SimpleNamespace(role=role, local_world_size=size)
        found[index] = api.SimpleElasticAgent._assign_worker_ranks(None, store, index, len(NODES), spec)

    threads = [threading.Thread(target=ask, args=(index, *node)) for index, node in enumerate(NODES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index, (role, _) in enumerate(NODES):
        for worker in found[index]:
            env = worker_env({}, _round(), f"n{index}", worker.local_rank, _facts())
            names = ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "GROUP_RANK")
            expected = (worker.global_rank, worker.world_size, worker.role_rank, worker.role_world_size, role, index)
            assert tuple(env[name] for name in names) == tuple(map(str, expected))


def test_virtual_local_ranks_without_and_with_too_few_devices() -> None:
    env = worker_env({}, _round(), "n1", 2, _facts(True))
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env["TENPLEX_LOCAL_RANK"]) == ("0", "2", "2")
    with pytest.raises(UsageError, match="local rank 2"):
        worker_env({"CUDA_VISIBLE_DEVICES": "0,1"}, _round(), "n1", 2, _facts(True))
