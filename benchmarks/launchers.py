"""What the benchmarks share: the launchers side by side on the same plain DDP script, and a table of goals."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "programs" / "ddp.py"
BIN = Path(sys.executable).parent
PATIENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Launcher:
    """How a job of two workers is started; `env` is set beside ours."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


US = Launcher("tenplexrun", (str(BIN / "tenplexrun"), "--nproc-per-node=2"))
TORCHRUN = Launcher("torchrun", (str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2"))
# Its default keeps one store over restarts, whose old keys make most of them fail.
TORCHRUN_CURED = Launcher("torchrun, no shared store", TORCHRUN.argv, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


class Job:
    """A launched script whose ranks append JSON lines to a file."""

    def __init__(self, launcher: Launcher, folder: Path, flags: Sequence[str], arguments: Sequence[str]) -> None:
        self.stamps_path, self.log = folder / "stamps", folder / "log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), **launcher.env}
        argv = [*launcher.argv, *flags, str(SCRIPT), f"--stamps={self.stamps_path}", *arguments]
        self.began, cpu = time.time(), os.times()
        self._cpu = cpu.children_user + cpu.children_system
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=folder)

    def stamps(self, **wanted: Any) -> list[dict[str, Any]]:
        text = self.stamps_path.read_text() if self.stamps_path.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [stamp for stamp in found if all(stamp[name] == value for name, value in wanted.items())]

    def wait(self, ready: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
        """Whether it became so in time; False also when the launcher has ended without it."""
        end = time.monotonic() + patience_s
        while not ready():
            if time.monotonic() > end or (self.process.poll() is not None and not ready()):
                return False
            time.sleep(0.002)
        return True

    def end(self) -> float:
        """Wait for the end. Returns the processor seconds of all its processes."""
        self.process.wait(PATIENCE_S)
        cpu = os.times()
        return cpu.children_user + cpu.children_system - self._cpu

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def launched(launcher: Launcher, flags: Sequence[str], arguments: Sequence[str]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="tenplexrun-bench-") as folder:
        job = Job(launcher, Path(folder), flags, arguments)
        try:
            yield job
        finally:
            job.stop()


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` may be at most `limit`; None: nothing was measured, which is a miss."""

    what: str
    value: float | None
    limit: float
    unit: str = "s"

    @property
    def met(self) -> bool:
        return self.value is not None and self.value <= self.limit


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def cell(values: Sequence[float], runs: int) -> str:
    if not values:
        return f"never (0 of {runs})"
    spread = f"{statistics.median(values):8.3f}   {min(values):8.3f} … {max(values):.3f}"
    return spread + ("" if len(values) == runs else f"   {len(values)} of {runs} runs")


def finish(name: str, goals: Sequence[Goal], data: Mapping[str, Any], check: bool) -> int:
    """Print the goals and, last, one JSON line. Returns the exit code."""
    print()
    for goal in goals:
        value = "not measured" if goal.value is None else f"{goal.value:.3f} {goal.unit}"
        print(f"{'met   ' if goal.met else 'MISSED'}  {goal.what}: {value}, goal ≤ {goal.limit:g} {goal.unit}")
    load = os.getloadavg()[0]
    record = {"benchmark": name, "load": load, "cpus": os.cpu_count(), **data}
    record["goals"] = {goal.what: {"value": goal.value, "limit": goal.limit, "met": goal.met} for goal in goals}
    print(json.dumps(record))
    return 1 if check and not all(goal.met for goal in goals) else 0
