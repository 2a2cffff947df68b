"""Code for torch.distributed.checkpoint whose storage is the job's memory: killed, and gone on at other layouts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cluster import Cluster

PROGRAM = str(Path(__file__).resolve().parents[2] / "examples" / "dcp_pair.py")


def losses(out: Path) -> list[dict[str, Any]]:
    path = out / "losses.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """All steps, some maybe twice, with the losses of one process that nothing has happened to."""
    assert {one["step"] for one in found} == {one["step"] for one in expected}
    for one in found:
        assert math.isclose(one["loss"], expected[one["step"]]["loss"], rel_tol=1e-9), one


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one process that nothing happens to, more steps than any test needs."""
    out = tmp_path_factory.mktemp("alone")
    with Cluster(out / "cluster", patience_s=150.0) as one:
        one.start("z", "127.0.0.9", ["--nnodes=1", "--nproc-per-node=1"], [PROGRAM, str(out), "60"])
        assert one.exit_code("z") == 0
    return losses(out)


def test_a_worker_and_a_node_are_killed(cluster: Cluster, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    flags = ["--nnodes=1:2", "--nproc-per-node=2", "--tp=2", "--max-restarts=5"]
    command = [PROGRAM, str(tmp_path), "60", "--pause=0.1"]
    cluster.start("a", "127.0.0.1", flags, command)
    cluster.start("b", "127.0.0.2", flags, command)
    cluster.wait(lambda: [one for one in losses(tmp_path) if one["world"] == 4 and one["step"] > 4], "some steps")
    cluster.kill_worker("b", 1)
    seen = len(losses(tmp_path))
    cluster.wait(lambda: len(losses(tmp_path)) > seen + 4, "steps after the restart")
    cluster.kill_node("b")
    assert cluster.exit_code("a") == 0
    assert {one["world"] for one in losses(tmp_path)} == {2, 4}
    assert len(losses(tmp_path)) < 60 + 10, "what was saved was not done again"
    check(losses(tmp_path), alone)


def test_tensor_parallelism_is_raised_from_one_while_it_runs(
    cluster: Cluster, tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    """FSDP over TP: what no placement says at tp=1 is known by the usual names of mesh dims."""
    flags, command = ["--nnodes=2", "--nproc-per-node=2"], [PROGRAM, str(tmp_path), "40", "--pause=0.2"]
    cluster.start("a", "127.0.0.1", flags, command)
    cluster.start("b", "127.0.0.2", flags, command)
    cluster.wait(lambda: len(losses(tmp_path)) > 4, "some steps")
    answer = cluster.ctl("resize", "--tp=2")
    assert answer.returncode == 0, answer.stderr
    assert cluster.exit_code("a") == cluster.exit_code("b") == 0
    running = [event for event in cluster.events("a", kind="round") if event["phase"] == "running"]
    assert [event["parallel"]["tp"] for event in running] == [1, 2], "it ran, and was not taken back"
    assert running[1]["step"] > 0
    check(losses(tmp_path), alone[:40])


def test_it_goes_on_at_another_tp_from_a_durable_checkpoint(
    cluster: Cluster, tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    command = [PROGRAM, str(tmp_path)]
    durable = [f"--checkpoint-dir={tmp_path / 'ck'}", "--checkpoint-every=4", "--nnodes=1"]
    cluster.start("a", "127.0.0.1", [*durable, "--nproc-per-node=2", "--tp=2"], [*command, "9"])
    assert cluster.exit_code("a") == 0
    with Cluster(tmp_path / "second", patience_s=cluster.patience_s) as second:
        second.start("a", "127.0.0.1", [*durable, "--nproc-per-node=3"], [*command, "14"])
        assert second.exit_code("a") == 0
        begun = re.search(r"from step (\d+): no living nodes hold a snapshot, .* is read", second.log("a"))
        assert begun is not None
    assert len(losses(tmp_path)) == 9 + 14 - int(begun[1])
    newest = max((tmp_path / "ck").glob("step-*"))
    plain = {"model": {"0.weight": torch.zeros(64, 16, dtype=torch.float64)}, "step": 0}
    dcp.load(plain, checkpoint_id=str(newest), no_dist=True)  # under the names that dcp.save was given
    assert plain["step"] == int(newest.name.removeprefix("step-")) > 9
    assert plain["model"]["0.weight"].abs().min() > 0
    check(losses(tmp_path), alone[:14])


CHANGING = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tenplexrun

dist.init_process_group("gloo")
state = {"a": torch.ones(3), "b": torch.ones(5), "consumed": 0}
dcp.save(state, storage_writer=tenplexrun.StorageWriter())
changes = {"less": {"b": None}, "other": {"b": None, "c": torch.ones(5)}, "word": {"consumed": "many"}}
for name, change in changes.items():
    changed = {key: value for key, value in {**state, **change}.items() if value is not None}
    try:
        dcp.save(changed, storage_writer=tenplexrun.StorageWriter())
    except dcp.CheckpointException as error:
        print(f"{name}: {error.failures[0][0]!r}")
"""


def test_what_cannot_be_saved_is_said_by_the_save(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "changing.py").write_text(CHANGING)
    cluster.start("a", "127.0.0.1", ["--nnodes=1", "--nproc-per-node=1"], [str(tmp_path / "changing.py")])
    assert cluster.exit_code("a") == 0
    word = "`consumed`, the samples read so far, should be a whole number"
    for name, message in {"less": "(b came or went)", "other": "(b came or went)", "word": word}.items():
        assert re.search(rf"{name}: LayoutError\(.*{re.escape(message)}", cluster.log("a"))


def test_without_the_launcher_it_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tenplexrun; tenplexrun.StorageWriter()"],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 1
    assert "start the script with `tenplexrun`, or give torch.distributed.checkpoint a path" in done.stderr
