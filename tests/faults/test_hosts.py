"""Nodes on hosts that are really apart: cables are pulled, the network parts, and comes back."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from etcd_servers import scratch
from gpt import GPT
from hosts import Hosts, missing

from tenplexrun.agent.embedded import SERVING, etcd_command, find_etcd

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
FLAGS = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-conf=last_call_timeout=20"]
PORT = 2379


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


@pytest.fixture
def apart(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    """Nodes a and b, in round 0, and an etcd, each on a host of its own. No restart is left for failures of workers."""
    with scratch() as directory:
        argv = etcd_command(asyncio.run(find_etcd()), directory / "data", hosts.add("etcd"), PORT)
        log = directory / "log"
        with log.open("wb") as file:
            etcd = subprocess.Popen([*hosts.enter("etcd"), *argv], stdout=file, stderr=file)
        try:
            with Cluster(tmp_path / "cluster", patience_s=150.0, etcd=f"{hosts.address('etcd')}:{PORT}") as cluster:
                cluster.wait(lambda: SERVING in log.read_text(), "etcd")
                for name in ("a", "b"):
                    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
                    cluster.start(name, hosts.add(name), FLAGS, GPT, env, hosts.enter(name))
                cluster.wait_round(0, 2)
                yield cluster
        finally:
            etcd.kill()
            etcd.wait()


def decider(cluster: Cluster) -> str:
    events = [event for event in cluster.events() if event["event"] == "decider"]
    return next(name for name in ("a", "b") if events[-1] in cluster.events(name, "decider"))


def lost_and_found(cluster: Cluster, mend: Callable[[], None]) -> None:
    lost = cluster.wait_round(1, 1)
    assert lost["cause"] == "node_lost"
    cluster.progress(2)
    mend()
    found = cluster.wait_round(2, 2)
    assert found["cause"] == "node_joined"
    assert found["step"] >= lost["step"]
    cluster.progress(2)


def test_a_host_whose_cable_is_pulled_is_lost_and_comes_back(apart: Cluster, hosts: Hosts) -> None:
    hosts.unplug("b")
    lost_and_found(apart, lambda: hosts.plug("b"))


@pytest.mark.slow
def test_a_host_that_cannot_reach_the_store_is_lost_and_comes_back(apart: Cluster, hosts: Hosts) -> None:
    hosts.block("b", "etcd")
    lost_and_found(apart, lambda: hosts.unblock("b", "etcd"))


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["both ways", "to the decider", "from the decider"])
def test_hosts_that_reach_the_store_but_not_each_other(apart: Cluster, hosts: Hosts, ways: str) -> None:
    """All leases live on. The one that decides goes on alone; the other is a spare until it is reached again."""
    here = decider(apart)
    there = "b" if here == "a" else "a"
    pairs = {"both ways": [(here, there), (there, here)], "to the decider": [(there, here)]}
    blocked = pairs.get(ways, [(here, there)])
    for source, target in blocked:
        hosts.block(source, target)
    lost_and_found(apart, lambda: [hosts.unblock(*pair) for pair in blocked] and None)
    assert not apart.events(kind="fenced")
