"""How state gets to the nodes of a new round: as the planner says, by the ways that it is measured against, and while
the workers start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from gpt import GPT
from hosts import Hosts, missing

from .test_hosts import hosts
from .test_job import end
from .test_replicas import losses, uninterrupted

__all__ = ["hosts"]
WHY_NOT = missing()
FLAGS = ["--nnodes=2:2", "--nproc-per-node=1", "--pp=2", "--replicas=1", "--rdzv-conf=last_call_timeout=20"]
LARGER = [*GPT, "--dim=256"]
SLOW_MBIT = 20


def worker_events(cluster: Cluster, node: str, name: str) -> list[dict[str, Any]]:
    return [event for event in cluster.events(node, "worker") if event["name"] == name]


def moves(cluster: Cluster, number: int, nodes: int) -> dict[str, dict[str, Any]]:
    """By node, what it moved when this round started."""

    def found() -> dict[str, dict[str, Any]]:
        events = {event["node"]: event for event in cluster.events(kind="moved") if event["round"] == number}
        return events if len(events) == nodes else {}

    return dict(cluster.wait(found, f"the moves of round {number}"))


@pytest.mark.parametrize("way", [pytest.param("central", marks=pytest.mark.slow), "migrate-all"])
def test_a_way_to_measure_against_moves_more_and_gives_the_same(cluster: Cluster, tmp_path: Path, way: str) -> None:
    """Two stages on two nodes become two replicas: each node lacks half of the state."""
    record = tmp_path / "job"
    for name, address in (("a", "127.0.0.1"), ("b", "127.0.0.2")):
        cluster.start(name, address, [*FLAGS, f"--{way}"], [*GPT, f"--metrics-dir={record}"])
    cluster.wait_round(0, 2)
    cluster.progress(3)
    cluster.ctl("resize", "--pp=1")
    event = cluster.wait_round(1, 2)
    assert event["cause"] == "resize"
    cluster.progress(3)
    hub, other = (moves(cluster, 1, 2)[node] for node in event["nodes"])
    assert other["num_bytes"] == other["needed"] > other["lower_bound"] > 0
    if way == "central":
        assert hub["num_bytes"] == hub["lower_bound"] > 0
        assert hub["t"] <= other["t"], "all is on the hub before the other one has its share"
    else:
        assert hub["num_bytes"] == hub["needed"] > hub["lower_bound"] > 0
    end(cluster)
    found = losses(record)
    last = min(max(found), event["step"] + 3)
    assert last > event["step"]
    expected = uninterrupted(tmp_path, last)
    for step in range(last + 1):
        assert sorted(found[step]) == pytest.approx([*expected[step]] * len(found[step]), rel=1e-8)


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_workers_run_up_to_where_they_need_state_while_it_moves(hosts: Hosts, tmp_path: Path) -> None:
    """Over a slow link to a node that joins, by the order of its events."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    flags = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-conf=last_call_timeout=20"]
    with Cluster(tmp_path / "cluster", patience_s=150.0) as cluster:
        cluster.start("a", hosts.add("a"), flags, LARGER, env, hosts.enter("a"))
        cluster.wait_round(0, 1)
        address = hosts.add("b")
        hosts.limit("b", SLOW_MBIT)
        cluster.start("b", address, flags, LARGER, env, hosts.enter("b"))
        built = cluster.wait(lambda: worker_events(cluster, "b", "built"), "a worker that waits for its state")[0]
        assert not cluster.events("b", "moved"), "the link is too fast for this test, or nothing went on beside it"
        hosts.limit("b", 1000)
        moved, spawned = cluster.event("b", "moved"), cluster.event("b", "spawned")
        assert moved["num_bytes"] == moved["needed"]
        assert moved["began"] < spawned["t"] < built["t"] < moved["t"]
        cluster.wait(lambda: worker_events(cluster, "b", "restored"), "its state")
