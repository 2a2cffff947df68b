"""Faults of a node's shared memory: a bit flips, there is too little, or none is left: it ends well, or says why."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path

import pytest
from cluster import Cluster
from gpt import GPT

from tenplexrun.errors import ArenaFullError

from .test_job import end

LARGE_GPT = [*GPT, "--dim=384", "--seq-len=16"]


def flip(folder: Path, fqn: str) -> None:
    """A bit in the middle of each copy of a tensor that a node has, as a defect of its memory would."""
    indexes = [json.loads(path.read_text()) for path in (folder / "arena").glob("snapshot-*.json")]
    for piece in [piece for index in indexes for piece in index["pieces"] if piece["fqn"] == fqn]:
        with (folder / "arena" / piece["file"]).open("r+b") as file:
            file.seek(place := piece["offset"] + piece["num_bytes"] // 2)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))


@pytest.mark.slow
@pytest.mark.parametrize("durable", [False, True])
def test_a_bit_flips_in_memory_before_a_recovery(cluster: Cluster, tmp_path: Path, durable: bool) -> None:
    """The other holder is asked; where all copies are damaged, there is the checkpoint, or step 0, and the name."""
    fqn, store = "layers.1.up.weight", tmp_path / "ck"
    flags = ["--nproc-per-node=1", "--max-restarts=5"]
    if durable:
        with Cluster(tmp_path / "before", "before", patience_s=150.0) as before:
            first = [*flags, f"--checkpoint-dir={store}", "--checkpoint-every=30"]
            before.start("z", "127.0.0.9", first, [*GPT, "--steps=30"])
            assert before.exit_code("z") == 0
        flags.append(f"--checkpoint-from={store / 'step-000000030'}")
    flags += ["--nnodes=1:2", "--snapshot-every=1000000"]
    cluster.start("a", "127.0.0.1", flags, GPT)
    cluster.wait_round(0, 1)
    cluster.start("b", "127.0.0.2", flags, GPT)
    step = cluster.wait_round(1, 2)["step"]
    assert step > 0
    folders = {name: Path(cluster.event(name, "started")["dir"]) for name in "ab"}
    flip(folders["b"], fqn)
    cluster.kill_worker("b", 0)
    assert cluster.wait_round(2, 2)["step"] == step
    moved = {name: cluster.event(name, "moved") for name in "ab"}
    assert {name: (one["round"], one["num_bytes"] > 0) for name, one in moved.items()} == {
        "a": (2, False),
        "b": (2, True),
    }
    assert f"1 regions failed their checksums and are dropped, of {fqn}" in cluster.log("b")
    for folder in folders.values():
        flip(folder, fqn)
    cluster.kill_worker("b", 0)
    event = cluster.wait_round(3, 2)
    assert event["step"] == (30 if durable else 0)
    place = (
        rf"from step {event['step']}: of round 0 step {step} no living node has a good copy of {fqn} \[0:128, 0:32\]"
    )
    assert re.search(
        place + r" \(lost or damaged on node \w+, \w+\)" + (", .* is read" if durable else ""), cluster.log("a")
    )
    end(cluster)


SHM = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=$0 shm /dev/shm && exec "$@"']
"""Followed by a size: words that give a node shared memory of its own, of that size."""


def own_shm(cluster: Cluster, size: str, *flags: str) -> Path:
    """A node with little shared memory. Returns where that is seen from here."""
    if subprocess.run([*SHM, "1m", "true"], capture_output=True).returncode:
        pytest.skip("no file system of a limited size can be mounted here")
    cluster.start("a", "127.0.0.1", ["--nproc-per-node=1", *flags], LARGE_GPT, within=[*SHM, size])
    return Path("/proc", str(cluster.agents["a"].pid), "root", "dev", "shm")  # proc(5): its root as it sees it


def test_too_little_shared_memory_ends_the_job_with_what_is_needed(cluster: Cluster) -> None:
    own_shm(cluster, "200m", "--max-restarts=0")
    assert cluster.exit_code("a") == ArenaFullError.exit_code
    assert re.search(r"shared memory is too small: .* needs 17\d{7} bytes more, \d+ are free", cluster.log("a"))


@pytest.mark.slow
def test_shared_memory_that_somebody_fills_ends_the_job_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    """Pages of the slots are reserved, those of small files are not. With room again it would go on."""
    shm = own_shm(cluster, "400m", "--max-restarts=1")
    cluster.wait_round(0, 1)
    cluster.progress(3)
    with (shm / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    assert cluster.exit_code("a") == ArenaFullError.exit_code
    assert "shared memory is too small" in cluster.log("a")
