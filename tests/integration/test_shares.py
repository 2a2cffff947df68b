"""Uneven shares with padding and weights give one rank's gradient, in real torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

PROGRAM = Path(__file__).parent.parent / "programs" / "shares.py"


def test_ddp_fsdp2_and_pipelines_have_the_gradient_of_one_rank(tmp_path: Path) -> None:
    """Cases D2 and D5: no degree divides the batch, some ranks have nothing but padding."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(21, 6)))
    command = [sys.executable, str(PROGRAM), str(tmp_path / "store"), str(tmp_path / "rows.npy")]
    environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split()) == sorted(["0", "ok", "1", "ok", "2", "ok", "3", "ok"])
