"""Workers that hang without a word: named, shown where they stand, and the job goes on from the newest snapshot."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from cluster import Cluster

TRAIN = """\
import os, signal, sys, time, torch, torch.distributed as dist, tenplexrun

job = tenplexrun.init()
mine = job.round == 0 and job.rank == 1

def loops():
    print("LOOPING", flush=True)
    while True: time.sleep(0)

class DiesInSnapshot:
    def state_dict(self):
        if mine and "dies" in sys.argv and step == 5: os.kill(os.getpid(), signal.SIGKILL)
        return {}
    def load_state_dict(self, state): pass

step = 0
model = torch.nn.Linear(4, 4)
job.state(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), scheduler=DiesInSnapshot())
loader = job.loader(f"bytes:{sys.argv[1]}?sample_bytes=8", global_batch=4, micro_batch=1)
for step, batch in job.steps(loader, until=10**6):
    if mine and "loops" in sys.argv and step == 3: loops()
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""
SOON = ["--max-restarts=1", "--rdzv-conf=lease=2,last_call_timeout=20", "--hang-timeout=4"]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "data.bin").write_bytes(bytes(4096))
    return [str(tmp_path / "train.py"), str(tmp_path / "data.bin")]


def end(cluster: Cluster) -> None:
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in cluster.agents} == {130}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(SOON, id="given"),
        pytest.param(["--max-restarts=1"], id="auto", marks=pytest.mark.slow),
        pytest.param([*SOON, "--cold-start"], id="cold", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_worker_is_named_and_shown_and_the_job_goes_on(
    flags: list[str], cluster: Cluster, command: list[str]
) -> None:
    cluster.start("a", "127.0.0.1", ["--nproc-per-node=2", *flags], command)
    cluster.wait_round(0, 1)
    cluster.progress(3)
    victim = cluster.workers("a")[1]
    os.kill(victim, signal.SIGSTOP)
    event = cluster.wait_round(1, 1)
    assert event["cause"] == "worker_hung"
    assert event["step"] >= 3, "went on from memory"
    log = cluster.log("a")
    assert re.search(
        rf"rank 1 \(local rank 1, pid {victim}\) on node \w+ \[127.0.0.1\]: hangs at step \d+: "
        r"stopped by a signal for \d+ s(, where steps took \S+ s at most)?; stacks in the output of its node",
        log,
    )
    assert "a suspected hang: the stacks of local ranks 0, 1 follow" in log
    assert log.count("train.py") >= 2, "both stacks"
    end(cluster)


def test_a_worker_that_loops_while_its_peer_waits_in_a_collective_is_the_one(
    cluster: Cluster, command: list[str], tmp_path: Path
) -> None:
    """On another node, which speaks first. Without restarts left all end with the code for it."""
    flags = [
        "--nnodes=2",
        "--rdzv-conf=lease=3,last_call_timeout=20",
        "--hang-timeout=6",
        f"--log-dir={tmp_path / 'logs'}",
    ]
    cluster.start("a", "127.0.0.1", [*flags, "--node-rank=0"], [*command, "loops"])
    cluster.start("b", "127.0.0.2", [*flags, "--node-rank=1"], [*command, "loops"])
    cluster.wait(lambda: "LOOPING" in cluster.log("b"), "the loop")
    assert {cluster.exit_code(name) for name in ("a", "b")} == {74}
    where = tmp_path / "logs" / "round_0" / "rank_1" / "stderr.log"
    for node in "ab":
        verdict = cluster.log(node).partition("ended with exit code 74: ")[2]
        assert re.match(r"rank 1 .* hangs at step 3: no progress for \d+ s", verdict), verdict
        assert f"stacks in {where}" in verdict
    assert "in loops" in where.read_text()
    assert [event["rank"] for event in cluster.events(kind="worker_hung")] == [1]


def test_a_worker_killed_in_mid_snapshot_leaves_nothing_for_a_later_round_to_be_killed_for(
    cluster: Cluster, command: list[str]
) -> None:
    cluster.start("a", "127.0.0.1", ["--nproc-per-node=2", *SOON], [*command, "dies"])
    began = cluster.wait_round(1, 1)
    assert began["cause"] == "worker_failed"

    def long_after() -> bool:
        committed = cluster.events(kind="committed")
        return bool(committed) and committed[-1]["t"] > began["t"] + 7

    cluster.wait(long_after, "more than a window")
    assert {event["number"] for event in cluster.events(kind="round")} == {0, 1}
    assert not cluster.events(kind="worker_hung")
    end(cluster)
