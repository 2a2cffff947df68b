"""Faults on whole jobs: two or three nodes, real training, kills and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster import Cluster
from gpt import GPT

TWO = ["--nproc-per-node=1", "--max-restarts=5", "--rdzv-conf=last_call_timeout=20"]


def end(cluster: Cluster) -> None:
    """Ctrl-C on one node ends the job on all."""
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in cluster.agents} == {130}


def start_two(cluster: Cluster, nnodes: str = "1:2", command: list[str] = GPT) -> None:
    cluster.start("a", "127.0.0.1", [f"--nnodes={nnodes}", *TWO], command)
    cluster.start("b", "127.0.0.2", [f"--nnodes={nnodes}", *TWO], command)


def process(cluster: Cluster, node: str, module: str) -> int:
    """Pid of a node's process that runs `module`."""
    folder = cluster.event(node, "started")["dir"]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
            except OSError:
                continue
            if module in argv and any(folder in argument for argument in argv):
                return int(entry.name)
    raise AssertionError(f"no {module} on node {node}")


def test_a_drained_node_leaves_and_no_step_is_lost(cluster: Cluster) -> None:
    start_two(cluster)
    cluster.wait_round(0, 2)
    cluster.agents["b"].send_signal(signal.SIGTERM)
    assert cluster.agents.pop("b").wait(cluster.patience_s) == 128 + signal.SIGTERM
    event = cluster.wait_round(1, 1)
    assert event["cause"] == "node_left"
    parked = cluster.events(kind="parked")
    assert {event["step"]} == {record["step"] for record in parked}
    end(cluster)


def test_a_lost_node_that_hosted_rank_0_is_replaced_by_a_spare(cluster: Cluster) -> None:
    """The first node hosts the etcd, so the second one is made rank 0 by --node-rank."""
    cluster.start("a", "127.0.0.1", ["--nnodes=2:2", "--node-rank=1", *TWO], GPT)
    cluster.start("b", "127.0.0.2", ["--nnodes=2:2", "--node-rank=0", *TWO], GPT)
    node_b = cluster.event("b", "joined")["node"]
    assert cluster.wait_round(0, 2)["nodes"][0] == node_b
    cluster.start("c", "127.0.0.3", ["--nnodes=2:2", *TWO], GPT)
    node_c = cluster.event("c", "joined")["node"]
    cluster.progress(3)
    cluster.kill_node("b")
    event = cluster.wait_round(1, 2)
    assert event["cause"] == "node_lost"
    assert set(event["nodes"]) == {cluster.event("a", "joined")["node"], node_c}
    assert event["step"] >= 3, "went on from memory"
    end(cluster)


@pytest.mark.slow
def test_a_view_that_hangs_is_replaced_while_training_goes_on(cluster: Cluster) -> None:
    cluster.start("a", "127.0.0.1", ["--nnodes=1:1", *TWO], GPT)
    cluster.wait_round(0, 1)
    if cluster.event("a", "started")["view"] != "fuse":
        pytest.skip("no FUSE here")
    cluster.progress(2)
    shown = Path(cluster.event("a", "started")["dir"]) / "view" / "state" / "current"
    assert len(list(shown.glob("*.npy"))) > 10
    os.kill(process(cluster, "a", "tenplexrun.vfs.server"), signal.SIGSTOP)
    cluster.progress(2)
    assert "hangs" in cluster.event("a", "view_failed")["message"]
    cluster.event("a", "process_ended")
    cluster.wait(lambda: os.path.isdir(shown), "the state shown again")
    cluster.progress(2)
    end(cluster)


def test_killed_store_and_view_come_back_and_still_hold_all(cluster: Cluster) -> None:
    start_two(cluster)
    cluster.wait_round(0, 2)
    os.kill(process(cluster, "a", "tenplexrun.store.server"), signal.SIGKILL)
    os.kill(process(cluster, "a", "tenplexrun.vfs.server"), signal.SIGKILL)
    cluster.wait(lambda: len(cluster.events("a", "process_ended")) == 2, "both deaths")
    cluster.progress(5)
    before = cluster.committed()
    cluster.kill_worker("b", 0)
    event = cluster.wait_round(1, 2)
    assert event["step"] >= before
    end(cluster)


def test_without_restarts_left_all_nodes_end_with_the_first_cause(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(300)\n")
    flags = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--cold-start"]
    cluster.start("a", "127.0.0.1", flags, [str(path)])
    cluster.start("b", "127.0.0.2", flags, [str(path)])
    assert cluster.exit_code("a") == cluster.exit_code("b") == 5
    for name in ("a", "b"):
        assert "rank 1" in cluster.log(name)
        assert "no restarts left" in cluster.log(name)
    rounds = [event for event in cluster.events(kind="round") if event["phase"] == "running"]
    assert [event["number"] for event in rounds] == [0, 1]


def test_a_layout_that_cannot_be_is_refused_and_the_job_goes_on(cluster: Cluster) -> None:
    start_two(cluster)
    cluster.wait_round(0, 2)
    answer = cluster.ctl("resize", "--tp=3")
    assert answer.returncode != 0
    assert "refused:" in answer.stderr
    assert cluster.ctl("resize", "--pp=0").returncode == 2
    cluster.progress(3)
    words = re.compile(r"round 0 running (.*\n)+  in step \d+; 5 restart\(s\) left\n(.*\n)*  node .* ranks 0")
    cluster.wait(lambda: words.search(cluster.ctl("status").stdout), "the step in the status")
    assert json.loads(curl(cluster, "/v1/snapshots/newest"))["tensors"]
    lines = re.compile(r"^tenplex_round 0\ntenplex_nodes 2\n.*^tenplex_committed_step [1-9]", re.MULTILINE | re.DOTALL)
    cluster.wait(lambda: lines.search(re.sub("#.*\n", "", curl(cluster, "/metrics"))), "the agent's metrics")
    end(cluster)


def curl(cluster: Cluster, path: str) -> str:
    """What the store of some node tells a person."""
    address = re.findall(r"store (\S+)", cluster.ctl("status").stdout)[0]
    token = cluster.ctl("token").stdout.strip()
    argv = ["curl", "-sSf", "--max-time", "60", "-H", f"Authorization: Bearer {token}", f"http://{address}{path}"]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout


def test_survivors_go_on_when_a_node_dies_under_a_script_that_only_reads_variables(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(100000):\n"
        "    dist.all_reduce(torch.ones(1)); time.sleep(0.05)\n"
    )
    start_two(cluster, command=[str(path)])
    cluster.wait(lambda: len(cluster.events("*", "spawned")) == 2, "workers on both nodes")
    cluster.kill_node("b")
    cluster.wait(lambda: any(e["round"] == 1 for e in cluster.events("a", "spawned")), "a round of the survivor")
    end(cluster)


@pytest.mark.slow
def test_a_paused_agent_is_fenced_and_joins_again_as_a_new_node(cluster: Cluster) -> None:
    start_two(cluster)
    cluster.wait_round(0, 2)
    first = cluster.event("b", "joined")["node"]
    cluster.agents["b"].send_signal(signal.SIGSTOP)
    cluster.wait_round(1, 1)
    time.sleep(3)
    cluster.agents["b"].send_signal(signal.SIGCONT)
    cluster.wait(lambda: cluster.events("b", "fenced"), "the node to notice")
    event = cluster.wait_round(2, 2)
    assert first not in event["nodes"]
    cluster.progress(5)  # commits need the new name to be known
    end(cluster)


@pytest.mark.slow
def test_when_the_etcd_dies_all_nodes_end(cluster: Cluster) -> None:
    start_two(cluster)
    cluster.wait_round(0, 2)
    os.kill(process(cluster, "a", "--enable-v2"), signal.SIGKILL)
    assert cluster.exit_code("a") == 73
    assert cluster.exit_code("b") == 70
    assert "store has been away" in cluster.log("b")


def test_a_wished_layout_that_the_script_cannot_have_is_taken_back_free_of_charge(cluster: Cluster) -> None:
    """Two layers cannot be cut into four stages. Without restarts left, the job must not pay for the wish."""
    flags = ["--nproc-per-node=4", "--max-restarts=0"]
    cluster.start("a", "127.0.0.1", flags, GPT)
    cluster.wait_round(0, 1)
    cluster.ctl("resize", "--pp=4")
    event = cluster.wait_round(2, 1)
    assert event["parallel"]["pp"] == 1
    cluster.progress(3)
    end(cluster)


def test_a_log_folder_that_vanishes_fails_the_round_with_a_reason(cluster: Cluster, tmp_path: Path) -> None:
    path, logs = tmp_path / "train.py", tmp_path / "logs"
    path.write_text("import time; time.sleep(300)")
    cluster.start("a", "127.0.0.1", ["--max-restarts=1", f"--log-dir={logs}"], [str(path)])
    cluster.workers("a")
    logs.rename(tmp_path / "away")
    logs.write_text("in the way")
    cluster.kill_worker("a", 0)
    assert cluster.exit_code("a") == 73
    assert "start of the workers" in cluster.log("a")
