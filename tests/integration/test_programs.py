"""Programs that know nothing of us: the same command under torchrun and under tenplexrun, the same final loss."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
BIN = Path(sys.executable).parent
NEEDS = {"accelerated": "accelerate", "lightning_fit": "lightning", "trainer": "transformers"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(launcher: str, program: str, cwd: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [str(BIN / launcher), "--standalone", "--nproc-per-node=2", *flags, str(PROGRAMS / f"{program}.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "cache"), **variables}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)


def final_loss(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"final loss (.*)", done.stdout)
    assert len(found) == 1, done.stdout
    return str(found[0])


@pytest.mark.parametrize("program", ["ddp", "record", "fsdp2", "accelerated", "lightning_fit", "trainer"])
def test_same_command_same_loss(program: str, tmp_path: Path) -> None:
    needed = NEEDS.get(program)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; pip install -e .[compat]")
    assert final_loss(run("tenplexrun", program, tmp_path)) == final_loss(run("torchrun", program, tmp_path))


def test_cold_start_gives_the_same(tmp_path: Path) -> None:
    cold = run("tenplexrun", "ddp", tmp_path, "--cold-start")
    assert "cold start, a restart will take seconds: asked for" in cold.stderr
    assert final_loss(cold) == final_loss(run("tenplexrun", "ddp", tmp_path))


def test_recorded_failure_is_survived_and_named(tmp_path: Path) -> None:
    done = run("tenplexrun", "record", tmp_path, "--max-restarts=1", FAIL_ONCE="1")
    assert final_loss(done) == final_loss(run("tenplexrun", "record", tmp_path))
    assert "RuntimeError: fails once" in done.stderr
