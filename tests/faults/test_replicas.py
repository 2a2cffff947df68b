"""State that only one node's ranks have goes on from its buddy when that node is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster import Cluster
from gpt import GPT

from .test_job import end, process

FLAGS = ["--pp=2", "--max-restarts=5", "--rdzv-conf=last_call_timeout=20"]


def losses(folder: Path) -> dict[int, set[float]]:
    """Of each step all that were recorded, in whichever round; the kill may have cut a line off."""
    found: dict[int, set[float]] = {}
    for line in [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]:
        if not line.endswith("\n"):
            continue
        record = json.loads(line)
        found.setdefault(int(record["step"]), set()).add(float(record["loss"]))
    return found


def uninterrupted(folder: Path, steps: int, script: Sequence[str] = GPT) -> dict[int, set[float]]:
    """The first steps of the same job on one node that nothing happens to."""
    with Cluster(folder / "alone", "alone", patience_s=150.0) as alone:
        command = [*script, "--pause=0", f"--metrics-dir={folder / 'metrics'}"]
        alone.start("z", "127.0.0.99", ["--nproc-per-node=2", "--pp=2"], command)
        alone.wait_round(0, 1)
        alone.wait(lambda: max(losses(folder / "metrics"), default=0) >= steps, f"{steps} steps")
        alone.agents["z"].send_signal(signal.SIGINT)
        assert alone.exit_code("z") == 130
    return losses(folder / "metrics")


def test_the_only_holder_of_a_stage_is_lost_and_a_spare_goes_on_from_its_buddy(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Two stages on two nodes, data parallelism 1: to the bit as if nothing had happened."""
    record = tmp_path / "job"
    command = [*GPT, f"--metrics-dir={record}"]
    flags = ["--nnodes=2:2", "--nproc-per-node=1", *FLAGS]
    cluster.start("a", "127.0.0.1", [*flags, "--node-rank=1"], command)
    cluster.start("b", "127.0.0.2", [*flags, "--node-rank=0"], command)
    cluster.wait_round(0, 2)
    cluster.start("c", "127.0.0.3", flags, command)
    cluster.event("c", "joined")
    cluster.progress(5)
    before = cluster.committed()
    moved = [event["num_bytes"] for event in cluster.events(kind="replicated")]
    assert moved
    assert min(moved) > 0
    cluster.wait(lambda: "committed, on 2 node(s)" in cluster.ctl("status").stdout, "the copies in the status")
    cluster.kill_node("b")
    event = cluster.wait_round(1, 2)
    assert event["step"] >= before, "went on from memory"
    cluster.progress(5)
    assert any(event["round"] == 1 for event in cluster.events(kind="replicated")), "the copies are made up again"
    end(cluster)
    found = losses(record)
    last = min(max(found), event["step"] + 5)
    expected = uninterrupted(tmp_path, last)
    assert {step: found[step] for step in range(last + 1)} == {step: expected[step] for step in range(last + 1)}


def test_fewer_nodes_go_on_from_what_they_keep_for_others_and_a_joiner_gets_its_copies(cluster: Cluster) -> None:
    """Each node has one stage of both replicas; a single one then has both stages; then a third node comes."""
    flags = ["--nnodes=1:2", "--nproc-per-node=2", *FLAGS]
    cluster.start("a", "127.0.0.1", flags, GPT)
    cluster.start("b", "127.0.0.2", flags, GPT)
    cluster.wait_round(0, 2)
    cluster.progress(3)
    before = cluster.committed()
    cluster.kill_node("b")
    event = cluster.wait_round(1, 1)
    assert event["step"] >= before
    cluster.progress(3)
    assert not [event for event in cluster.events(kind="replicated") if event["round"] == 1], "nobody is there"
    cluster.start("c", "127.0.0.3", flags, GPT)
    cluster.wait_round(2, 2)
    cluster.progress(3)
    assert len({event["node"] for event in cluster.events(kind="replicated") if event["round"] == 2}) == 2
    end(cluster)


def test_stores_that_are_killed_again_and_again_replicate_all_the_same(cluster: Cluster) -> None:
    flags = ["--nnodes=2:2", "--nproc-per-node=1", *FLAGS]
    cluster.start("a", "127.0.0.1", flags, GPT)
    cluster.start("b", "127.0.0.2", flags, GPT)
    cluster.wait_round(0, 2)
    for number in range(1, 5):
        cluster.progress(2)
        node = "ab"[number % 2]
        os.kill(process(cluster, node, "tenplexrun.store.server"), signal.SIGKILL)
        deaths = number // 2 + number % 2 if node == "b" else number // 2
        cluster.wait(lambda n=node, d=deaths: len(cluster.events(n, "process_ended")) == d, "the death")
    cluster.progress(5)
    end(cluster)


@pytest.mark.slow
def test_with_one_replica_nothing_moves_and_the_state_is_lost_with_its_node(cluster: Cluster) -> None:
    flags = ["--nnodes=1:2", "--nproc-per-node=2", "--replicas=1", *FLAGS]
    cluster.start("a", "127.0.0.1", flags, GPT)
    cluster.start("b", "127.0.0.2", flags, GPT)
    cluster.wait_round(0, 2)
    cluster.progress(3)
    assert {event["buddy"] for event in cluster.events(kind="arena")} == {0}
    cluster.kill_node("b")
    event = cluster.wait_round(1, 1)
    assert (event["step"], cluster.events(kind="replicated")) == (0, [])
    end(cluster)
