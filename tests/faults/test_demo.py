"""The main job: five rounds in one job, equal to one uninterrupted process; and the check can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tenplexrun.agent.sweep import sweep

DEMO = Path(__file__).resolve().parent.parent.parent / "examples" / "demo.py"


def demo(out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), f"--out={out}", "--gap=8", "--steps=200", "--pause=0.1", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    sweep()  # after the node that was killed as a whole
    return done


def test_the_main_job_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    done = demo(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [(row[1], row[2]) for row in rounds] == [
        ("start", "dp2·tp2"),
        ("worker_failed", "dp2·tp2"),
        ("node_lost", "tp2"),
        ("node_joined", "dp2·tp2"),
        ("resize", "pp2·tp2"),
    ]
    assert "largest relative difference" in done.stdout
    assert "read the single process's samples" in done.stdout


@pytest.mark.slow
def test_moments_lost_at_one_change_are_found_out(tmp_path: Path) -> None:
    """The negative control: without AdamW's moments after the third change, the losses must differ."""
    done = demo(tmp_path / "out", "--drop-moments-at-round=3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the losses are not those of the single process" in done.stderr
    assert "round 3" in done.stderr or "round 4" in done.stderr
