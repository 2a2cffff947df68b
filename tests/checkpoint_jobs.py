"""Jobs with durable checkpoints: `programs/checkpointed.py` on some nodes, and alone in one process."""

from __future__ import annotations

import functools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import torch
from cluster import Cluster

from tenplexrun.agent.sweep import sweep

PROGRAM = str(Path(__file__).resolve().parent / "programs" / "checkpointed.py")
DATA_BYTES = 2000  # 250 samples, steps of 10
ALONE = (
    100  # steps that are run alone once, for all tests: what a job does in a step does not depend on how many follow
)


def job(home: Path, until: int, *more: str) -> list[str]:
    return [PROGRAM, str(home), str(until), *more]


def alone(home: Path, until: int, *more: str) -> dict[int, dict[str, Any]]:
    """The same in one process, without us. Returns its steps."""
    if until <= ALONE and "--save" not in more:
        return {number: one for number, one in _alone(*more).items() if number < until}
    return _run_alone(home, until, *more)


@functools.cache
def _alone(*more: str) -> dict[int, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return _run_alone(data(Path(folder)), ALONE, *more)


def _run_alone(home: Path, until: int, *more: str) -> dict[int, dict[str, Any]]:
    out = home / "alone"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    shutil.copytree(home / "data", out / "data")
    subprocess.run([sys.executable, *job(out, until, *more)], check=True, timeout=300, cwd=home)
    return steps(out)


def steps(home: Path) -> dict[int, dict[str, Any]]:
    """By step: the loss, and the samples of all dp ranks, of the newest round that has done it."""
    found: dict[int, dict[str, Any]] = {}
    paths = sorted(home.glob("losses-*.jsonl"), key=lambda path: int(path.name.split("-")[1]))
    for path in paths:
        _, number, rank = path.name.split("-")
        for line in path.read_text().splitlines():
            record = json.loads(line)
            one = found.get(record["step"])
            if one is None or one["round"] != number:  # an older round may have had more ranks
                one = found[record["step"]] = {"round": number, "loss": record["loss"], "ids": {}}
            one["ids"][rank] = record["ids"]
    for one in found.values():
        one["ids"] = [sample for _, ids in sorted(one["ids"].items()) for sample in ids]
    return found


def same(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]], numbers: Sequence[int]) -> None:
    assert sorted(found) == list(numbers)
    for number in numbers:
        assert math.isclose(found[number]["loss"], expected[number]["loss"], rel_tol=1e-9), number
        assert found[number]["ids"] == expected[number]["ids"], number


def start(
    cluster: Cluster, home: Path, command: list[str], *flags: str, nodes: int = 2, url: str | None = None
) -> None:
    common = [f"--nnodes={nodes}", f"--checkpoint-dir={url or home / 'ck'}", *flags]
    for number, name in enumerate("abc"[:nodes], start=1):
        cluster.start(name, f"127.0.0.{number}", common, command)


def again(cluster: Cluster, name: str) -> Cluster:
    """Another launch of the job, after all nodes of the one before have ended."""
    sweep()
    fresh = Cluster(cluster.out.parent / name, patience_s=cluster.patience_s)
    fresh.out.mkdir()
    return fresh


def complete(home: Path, url: str | None = None) -> list[int]:
    """Steps of the checkpoints in `url`, else in `home`."""
    system, path = fsspec.url_to_fs(url or str(home / "ck"))
    system.invalidate_cache()
    return sorted(int(name.split("/")[-2].removeprefix("step-")) for name in system.glob(f"{path}/step-*/.metadata"))


def data(home: Path) -> Path:
    """The job's folder: with the data, the losses it writes, and its checkpoints in `ck`."""
    (home / "data").mkdir()
    (home / "data" / "bytes").write_bytes(bytes((7 * index + index // 3) % 251 for index in range(DATA_BYTES)))
    return home


def loaded(home: Path, url: str) -> dict[str, Any]:
    """What plain torch loads from a checkpoint, without us."""
    (home / "loaded").mkdir(exist_ok=True)
    subprocess.run([sys.executable, *job(home / "loaded", 9, "--load", url)], check=True, timeout=300)
    return full(home / "loaded")


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Bit by bit."""
    assert ours["tensors"].keys() == theirs["tensors"].keys()
    for name, tensor in ours["tensors"].items():
        assert tensor.dtype == theirs["tensors"][name].dtype, name
        assert torch.equal(tensor, theirs["tensors"][name]), name
    assert ours["groups"] == theirs["groups"]


def full(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path / "full.pt")
    return found
