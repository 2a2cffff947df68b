"""Faults exactly while state is written, sealed, replicated or moved: the job goes on, and to the bit as without them.

Two stages on two nodes, with a state that is large enough to be caught in the middle.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import pytest
from arena_watch import ArenaWatch, in_mid_move
from cluster import Cluster

from .test_job import end, process
from .test_replicas import losses, uninterrupted

GPT = [*gpt.GPT, "--dim=384", "--seq-len=16", "--pause=0"]
FLAGS = ["--pp=2", "--max-restarts=30", "--rdzv-conf=last_call_timeout=20"]
PAIR = ["--nnodes=2:2", "--nproc-per-node=1", *FLAGS]
STORE = "tenplexrun.store.server"


class Job:
    """Nodes of one job, named as they come, and what it has computed."""

    def __init__(self, cluster: Cluster, record: Path) -> None:
        self.cluster, self._record = cluster, record
        self.names = iter("abcdefghijkl")

    def add(self) -> str:
        name = next(self.names)
        address = f"127.0.0.{ord(name) - ord('a') + 1}"
        self.cluster.start(name, address, PAIR, [*GPT, f"--metrics-dir={self._record}"])
        self.cluster.event(name, "joined")
        return name

    def folder(self, name: str) -> Path:
        return Path(self.cluster.event(name, "started")["dir"])

    def watch(self, name: str) -> ArenaWatch:
        return ArenaWatch(self.folder(name))

    def store(self, name: str) -> int:
        return process(self.cluster, name, STORE)

    def rounds(self) -> list[dict[str, Any]]:
        """Those that began to run."""
        return [event for event in self.cluster.events(kind="round") if event["phase"] == "running"]

    def runs(self) -> int:
        """The number of the newest of them."""
        return max((event["number"] for event in self.rounds()), default=-1)

    def repeated(self) -> dict[int, set[float]]:
        """End it. The losses; steps that were run again have the same to the bit."""
        end(self.cluster)
        assert all(event["step"] > 0 for event in self.rounds() if event["number"] > 0), "went on from memory"
        found = losses(self._record)
        assert {len(values) for values in found.values()} == {1}
        return found

    def check(self, tmp_path: Path) -> None:
        """End it. Each loss, in whichever round, is to the bit that of the same step without any fault."""
        found = self.repeated()
        expected = uninterrupted(tmp_path, last := max(found) - 1, GPT)
        assert {step: found[step] for step in range(last)} == {step: expected[step] for step in range(last)}


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Job:
    return Job(cluster, tmp_path / "job")


MOMENTS = [ArenaWatch.in_mid_write, ArenaWatch.just_written, ArenaWatch.in_mid_replication]


@pytest.mark.slow
def test_workers_and_stores_are_killed_while_state_is_written_sealed_and_replicated(job: Job, tmp_path: Path) -> None:
    job.add()
    job.add()
    job.cluster.wait_round(0, 2)
    job.cluster.progress(2)
    for number, moment in enumerate(MOMENTS * 2):
        victim = job.cluster.workers("b")[0] if number % 2 else job.store("b")
        before = job.runs()
        moment(job.watch("b"))
        os.kill(victim, signal.SIGKILL)
        if number % 2:
            job.cluster.wait(lambda n=before + 1: job.runs() == n, "the next round")
        else:
            deaths = number // 2 + 1
            job.cluster.wait(lambda d=deaths: len(job.cluster.events("b", "process_ended")) == d, "the death")
        job.cluster.progress(2)
    job.check(tmp_path)


@pytest.mark.slow
def test_agents_are_killed_while_state_is_written_sealed_and_replicated(job: Job, tmp_path: Path) -> None:
    """A spare takes the lost node's place each time, with what the other one keeps for it."""
    job.add()
    lost, spare = job.add(), job.add()
    for number, moment in enumerate(MOMENTS):
        job.cluster.wait_round(number, 2)
        job.cluster.progress(2)
        moment(job.watch(lost))
        os.kill(job.cluster.agents[lost].pid, signal.SIGKILL)
        job.cluster.agents.pop(lost).wait()
        lost, spare = spare, job.add()
    job.cluster.wait_round(len(MOMENTS), 2)
    job.cluster.progress(2)
    job.check(tmp_path)


def kill_source(job: Job, puller: str) -> None:
    os.kill(job.store("a"), signal.SIGKILL)


def kill_puller(job: Job, puller: str) -> None:
    os.kill(job.store(puller), signal.SIGKILL)


def kill_worker(job: Job, puller: str) -> None:
    os.kill(job.cluster.workers(puller)[0], signal.SIGKILL)


def kill_agent(job: Job, puller: str) -> None:
    os.kill(job.cluster.agents[puller].pid, signal.SIGKILL)
    job.cluster.agents.pop(puller).wait()


def stop_source(job: Job, puller: str) -> None:
    """Longer than anybody waits for progress."""
    pid = job.store("a")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(30.0)
    assert not job.cluster.events(puller, "moved")
    os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kill_source, kill_puller, kill_worker, kill_agent, stop_source])
def test_a_move_is_disturbed_in_its_middle(job: Job, fault: Callable[[Job, str], None], tmp_path: Path) -> None:
    """A spare pulls a lost node's stage from the only node that has it."""
    job.add()
    lost, puller = job.add(), job.add()
    job.cluster.wait_round(0, 2)
    job.cluster.progress(2)
    job.cluster.kill_node(lost)
    in_mid_move(job.folder(puller))
    fault(job, puller)
    assert fault is stop_source or not job.cluster.events(puller, "moved"), "it came too late"
    if fault is kill_agent:
        job.add()
    job.cluster.wait(lambda: committed_in(job, job.runs()) and job.runs() >= 1, "commits after it")
    job.cluster.progress(2)
    job.check(tmp_path)


def committed_in(job: Job, number: int) -> bool:
    return any(event["round"] == number for event in job.cluster.events(kind="committed"))


@pytest.mark.slow
def test_a_store_that_hangs_is_named_and_replaced_and_still_holds_all(job: Job) -> None:
    job.add()
    job.add()
    job.cluster.wait_round(0, 2)
    job.cluster.progress(2)
    os.kill(job.store("b"), signal.SIGSTOP)
    assert "hangs" in job.cluster.event("b", "store_failed")["message"]
    assert "the tensor store of this node: it hangs, and is started anew" in job.cluster.log("b")
    assert job.cluster.event("b", "process_ended")["name"] == "store"
    job.cluster.progress(2)
    assert job.runs() == 0, "no worker has noticed"
    before = job.cluster.committed()
    job.cluster.kill_worker("b", 0)
    assert job.cluster.wait_round(1, 2)["step"] >= before
    job.repeated()
