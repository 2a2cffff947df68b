"""Several nodes on one machine: each is an agent of its own on a loopback address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tenplexrun.channel import join_host_port
from tenplexrun.ctl import read_events

BIN = Path(sys.executable).parent


class ClusterError(Exception):
    """A node ended, or something did not happen in time."""


class Cluster:
    """Agents of one job. `out` gets `NAME.log` and `events-NAME.jsonl` of each node; `patience_s` bounds each wait.

    `etcd`: HOST:PORT,... of one that runs already; else the first node hosts one, and the others meet there.
    """

    def __init__(self, out: Path, run_id: str = "job", patience_s: float = 90.0, etcd: str = "") -> None:
        self.out, self.run_id, self.patience_s = out, run_id, patience_s
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoint, self._backend = etcd, "etcd" if etcd else "c10d"

    def __enter__(self) -> Cluster:
        self.out.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.agents.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(
        self,
        name: str,
        address: str,
        flags: Sequence[str],
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`within`: words before the command, which have it run on a host of its own."""
        argv = [str(BIN / "tenplexrun"), f"--rdzv-id={self.run_id}", f"--local-addr={address}"]
        argv += [f"--events={self.out / f'events-{name}.jsonl'}", *flags]
        argv += [f"--rdzv-backend={self._backend}", f"--rdzv-endpoint={self.endpoint or join_host_port(address, 0)}"]
        with (self.out / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen([*within, *argv, *command], stdout=log, stderr=log, env=env)
        if not self.endpoint:
            self.endpoint = self.event(name, "started")["endpoint"]

    def ctl(self, command: str, *args: str) -> subprocess.CompletedProcess[str]:
        argv = [str(BIN / "tenplexctl"), command, f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}", *args]
        return subprocess.run(argv, capture_output=True, text=True, timeout=self.patience_s)

    # --- faults -----------------------------------------------------------------------------------------------

    def workers(self, name: str) -> list[int]:
        """Pids of the workers that a node has forked last."""
        return list(self.event(name, "spawned")["pids"])

    def kill_worker(self, name: str, index: int = 1) -> int:
        pid = self.workers(name)[index]
        self.injected(f"worker {pid} of node {name} killed")
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_node(self, name: str) -> int:
        """SIGKILL agent, guardian, store, view, pool and workers at once, as if the power had gone."""
        pids = descendants(self.agents[name].pid)
        self.injected(f"node {name} killed")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.agents.pop(name).wait()
        return len(pids)

    def injected(self, what: str) -> None:
        """Note when a fault was made, so that the report can tell how long it took to be noticed."""
        with (self.out / "events-injected.jsonl").open("a") as file:
            file.write(json.dumps({"t": time.time(), "node": "-", "event": "injected", "what": what}) + "\n")

    # --- watching ---------------------------------------------------------------------------------------------

    def events(self, name: str = "*", kind: str | None = None) -> list[dict[str, Any]]:
        paths = sorted(str(path) for path in self.out.glob(f"events-{name}.jsonl"))
        return [event for event in read_events(paths) if kind is None or event["event"] == kind]

    def event(self, name: str, kind: str) -> dict[str, Any]:
        """The newest event of this kind on a node; waits for the first."""
        return self.wait(lambda: self.events(name, kind), f"event {kind!r} of node {name}")[-1]

    def wait_round(self, number: int, nodes: int) -> dict[str, Any]:
        """Wait until this round has done its first step on as many nodes. Returns the event of its beginning."""

        def ready() -> dict[str, Any] | None:
            events = self.events()
            runs = [e for e in events if e["event"] == "round" and e["phase"] == "running" and e["number"] == number]
            stepped = any(e["event"] == "worker" and e["name"] == "first_step" and e["round"] == number for e in events)
            return runs[0] if runs and len(runs[0]["nodes"]) == nodes and stepped else None

        return dict(self.wait(ready, f"round {number} on {nodes} node(s)"))

    def progress(self, steps: int) -> None:
        """Wait until as many more steps are committed."""
        start = self.committed()
        self.wait(lambda: self.committed() >= start + steps, f"{steps} more steps")

    def committed(self) -> int:
        return max((int(event["step"]) for event in self.events(kind="committed")), default=0)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until the condition gives something. Raises ClusterError when a node ends first, or nothing happens
        any more."""
        deadline, size = time.monotonic() + self.patience_s, 0
        while not (found := condition()):
            for name, process in self.agents.items():
                if process.poll() is not None and not (found := condition()):
                    log = self.out / f"{name}.log"
                    raise ClusterError(f"node {name} ended with {process.returncode} before {what}; see {log}")
            if size != (size := self._written()):
                deadline = time.monotonic() + self.patience_s
            if time.monotonic() > deadline:
                raise ClusterError(f"waited in vain for {what}; at step {self.committed()}, see the logs in {self.out}")
            time.sleep(0.1)
        return found

    def exit_code(self, name: str) -> int:
        """Wait for a node to end."""
        others, process = dict(self.agents), self.agents[name]
        self.agents = {}  # these may end meanwhile
        try:
            self.wait(lambda: process.poll() is not None, f"the end of node {name}")
        finally:
            self.agents = others
        return process.wait()

    def _written(self) -> int:
        """Bytes of events and output so far: while they grow, something happens."""
        return sum(path.stat().st_size for path in self.out.glob("*.*"))

    def log(self, name: str) -> str:
        return (self.out / f"{name}.log").read_text(errors="replace")


def descendants(pid: int) -> list[int]:
    """`pid` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found
