"""However the agent of a node ends, its guardian leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scratch import scratch_dir

from tenplexrun.agent import sweep
from tenplexrun.agent.guardian import mounts_below, unmount
from tenplexrun.agent.processes import NODE_DIR_VARIABLE

DEADLINE_S = 60.0

# An agent with two processes and a warm pool whose worker leaves all kinds of relatives behind it.
AGENT = """
import asyncio, json, os, sys
from pathlib import Path
from tenplexrun.agent.pool import Pool
from tenplexrun.agent.processes import Processes
from tenplexrun.agent.script import Command
from tenplexrun.agent.sweep import make_node_dir
from tenplexrun.ports import WorkerSpec

async def main():
    root, node, url, mount, script = sys.argv[1:]
    node_dir = make_node_dir(node, Path(root))
    processes = await Processes.start(node_dir)
    requests = [["DELETE", "/v2/keys/tenplexrun/members/n", {}, ""]]
    removals = [{"url": each, "tls": {}, "requests": requests} for each in ("http://127.0.0.1:1", url)]
    processes.set_cleanup(removals, [mount] if mount else [])
    one = await processes.spawn("one", ["sleep", "1000"])
    two = await processes.spawn("two", [sys.executable, script])
    pool = Pool(processes, Command("script", (script,), os.getcwd()))
    await pool.start()
    null = os.open(os.devnull, os.O_WRONLY)
    env = {**os.environ, "TENPLEX_NODE_DIR": str(node_dir)}
    [worker] = await pool.spawn([WorkerSpec(0, env, null, null)], False)
    while len(list(Path(".").glob("ready.*"))) < 2:
        await asyncio.sleep(0.01)
    pool_pid = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    pids = {"agent": os.getpid(), "guardian": processes._process.pid, "one": one, "two": two, "pool": pool_pid}
    print(json.dumps({**pids, "worker": worker}), flush=True)
    if "END" in os.environ:
        await pool.close()
        await processes.close()
        return
    while True:
        ended = await processes.exits.get()
        print(json.dumps([ended.name, ended.code]), flush=True)
        if ended.name == "guardian":
            await processes.close()
            return

asyncio.run(main())
"""

NASTY = """
import os, signal, subprocess, time
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 1; done"], start_new_session=True)
stopped = subprocess.Popen(["sleep", "1000"], start_new_session=True)
os.kill(stopped.pid, signal.SIGSTOP)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(f"ready.{os.getpid()}", "w").close()
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""


class Requests:
    """An HTTP server that remembers what it was asked to delete."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        deleted = self.deleted

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_DELETE(self) -> None:
                deleted.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Node:
    """A running agent stand-in."""

    def __init__(self, cwd: Path, requests: Requests, end: bool = False) -> None:
        stubs = cwd / "stubs"
        stubs.mkdir()
        for name in ("torch", "numpy"):
            (stubs / f"{name}.py").write_text("raise ImportError")
        (cwd / "agent_stand_in.py").write_text(AGENT)
        (cwd / "nasty.py").write_text(NASTY)
        self.mount = _mount(cwd / "mount")
        self.root = scratch_dir()
        self.dir = self.root / "tenplexrun-0123abcd"
        self.requests = requests
        env = {**os.environ, "PYTHONPATH": str(stubs), **({"END": "1"} if end else {})}
        self.process = subprocess.Popen(
            [sys.executable, "agent_stand_in.py", str(self.root), "0123abcd", requests.url, self.mount, "nasty.py"],
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        try:
            self.pids: dict[str, int] = json.loads(self.process.stdout.readline())
            if not end:
                _mount(self.dir / "view")
        except BaseException:
            _end(self)
            raise

    def living(self) -> set[int]:
        """All that has the node directory in the environment it was started with: the agent itself has not."""
        entry = f"{NODE_DIR_VARIABLE}={self.dir}".encode()
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[0]
                if state != b"Z" and entry in Path(f"/proc/{name}/environ").read_bytes():
                    found.add(int(name))
            except OSError:
                continue
        return found

    def nothing_is_left(self) -> bool:
        return not (self.living() or self.dir.exists() or mounts_below(str(self.dir)) or mounts_below(self.mount))

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)


def _mount(point: Path) -> str:
    """A tmpfs there, or "" where mounting is not allowed."""
    point.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tenplexrun-test", str(point)], capture_output=True)
    return str(point) if done.returncode == 0 else ""


def until(condition: Callable[[], bool], what: str) -> float:
    """Seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < DEADLINE_S, what
        time.sleep(0.005)
    return time.monotonic() - start


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    yield requests
    requests.close()


@pytest.fixture
def node(tmp_path: Path, requests: Requests) -> Iterator[Node]:
    node = Node(tmp_path, requests)
    yield node
    _end(node)


def _end(node: Node) -> None:
    """Whatever the test came to."""
    for pid in node.living():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if node.process.poll() is None:
        node.process.kill()
        node.process.wait()
    assert node.process.stdout is not None
    node.process.stdout.close()
    for point in [*mounts_below(str(node.dir)), *(mounts_below(node.mount) if node.mount else [])]:
        unmount(point)
    shutil.rmtree(node.root)


def _kill_agent(node: Node) -> None:
    os.kill(node.pids["agent"], signal.SIGKILL)


def _kill_group(node: Node) -> None:
    os.killpg(node.pids["agent"], signal.SIGKILL)


def _kill_agent_with_stopped_pool(node: Node) -> None:
    os.kill(node.pids["pool"], signal.SIGSTOP)
    os.kill(node.pids["agent"], signal.SIGKILL)


def _kill_agent_and_pool(node: Node) -> None:
    os.kill(node.pids["pool"], signal.SIGKILL)
    os.kill(node.pids["agent"], signal.SIGKILL)


def _terminate(node: Node) -> None:
    os.kill(node.pids["agent"], signal.SIGTERM)


@pytest.mark.parametrize(
    "act", [_kill_agent, _kill_group, _kill_agent_with_stopped_pool, _kill_agent_and_pool, _terminate]
)
def test_nothing_outlives_the_agent(act: Callable[[Node], None], node: Node) -> None:
    assert len(node.living()) >= 14
    act(node)
    until(node.nothing_is_left, f"left: {node.living()}, {node.dir.exists()}")
    assert node.requests.deleted == ["/v2/keys/tenplexrun/members/n"]
    assert node.wait() != 0


def test_agent_cleans_up_when_its_guardian_dies(node: Node) -> None:
    os.kill(node.pids["guardian"], signal.SIGKILL)
    assert node.process.stdout is not None
    assert json.loads(node.process.stdout.readlines()[-1]) == ["guardian", -9]
    assert node.wait() == 0
    assert not node.living()
    assert not node.dir.exists()
    assert node.requests.deleted == [], "it lives, and gives its key back itself"


def test_guardian_hears_no_signals(node: Node) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(node.pids["guardian"], signum)
    time.sleep(0.2)
    assert {node.pids[name] for name in ("guardian", "one", "two", "pool", "worker")} <= node.living()
    assert node.process.poll() is None


def test_relatives_of_a_process_that_ends_are_killed_with_it(node: Node) -> None:
    before = node.living()
    os.kill(node.pids["two"], signal.SIGKILL)
    assert node.process.stdout is not None
    assert json.loads(node.process.stdout.readline()) == ["two", -9]
    until(lambda: len(before - node.living()) >= 6, "its relatives die")
    assert {node.pids[name] for name in ("guardian", "one", "pool", "worker")} <= node.living()


def test_asked_to_end_it_has_cleaned_up_before_the_agent_ends(tmp_path: Path, requests: Requests) -> None:
    node = Node(tmp_path, requests, end=True)
    try:
        assert node.wait() == 0
        assert node.nothing_is_left()
        assert requests.deleted == ["/v2/keys/tenplexrun/members/n"]
    finally:
        _end(node)


def test_sweep_removes_what_both_left_when_killed_together(node: Node) -> None:
    assert sweep.sweep(node.root) == [], "a living agent's directory is not touched"
    for name in ("guardian", "agent"):
        os.kill(node.pids[name], signal.SIGSTOP)
    for name in ("guardian", "agent"):
        os.kill(node.pids[name], signal.SIGKILL)
    node.wait()
    until(lambda: node.pids["worker"] not in node.living(), "direct children and workers die with them")
    assert node.dir.exists()
    assert node.living(), "relatives of the workers do live on"
    removed: list[Path] = []
    until(lambda: bool(removed.extend(sweep.sweep(node.root))) or node.dir in removed, "the sweep takes the directory")
    until(lambda: not node.living(), "and the relatives")
    assert not node.dir.exists()
    assert not mounts_below(str(node.dir))


def test_sweep_spares_what_is_not_provably_ours() -> None:
    root = scratch_dir()
    try:
        node_dir = sweep.make_node_dir("0123456789abcdef", root)
        assert node_dir.name == "tenplexrun-01234567"
        assert node_dir.stat().st_mode & 0o777 == 0o700
        record = json.loads((node_dir / "agent.json").read_text())
        (root / "tenplexrun-other").mkdir()
        (root / "tenplexrun-aaaaaaaa").mkdir()  # being made just now
        (root / "tenplexrun-bbbbbbbb").symlink_to("/etc")
        elsewhere = root / "tenplexrun-cccccccc"
        elsewhere.mkdir()
        (elsewhere / "agent.json").write_text(json.dumps({**record, "pid": 2**22 + 1, "pid_namespace": "pid:[1]"}))
        before = set(root.iterdir())
        assert sweep.sweep(root) == []
        assert set(root.iterdir()) == before
        os.utime(root / "tenplexrun-aaaaaaaa", (0, 0))
        reused = root / "tenplexrun-dddddddd"
        reused.mkdir()
        (reused / "agent.json").write_text(json.dumps({**record, "start": record["start"] + 1}))
        (reused / "arena").symlink_to(node_dir)
        assert sweep.sweep(root) == [root / "tenplexrun-aaaaaaaa", reused]
        assert (node_dir / "agent.json").exists()
    finally:
        shutil.rmtree(root)


def test_make_node_dir_says_why_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(sweep.ProcessError, match="cannot make the node directory"):
        sweep.make_node_dir("01234567", tmp_path / "missing")
