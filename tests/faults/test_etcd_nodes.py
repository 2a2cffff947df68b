"""The etcd that the nodes host themselves: with three nodes or more, any of them may be lost."""

from __future__ import annotations

import os
import signal
import time

import gpt
import pytest
from cluster import Cluster
from hosts import Hosts, missing

GPT = [*gpt.GPT, "--micro-batch=1"]
FLAGS = ["--nproc-per-node=1", "--max-restarts=0", "--rdzv-conf=last_call_timeout=60"]


def start(cluster: Cluster, names: str) -> None:
    for name in names:
        add(cluster, name, len(names))
    cluster.wait_round(0, len(names))


def add(cluster: Cluster, name: str, most: int) -> None:
    cluster.start(name, f"127.0.0.{'abcd'.index(name) + 1}", [f"--nnodes=2:{most}", *FLAGS], GPT)


def served(cluster: Cluster, name: str) -> tuple[str, ...]:
    """Where a node knows the etcd to be served."""
    events = cluster.events(name, "etcd_served")
    return tuple(events[-1]["endpoints"]) if events else ()


def hosts(cluster: Cluster, number: int, without: str = "-") -> list[str]:
    """Wait until all nodes know as many servers, none of them on the node `without`. Returns the nodes that host."""
    address = f"127.0.0.{'abcd'.find(without) + 1}:"

    def agreed() -> list[str] | None:
        lists = {served(cluster, name) for name in cluster.agents}
        [first, *others] = lists
        if others or len(first) != number or any(endpoint.startswith(address) for endpoint in first):
            return None
        return ["abcd"[int(endpoint.split(":")[0][-1]) - 1] for endpoint in first]

    return list(cluster.wait(agreed, f"an etcd of {number}"))


def lose(cluster: Cluster, name: str, round_number: int) -> None:
    """kill -9 of a whole node: the others go on, and none of their state is lost."""
    committed, began = cluster.committed(), time.monotonic()
    cluster.kill_node(name)
    round_ = cluster.wait_round(round_number, len(cluster.agents))
    print(f"{name} lost, round {round_number} runs after {time.monotonic() - began:.1f} s")
    assert round_["cause"] == "node_lost"
    assert round_["step"] >= committed > 0
    cluster.progress(3)
    assert not cluster.events(kind="fenced")


def end(cluster: Cluster) -> None:
    next(iter(cluster.agents.values())).send_signal(signal.SIGINT)
    began = time.monotonic()
    assert {cluster.exit_code(name) for name in cluster.agents} == {130}
    print(f"ended after {time.monotonic() - began:.1f} s")


def test_of_three_nodes_the_one_that_the_endpoint_names_is_lost(cluster: Cluster) -> None:
    start(cluster, "abc")
    assert hosts(cluster, 3) == ["a", "b", "c"]
    lose(cluster, "a", 1)
    [left] = hosts(cluster, 1)
    cluster.endpoint = cluster.events(kind="etcd_served")[-1]["endpoints"][0]
    assert cluster.ctl("status").stdout.count("ranks") == 2
    add(cluster, "d", 3)
    cluster.wait_round(2, 3)
    assert left in hosts(cluster, 3)
    end(cluster)


@pytest.mark.slow
def test_of_four_nodes_one_after_the_other_is_lost(cluster: Cluster) -> None:
    start(cluster, "abcd")
    first = hosts(cluster, 3)
    lose(cluster, "a", 1)
    second = hosts(cluster, 3, without="a")
    assert {*second} == {"b", "c", "d"}
    lose(cluster, next(name for name in second if name in first), 2)
    hosts(cluster, 1)
    end(cluster)


@pytest.mark.slow
def test_a_host_that_is_told_to_leave_is_replaced_first(cluster: Cluster) -> None:
    start(cluster, "abcd")
    hosts(cluster, 3)
    cluster.agents["a"].send_signal(signal.SIGTERM)
    assert cluster.agents.pop("a").wait(cluster.patience_s) == 143
    assert cluster.wait_round(1, 3)["cause"] == "node_left"
    assert hosts(cluster, 3, without="a") == ["b", "c", "d"]
    end(cluster)


@pytest.mark.slow
def test_the_host_that_is_lost_before_the_etcd_has_grown_ends_the_job(cluster: Cluster) -> None:
    start(cluster, "abc")
    cluster.wait(lambda: cluster.events(kind="etcd_hosted"), "a second server")
    cluster.kill_node("a")
    assert {cluster.exit_code(name) for name in "bc"} == {70}
    assert "was the node that hosts it lost?" in cluster.log("b")


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_host_whose_cable_is_pulled(cluster: Cluster) -> None:
    """Nothing is refused: servers and agents find out by silence."""
    with Hosts() as apart:
        for name in "abc":
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
            cluster.start(name, apart.add(name), ["--nnodes=2:3", *FLAGS], GPT, env, apart.enter(name))
        cluster.wait_round(0, 3)
        cluster.wait(lambda: all(len(served(cluster, name)) == 3 for name in "abc"), "an etcd of 3")
        committed, began = cluster.committed(), time.monotonic()
        apart.unplug("a")
        round_ = cluster.wait_round(1, 2)
        print(f"a silent, round 1 runs after {time.monotonic() - began:.1f} s")
        assert round_["step"] >= committed
        cluster.progress(3)
        cluster.wait(lambda: all(len(served(cluster, name)) == 1 for name in "bc"), "an etcd of 1")
        apart.plug("a")
        cluster.wait_round(2, 3)
        cluster.progress(3)
        end(cluster)
