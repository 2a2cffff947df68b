"""Durable checkpoints between layouts: written by plain torch in several processes, and through pipeline stages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from checkpoint_jobs import again, alone, data, job, same, start, steps
from cluster import Cluster
from demo import check_losses, check_samples, read_metrics

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return data(tmp_path)


def torchrun(command: list[str], num_workers: int, env: Mapping[str, str]) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_workers}", "--standalone", *command]
    subprocess.run(argv, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


@pytest.mark.parametrize(
    ("more", "env", "flags"),
    [
        (["--sharded"], {"TENPLEX_TP": "2"}, ["--nproc-per-node=2"]),
        pytest.param([], {}, ["--nproc-per-node=2", "--tp=2"], marks=pytest.mark.slow),
        (["--fsdp"], {}, ["--nproc-per-node=3"]),
    ],
    ids=["tensor parallel", "replicas", "fsdp"],
)
def test_what_plain_torch_has_written_in_two_processes(
    cluster: Cluster, home: Path, more: list[str], env: dict[str, str], flags: list[str]
) -> None:
    """The layout that goes on is another one than the one that saved."""
    kind = [flag for flag in more if flag == "--fsdp"]
    expected = alone(home, 14, *kind)
    before, plain = home / "before", str(home / "plain")
    before.mkdir()
    torchrun(job(before, 9, *more, "--data", str(home / "data"), "--save", plain), 2, env)
    assert len(list(Path(plain).glob("__*.distcp"))) == 2, "both have written"
    flags = [*flags, f"--checkpoint-from={plain}", "--checkpoint-every=100"]
    start(cluster, home, job(home, 14, *kind), *flags, nodes=1)
    assert cluster.exit_code("a") == 0
    assert f"from step 8: no living nodes hold a snapshot, {plain} is read" in cluster.log("a")
    same(steps(home), expected, range(8, 14))


@pytest.mark.slow
def test_through_pipeline_stages_and_back(cluster: Cluster, tmp_path: Path) -> None:
    """Each launch is ended by a signal, and the next one goes on at another pp."""
    sizes = ["--dim=32", "--heads=2", "--seq-len=32", "--global-batch=4", "--micro-batch=2", "--layers=4"]
    found = tmp_path / "metrics"
    command = [GPT, *sizes, "--steps=300"]  # the learning rate follows from it
    layouts = (["--pp=2", "--nproc-per-node=2"], ["--tp=2", "--nproc-per-node=2"], ["--pp=4", "--nproc-per-node=4"])
    seen = 0
    for number, layout in enumerate(layouts):
        flags = ["--nnodes=1", *layout, f"--checkpoint-dir={tmp_path / 'ck'}", "--checkpoint-every=1000000"]
        with again(cluster, f"launch {number}") as launch:
            launch.start("a", "127.0.0.1", flags, [*command, f"--metrics-dir={found}"])
            assert launch.wait_round(0, 1)["step"] == seen, "what the one before has written last"
            launch.progress(5)
            launch.agents["a"].send_signal(signal.SIGINT)
            assert launch.exit_code("a") == 130
            seen = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "ck").glob("step-*"))
        found.rename(tmp_path / f"metrics-{number}")
    alone = [sys.executable, *command, f"--metrics-dir={tmp_path / 'alone'}"]
    subprocess.run(alone, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for number in range(len(layouts)):
        records = read_metrics(tmp_path / f"metrics-{number}")
        reference = read_metrics(tmp_path / "alone")
        check_losses(reference, records + reference, 1)
        check_samples(reference, records)
