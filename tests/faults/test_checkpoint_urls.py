"""Durable checkpoints in an S3 server, and the data of the job, too."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from checkpoint_jobs import again, alone, assert_equal, complete, data, full, job, loaded, same, start, steps
from cluster import Cluster
from file_servers import S3Server, s3_bucket, s3_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return data(tmp_path)


def test_a_job_whose_data_and_checkpoints_are_in_s3(cluster: Cluster, home: Path, server: S3Server) -> None:
    """Written at one layout, read by plain torch, and gone on from at another one after the loss of all nodes."""
    bucket = s3_bucket(home)
    url, more = f"{bucket}/runs/job7", ["--data", f"{bucket}/data/"]
    flags = ["--nproc-per-node=2", "--tp=2", "--checkpoint-every=4", "--checkpoint-keep=2"]
    start(cluster, home, job(home, 9, *more), *flags, url=url)
    assert {cluster.exit_code(name) for name in "ab"} == {0}
    assert complete(home, url)[-1] == 9
    assert len(complete(home, url)) <= 2
    system, path = fsspec.url_to_fs(url)
    assert not [name for name in system.find(path) if name.endswith(".tmp") or ".trial" in name]
    assert_equal(full(home), loaded(home, f"{url}/step-000000009"))
    published = f"{path}/step-000000009/.metadata"
    system.copy(published, f"{published}.0123abcd.tmp")  # a crash while it was published leaves this,
    system.copy(published, f"{path}/step-000000050/.metadata.0123abcd.tmp")  # and one before it that
    with again(cluster, "second") as second:
        start(second, home, job(home, 14, *more), "--nproc-per-node=3", "--checkpoint-every=100", nodes=1, url=url)
        assert second.exit_code("a") == 0
        assert f"from step 9: no living nodes hold a snapshot, {url}/step-000000009 is read" in second.log("a")
    same(steps(home), alone(home, 14), range(14))


def test_an_outage_of_the_server_is_reported_and_training_goes_on(
    cluster: Cluster, home: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    url = f"{s3_bucket()}/ck"
    start(cluster, home, job(home, 4000, "--pause", "0.1"), "--checkpoint-every=3", "--nproc-per-node=1", url=url)
    cluster.wait(lambda: complete(home, url), "a checkpoint")
    server.stop()
    cluster.wait(lambda: cluster.events(kind="checkpoint_given_up"), "a failed write")
    step = cluster.events(kind="checkpoint_given_up")[-1]["step"]
    cluster.wait(lambda: cluster.committed() > step, "further steps")
    server.start()
    newest = complete(home, url)[-1]
    cluster.wait(lambda: complete(home, url)[-1] > newest, "a checkpoint after the outage")
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in "ab"} == {130}
    assert "the one before stays" in cluster.log("a") + cluster.log("b")
