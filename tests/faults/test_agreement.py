"""Replicas that should be equal to the bit, and are not: told by name, once, or the end of the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

from tenplexrun.errors import ReplicasDifferError

PROGRAM = str(Path(__file__).resolve().parent.parent / "programs" / "drift.py")


def start(cluster: Cluster, *flags: str, drift: int = 1 << 40) -> None:
    both = ["--nnodes=2", "--nproc-per-node=1", *flags]
    for name, host in (("a", "127.0.0.1"), ("b", "127.0.0.2")):
        cluster.start(name, host, both, [PROGRAM, "--steps=40", f"--drift={drift}"])


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_replica_that_drifts_is_told_by_name_and_once(cluster: Cluster, replicas: int) -> None:
    """The buffers of BatchNorm differ between replicas all the time, as they may."""
    start(cluster, f"--replicas={replicas}", drift=7)
    assert {cluster.exit_code(name) for name in "ab"} == {0}
    told = cluster.events(kind="replicas_differ")
    assert (told[0]["step"], told[0]["tensors"]) == (8, ["2.weight"])
    later = [name for event in told[1:] for name in event["tensors"]]
    assert len(later) == len(set(later))
    assert "2.weight" not in later
    both = "".join(map(cluster.log, "ab"))
    assert both.count("step 8: 2.weight [0:1, 0:32] differs between the replicas on nodes ") == 1


def test_strict_ends_the_job_with_the_name(cluster: Cluster) -> None:
    start(cluster, "--replica-check=strict", drift=3)
    assert {cluster.exit_code(name) for name in "ab"} == {ReplicasDifferError.exit_code}
    for name in "ab":
        assert "replicas differ at step 4, and --replica-check is strict: 2.weight" in cluster.log(name)


@pytest.mark.parametrize(("flag", "drift"), [pytest.param("warn", 1 << 40, marks=pytest.mark.slow), ("off", 3)])
def test_replicas_that_agree_and_those_that_nobody_compares_are_not_told(
    cluster: Cluster, flag: str, drift: int
) -> None:
    start(cluster, f"--replica-check={flag}", drift=drift)
    assert {cluster.exit_code(name) for name in "ab"} == {0}
    assert not cluster.events(kind="replicas_differ")
    assert not cluster.events(kind="not_compared")
