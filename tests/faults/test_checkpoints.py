"""Durable checkpoints of whole jobs: by plain torch and back, after the loss of all nodes, torn, unwritable."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_jobs import again, alone, assert_equal, complete, data, full, job, loaded, same, start, steps
from cluster import Cluster, descendants

from tenplexrun.errors import CheckpointError, DataError, LayoutError
from tenplexrun.worker.folders import OWNER


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return data(tmp_path)


def test_plain_torch_reads_our_checkpoint_bit_by_bit(cluster: Cluster, home: Path) -> None:
    start(cluster, home, job(home, 9), "--nproc-per-node=2", "--tp=2", "--checkpoint-every=4", "--checkpoint-keep=2")
    assert {cluster.exit_code(name) for name in "ab"} == {0}
    assert complete(home)[-1] == 9, "the last step has one"
    assert len(complete(home)) <= 2
    same(steps(home), alone(home, 9), range(9))
    assert_equal(full(home), loaded(home, str(home / "ck" / "step-000000009")))


def test_a_job_starts_from_a_checkpoint_of_plain_torch(cluster: Cluster, home: Path) -> None:
    expected = alone(home, 14)
    alone(home, 9, "--save", str(home / "plain"))
    flags = ["--nproc-per-node=2", "--tp=2", f"--checkpoint-from={home / 'plain'}", "--checkpoint-every=100"]
    start(cluster, home, job(home, 14), *flags)
    assert {cluster.exit_code(name) for name in "ab"} == {0}
    assert f"from step 8: no living nodes hold a snapshot, {home / 'plain'} is read" in cluster.log("a")
    same(steps(home), expected, range(8, 14))


def test_all_nodes_are_lost_and_the_job_goes_on_at_another_layout(cluster: Cluster, home: Path) -> None:
    start(cluster, home, job(home, 2000, "--pause", "0.1"), "--nproc-per-node=2", "--tp=2", "--checkpoint-every=3")
    cluster.wait(lambda: len(complete(home)) >= 2, "two checkpoints")
    for name in "ab":
        cluster.kill_node(name)
    newest = complete(home)[-1]
    until = max(steps(home)) + 5
    with again(cluster, "second") as second:
        start(second, home, job(home, until), "--nproc-per-node=3", "--checkpoint-every=100", nodes=1)
        assert second.exit_code("a") == 0
        assert second.event("a", "loaded")["url"].endswith(f"step-{newest:09d}")
        assert re.search(rf"from step {newest}: no living nodes hold a snapshot, .* is read", second.log("a"))
    same(steps(home), alone(home, until), range(until))


@pytest.mark.slow
def test_a_kill_in_mid_write_leaves_the_one_before(cluster: Cluster, home: Path) -> None:
    command = job(home, 30, "--pause", "0.2")
    start(cluster, home, command, "--checkpoint-every=4", "--nproc-per-node=2", nodes=1)
    cluster.wait(lambda: complete(home), "a checkpoint")
    before = complete(home)
    seen: set[str] = set()

    def torn() -> bool:
        for path in (home / "ck").glob("step-*"):
            if not (path / ".metadata").exists():
                seen.add(path.name)
        return bool(seen)

    cluster.wait(torn, "a write")
    cluster.kill_node("a")
    assert complete(home)[-1] >= before[-1], "nothing older is lost for something newer that is not whole"
    whole = complete(home)[-1]
    torn_one = home / "ck" / f"step-{whole + 100:09d}"
    shutil.copytree(home / "ck" / f"step-{whole:09d}", torn_one)
    (torn_one / ".metadata").unlink()
    with again(cluster, "second") as second:
        start(second, home, command, "--nproc-per-node=2", "--checkpoint-every=100", nodes=1)
        assert second.exit_code("a") == 0
        assert second.event("a", "loaded")["url"].endswith(f"step-{whole:09d}")
    assert not torn_one.exists(), "the next write tidies up"


def test_an_unwritable_folder_is_reported_and_training_goes_on(cluster: Cluster, home: Path) -> None:
    (home / "ck").mkdir()
    start(cluster, home, job(home, 2000, "--pause", "0.1"), "--checkpoint-every=3", "--nproc-per-node=1")
    cluster.wait(lambda: complete(home), "a checkpoint")
    (home / "ck").rename(home / "away")
    (home / "ck").write_text("in the way")
    cluster.wait(lambda: cluster.events(kind="checkpoint_given_up"), "a failed write")
    step = cluster.events(kind="checkpoint_given_up")[-1]["step"]
    cluster.wait(lambda: cluster.committed() > step, "further steps")
    (home / "ck").unlink()
    (home / "away").rename(home / "ck")
    newest = complete(home)[-1]
    cluster.wait(lambda: complete(home)[-1] > newest, "a checkpoint")
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in "ab"} == {130}
    assert "the one before stays" in cluster.log("a") + cluster.log("b")
    found = steps(home)
    del found[max(found)]  # perhaps of one rank only
    same(found, alone(home, len(found)), range(len(found)))


@pytest.mark.slow
def test_a_checkpoint_process_that_is_stopped_is_started_anew(cluster: Cluster, home: Path) -> None:
    start(cluster, home, job(home, 2000, "--pause", "0.1"), "--checkpoint-every=3", "--nproc-per-node=1")
    cluster.wait(lambda: complete(home), "a checkpoint")
    [stopped] = living_checkpointer(cluster, "b")
    os.kill(stopped, signal.SIGSTOP)
    cluster.wait(lambda: "it hangs, and is started anew" in cluster.log("b"), "the end of its patience")
    newest = complete(home)[-1]
    cluster.wait(lambda: complete(home)[-1] > newest, "a checkpoint")
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in "ab"} == {130}


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_job_that_is_told_to_end_writes_a_last_checkpoint(
    cluster: Cluster, home: Path, signum: signal.Signals
) -> None:
    """SIGTERM on a node that the job cannot be without, SIGINT on any."""
    command = job(home, 2000, "--pause", "0.1")
    start(cluster, home, command, "--checkpoint-every=100000", "--nproc-per-node=1")
    cluster.progress(5)
    before = cluster.committed()
    cluster.agents["b"].send_signal(signum)
    assert {cluster.exit_code(name) for name in "ab"} == {128 + signum}
    assert complete(home)[-1] >= before


def test_a_checkpoint_process_that_dies_again_and_again_costs_no_step(cluster: Cluster, home: Path) -> None:
    start(cluster, home, job(home, 2000, "--pause", "0.1"), "--checkpoint-every=3", "--nproc-per-node=1", nodes=1)
    killed: set[int] = set()
    for _ in range(5):
        [pid] = cluster.wait(lambda: {*living_checkpointer(cluster, "a")} - killed, "a checkpoint process")
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    newest = (complete(home) or [0])[-1]
    cluster.wait(lambda: (complete(home) or [0])[-1] > newest, "a checkpoint")
    assert "it has ended with -9, and is started anew in 1.6 s" in cluster.log("a")
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert cluster.exit_code("a") == 130


def living_checkpointer(cluster: Cluster, name: str) -> list[int]:
    found = []
    for pid in descendants(cluster.agents[name].pid):
        try:
            if b"worker.checkpointer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_two_jobs_do_not_share_a_folder(cluster: Cluster, home: Path) -> None:
    """The later one has it; the other one says so, and trains on."""
    command = [*job(home, 2000, "--pause", "0.1")]
    start(cluster, home, command, "--checkpoint-every=3", "--nproc-per-node=1", nodes=1)
    cluster.wait(lambda: complete(home), "a checkpoint")
    with Cluster(home / "other", run_id="other", patience_s=cluster.patience_s) as other:
        flags = ["--nnodes=1", "--nproc-per-node=1", f"--checkpoint-dir={home / 'ck'}", "--checkpoint-every=3"]
        other.start("z", "127.0.0.9", flags, command)
        cluster.wait(lambda: "has begun to write its checkpoints" in cluster.log("a"), "the first job's notice")
        step = cluster.committed()
        other.wait(lambda: other.events(kind="checkpoint"), "a checkpoint of the second one")
        cluster.wait(lambda: cluster.committed() > step, "further steps")
        for one, name in ((other, "z"), (cluster, "a")):
            one.agents[name].send_signal(signal.SIGINT)
            assert one.exit_code(name) == 130


@pytest.mark.slow
def test_a_full_disk_is_reported_and_training_goes_on(cluster: Cluster, home: Path) -> None:
    (home / "ck").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "ck", str(home / "ck")], capture_output=True
    ).returncode:
        pytest.skip("no file system of a limited size can be mounted here")
    try:
        start(cluster, home, job(home, 8), "--checkpoint-every=3", "--nproc-per-node=1", nodes=1)
        assert cluster.exit_code("a") == 0
        assert "No space left on device; training goes on" in cluster.log("a")
        assert [path.name for path in (home / "ck").rglob("*") if path.is_file()] == [OWNER]
    finally:
        subprocess.run(["umount", str(home / "ck")], check=True)
    same(steps(home), alone(home, 8), range(8))


def damage(folder: Path) -> None:
    """One bit of a tensor in each of its data files."""
    for path in folder.glob("*.distcp"):
        data = bytearray(path.read_bytes())
        start = data.find(b"archive/data/0")
        while start >= 0:
            data[start + 80] ^= 1  # behind the name in the archive and its padding to 64 bytes
            start = data.find(b"archive/data/0", start + 100)
        path.write_bytes(bytes(data))


@pytest.mark.slow
def test_damaged_checkpoints_are_said_and_passed_over_and_another_job_is_refused(cluster: Cluster, home: Path) -> None:
    start(cluster, home, job(home, 90, "--pause", "0.2"), "--checkpoint-every=4", "--nproc-per-node=2", nodes=1)
    cluster.wait(lambda: len(complete(home)) >= 2, "two checkpoints")
    cluster.kill_node("a")
    older, newer = (home / "ck" / f"step-{step:09d}" for step in complete(home)[-2:])
    number, until = complete(home)[-2], complete(home)[-1] + 3
    for path in home.glob("losses-*"):
        path.unlink()
    damage(newer)
    flags = ["--nproc-per-node=2", "--checkpoint-every=100"]
    with again(cluster, "second") as second:
        start(second, home, job(home, until), *flags, nodes=1)
        assert second.exit_code("a") == 0
        assert "is damaged" in second.log("a") or "cannot be read" in second.log("a")
        assert second.event("a", "loaded")["url"] == str(older)
    same(steps(home), alone(home, until), range(number, until))
    with again(cluster, "other seed") as third:
        start(third, home, job(home, until + 2, "--seed", "8"), *flags, nodes=1)
        assert third.exit_code("a") == DataError.exit_code
        assert "seed was 3, is 8" in third.log("a")
    for folder in (home / "ck").glob("step-*"):
        (folder / ".metadata").write_bytes(b"nothing")
    with again(cluster, "none") as fourth:
        start(fourth, home, job(home, until + 2), *flags, nodes=1)
        assert fourth.exit_code("a") == CheckpointError.exit_code
        assert "no checkpoint can be read" in fourth.log("a")


def test_another_model_ends_the_job_with_the_names(cluster: Cluster, home: Path) -> None:
    model = {"up.weight": torch.ones(12, 8, dtype=torch.float64), "scale": torch.ones(6, dtype=torch.bfloat16)}
    dcp.save({"model": model}, checkpoint_id=str(home / "ck"), no_dist=True)
    start(cluster, home, job(home, 9), "--nproc-per-node=2", "--max-restarts=5", nodes=1)
    assert cluster.exit_code("a") == LayoutError.exit_code
    assert re.search(r"it lacks bias, optim\.bias\.exp_avg", cluster.log("a"))
    assert "scale is bfloat16 (6,) there, bfloat16 (5,) here" in cluster.log("a")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_come_and_go_and_each_checkpoint_is_whole(cluster: Cluster, home: Path) -> None:
    command = job(home, 100_000, "--pause", "0.05")
    common = ["--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=9", f"--checkpoint-dir={home / 'ck'}"]
    common += ["--checkpoint-every=2", "--checkpoint-keep=1000"]

    def more(what: str) -> None:
        seen = len(complete(home))
        cluster.wait(lambda: len(complete(home)) > seen + 3, f"checkpoints {what}")

    cluster.start("a", "127.0.0.1", common, command)
    cluster.start("b", "127.0.0.2", common, command)
    cluster.wait(lambda: [one for one in cluster.events(kind="round") if len(one["nodes"]) == 2], "a round of both")
    more("of both")
    cluster.kill_node("b")
    more("without b")
    cluster.start("c", "127.0.0.3", common, command)
    joined = cluster.event("c", "joined")["node"]
    cluster.wait(lambda: [one for one in cluster.events(kind="round") if joined in one["nodes"]], "a round with c")
    more("with c")
    cluster.kill_worker("a", 0)
    more("after the restart")
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in "ac"} == {130}
    found = steps(home)
    del found[max(found)]  # perhaps of one rank only
    same(found, alone(home, len(found)), range(len(found)))
    whole = complete(home)
    for step in whole[:: len(whole) // 5]:
        loaded(home, str(home / "ck" / f"step-{step:09d}"))
