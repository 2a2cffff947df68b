"""An etcd of the user's own that goes away and comes back, under a job of two nodes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from etcd_servers import EtcdCluster, EtcdServer, scratch
from gpt import GPT

from tenplexrun.agent.sweep import sweep

FLAGS = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-conf=last_call_timeout=20"]
PATIENCE_S, LEASE_S = 150.0, 5.0

Run = Callable[[str], Cluster]


@pytest.fixture(params=["v2", "v3"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def etcd(api: str) -> Iterator[EtcdServer]:
    with scratch() as directory:
        server = EtcdServer(directory, v2=api == "v2")
        server.start()
        yield server
        server.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Starts a job of two nodes that meet at the endpoints."""
    clusters = []

    def start(endpoints: str) -> Cluster:
        cluster = Cluster(tmp_path / "cluster", patience_s=PATIENCE_S, etcd=endpoints)
        clusters.append(cluster.__enter__())
        cluster.start("a", "127.0.0.1", FLAGS, GPT)
        cluster.start("b", "127.0.0.2", FLAGS, GPT)
        cluster.wait_round(0, 2)
        return cluster

    yield start
    for cluster in clusters:
        cluster.__exit__()
    sweep()


def nothing_has_happened(cluster: Cluster) -> None:
    """Still the first round, both nodes, and it makes progress."""
    cluster.progress(3)
    rounds = {event["number"] for event in cluster.events(kind="round")}
    assert rounds == {0}, cluster.events(kind="round")
    assert not cluster.events(kind="fenced")
    assert cluster.ctl("status").stdout.count("ranks") == 2


def end(cluster: Cluster) -> None:
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in cluster.agents} == {130}


def down(etcd: EtcdServer, seconds: float) -> None:
    etcd.kill()
    time.sleep(seconds)
    etcd.start()


@pytest.mark.parametrize("api", ["v3"])
def test_a_server_without_v2_serves_a_job_and_a_short_outage_is_invisible(etcd: EtcdServer, run: Run) -> None:
    cluster = run(etcd.endpoint)
    assert {event["api"] for event in cluster.events(kind="started")} == {"v3"}
    down(etcd, 2.0)
    nothing_has_happened(cluster)
    assert not cluster.events(kind="lease_lost")
    end(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_an_outage_costs_healthy_workers_nothing(etcd: EtcdServer, run: Run, seconds: float) -> None:
    """The keys of v2 run out while it is down, and must not look like dead nodes."""
    cluster = run(etcd.endpoint)
    etcd.kill()
    time.sleep(seconds)
    before = cluster.committed()
    etcd.start()
    assert before > 0
    if seconds > 10:
        cluster.wait(lambda: "etcd is back" in cluster.log("a"), "the end of the outage")
        assert "training goes on" in cluster.log("a")
    time.sleep(LEASE_S + 1)
    nothing_has_happened(cluster)
    end(cluster)


@pytest.mark.slow
def test_a_frozen_etcd_costs_healthy_workers_nothing(etcd: EtcdServer, run: Run) -> None:
    cluster = run(etcd.endpoint)
    etcd.signal(signal.SIGSTOP)
    time.sleep(LEASE_S + 4)
    etcd.signal(signal.SIGCONT)
    time.sleep(LEASE_S + 1)
    nothing_has_happened(cluster)
    end(cluster)


@pytest.mark.slow
def test_an_etcd_that_comes_back_empty_gets_its_records_again(etcd: EtcdServer, run: Run) -> None:
    cluster = run(etcd.endpoint)
    etcd.kill()
    etcd.empty()
    etcd.start()
    cluster.wait(lambda: {e["node"] for e in cluster.events(kind="resumed")} >= _nodes(cluster), "both to be back")
    time.sleep(LEASE_S + 1)
    nothing_has_happened(cluster)
    cluster.kill_worker("b", 0)
    assert {cluster.exit_code(name) for name in cluster.agents} == {137}, "what comes later works as ever"


@pytest.mark.slow
def test_what_was_lost_in_an_outage_is_noticed_after_it(etcd: EtcdServer, run: Run) -> None:
    cluster = run(etcd.endpoint)
    etcd.kill()
    cluster.kill_node("b")
    time.sleep(LEASE_S + 2)
    etcd.start()
    cluster.wait_round(1, 1)
    cluster.progress(3)
    end(cluster)


@pytest.mark.slow
def test_without_etcd_for_good_the_workers_run_to_their_end(etcd: EtcdServer, run: Run) -> None:
    """A lost worker, or their end, needs it: then the nodes wait for a minute, say why, and end."""
    cluster = run(etcd.endpoint)
    etcd.kill()
    time.sleep(80)
    cluster.progress(3)
    assert cluster.log("b").count("training goes on") == 1
    cluster.kill_worker("b", 0)
    assert {cluster.exit_code(name) for name in cluster.agents} == {70}
    assert "cannot reach etcd" in cluster.log("b") or "etcd has been away" in cluster.log("b")


@pytest.mark.slow
def test_a_cluster_that_loses_its_leader_costs_nothing(api: str, run: Run) -> None:
    with scratch() as directory:
        servers = EtcdCluster(directory, v2=api == "v2")
        try:
            cluster = run(",".join(servers.endpoints))
            for _ in range(2):
                leader = servers.leader()
                leader.kill()
                time.sleep(5)
                nothing_has_happened(cluster)
                leader.start()
                time.sleep(3)
            end(cluster)
        finally:
            servers.kill()


def _nodes(cluster: Cluster) -> set[str]:
    return {str(event["node"]) for event in cluster.events(kind="joined")}
