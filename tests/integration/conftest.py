"""A warm pool for synchronous tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from scratch import scratch_dir

from tenplexrun.agent.pool import Pool
from tenplexrun.agent.processes import Processes
from tenplexrun.agent.script import Command
from tenplexrun.ports import WorkerExit, WorkerSpec
from tenplexrun.vfs.mounts import clear

T = TypeVar("T")
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Driver:
    """Its event loop runs in a thread."""

    def __init__(self, **options: Any) -> None:
        self._options = options  # of the pool
        self.node_dir = scratch_dir()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        try:
            self.processes = self.do(Processes.start(self.node_dir))
        except BaseException:
            self._stop_loop()
            shutil.rmtree(self.node_dir, ignore_errors=True)
            raise
        try:
            self.pool = self.do(self._start())
        except BaseException:
            self._end()
            raise

    async def _start(self) -> Pool:
        pool = Pool(self.processes, Command("script", ("none.py",), "/"), **self._options)
        await pool.start()
        await pool.ready()
        return pool

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, DEADLINE_S), self.loop).result()

    def spawn(self, command: Command, envs: Sequence[Mapping[str, str]], host_store: bool = False) -> list[int]:
        """One worker for each environment; their output goes to out.N and err.N in the command's directory."""
        self.pool.command = command
        flags = os.O_CREAT | os.O_RDWR | os.O_TRUNC
        files = [[os.open(f"{command.cwd}/{name}.{n}", flags) for name in ("out", "err")] for n in range(len(envs))]
        try:
            specs = [WorkerSpec(n, env, *files[n]) for n, env in enumerate(envs)]
            return self.do(self.pool.spawn(specs, host_store))
        finally:
            for file in [file for pair in files for file in pair]:
                os.close(file)

    def exit(self) -> WorkerExit:
        return self.do(self.pool.exits.get())

    def run(self, command: Command, envs: Sequence[Mapping[str, str]], host_store: bool = False) -> list[Outcome]:
        """Run workers to their ends, sweep, and tell how they ended."""
        pids = self.spawn(command, envs, host_store)
        codes: dict[int, int] = {}
        try:
            while len(codes) < len(pids):
                ended = self.exit()
                codes[ended.pid] = ended.code
        except TimeoutError:
            said = "\n".join(Path(command.cwd, f"err.{n}").read_text() for n in range(len(envs)))
            pytest.fail(f"of the workers {pids} only {codes} have ended; they said:\n{said}")
        finally:
            self.do(self.pool.sweep())
        texts = [[Path(command.cwd, f"{name}.{n}").read_text() for name in ("out", "err")] for n in range(len(envs))]
        return [Outcome(codes[pid], *text) for pid, text in zip(pids, texts, strict=True)]

    def fresh(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Outcome:
        """The same in a fresh interpreter, as torchrun starts it."""
        argv = [sys.executable, "-u", *arguments]
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        return Outcome(done.returncode, done.stdout, done.stderr)

    def living(self) -> set[int]:
        """Processes with the node directory in the environment they were started with (forks keep their parent's)."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[0]
                if state != b"Z" and str(self.node_dir).encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.add(int(name))
            except OSError:
                continue
        return found

    def children_of_pool(self) -> set[int]:
        """Living direct children of the pool process."""
        guardian = self.processes._process.pid
        [pool] = [pid for pid, parent in self._parents().items() if parent == guardian]
        return {pid for pid, parent in self._parents().items() if parent == pool}

    def _parents(self) -> dict[int, int]:
        found = {}
        for pid in self.living():
            with contextlib.suppress(OSError):
                found[pid] = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.01)

    def close(self) -> None:
        self.do(self.pool.close())
        self._end()

    def _end(self) -> None:
        try:
            self.do(self.processes.close())
        finally:
            self._stop_loop()
        assert not self.node_dir.exists()

    def _stop_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def new_driver() -> type[Driver]:
    return Driver


@pytest.fixture
def without_torch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here on can import neither torch nor numpy."""
    stubs = tmp_path_factory.mktemp("stubs")
    for name in ("torch", "numpy"):
        (stubs / f"{name}.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", str(stubs))


@pytest.fixture
def light_driver(without_torch: None) -> Iterator[Driver]:
    """Its forks start and end faster."""
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture
def new_cold_driver() -> Iterator[Driver]:
    driver = Driver(cold=True)
    yield driver
    driver.close()


@pytest.fixture
def new_learning_driver(without_torch: None) -> Iterator[tuple[Driver, list[Sequence[str]]]]:
    """And what its pool says it has learnt."""
    learnt: list[Sequence[str]] = []
    driver = Driver(on_learnt=lambda modules, refused: learnt.append(modules))
    yield driver, learnt
    driver.close()


@pytest.fixture
def preloading_driver(without_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "spoils_forks.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{tmp_path / 'more'}")
    driver = Driver(preload=["spoils_forks", "not_there_at_all", "iniconfig"])
    yield driver
    driver.close()


@pytest.fixture
def env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def home() -> Iterator[Path]:
    """A node directory for a view process."""
    home = scratch_dir()
    yield home
    clear(home / "view")
    shutil.rmtree(home)
