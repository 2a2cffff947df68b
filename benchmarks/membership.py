"""How long a job stands still when nodes go and come, and how long a lone first node waits for others.

    goal                                                                  limit
    kill -9 of a node's whole tree → first step of the survivor, median   2.5 s
    the same / torchrun's with tuned rdzv-conf, medians                   1/3
    stall of the running workers when a node joins, median                0.5 s
    a lone first node of --nnodes 1:2 → its first step, median            5 s

The script is plain DDP on gloo (tests/programs/ddp.py), one worker a node, so a join has no state to move: what is left
of "0.5 s + bytes of the busiest node / link rate" is 0.5 s. Both launchers get the same command line, --nnodes 1:2 and
the c10d backend, whose endpoint the first node hosts; ours its defaults, torchrun no shared store (its default restart
fails more often than not), once with its defaults and once with the shortest time-outs that it takes. Nodes are agents
on 127.0.0.1 and 127.0.0.2. Launchers take turns; torchrun with its defaults (up to a minute a case) has one run.
So have dlrover-run and nvidia-resiliency-ext's ft_launcher, with their defaults, where `make peers` has installed them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launchers import BIN, ROOT, SCRIPT, Goal, Launcher, cell, finish, median

sys.path.insert(0, str(ROOT / "examples"))
from cluster import descendants

PATIENCE_S = 120.0
SETTLE_S = 1.0
MASTER_S = 20.0
STEPS = ("--steps=1000000", "--pause=0.01", "--stamp-every=1")
TUNED = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
US = Launcher("tenplexrun", (str(BIN / "tenplexrun"),))
TORCHRUN = Launcher("torchrun", (str(BIN / "torchrun"),), NO_SHARED_STORE)
TORCHRUN_TUNED = Launcher("torchrun, tuned", (*TORCHRUN.argv, f"--rdzv-conf={TUNED}"), NO_SHARED_STORE)
PEERS = ROOT / "build" / "peers" / "bin"
FT_LAUNCHER = Launcher("ft_launcher", (str(PEERS / "ft_launcher"), "--ignore-missing-fault-tol-cfg"), NO_SHARED_STORE)
DLROVER = Launcher("dlrover-run", (str(PEERS / "dlrover-run"),), NO_SHARED_STORE)
DLROVER_MASTER = (str(PEERS / "python"), "-m", "dlrover.python.master.main", "--platform=local", "--node_num=2")
LOST, JOINED, LONE = "node lost", "node joined", "lone start"

Stamp = dict[str, Any]


class Nodes:
    """The agents of one job, by address; the first one hosts the endpoint. All ranks stamp each step in one file."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher, self.folder, self.agents = launcher, folder, dict[str, subprocess.Popen[bytes]]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, address: str) -> float:
        """Returns when it was."""
        flags = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder), **self.launcher.env}
        if self.launcher is DLROVER:
            self._start_master()
            rank = str(len(self.agents) - 1)
            env |= {"DLROVER_MASTER_ADDR": self.endpoint, "NODE_NUM": "2"}
            env |= dict.fromkeys(("NODE_RANK", "WORKER_RANK", "NODE_ID", "WORKER_ID"), rank)
            flags.append(f"--node-rank={rank}")
        else:
            flags += [f"--rdzv-endpoint={self.endpoint}", f"--local-addr={address}", "--rdzv-backend=c10d"]
            flags.append("--rdzv-id=bench")
        if self.launcher is US:
            flags.append(f"--events={self.folder / f'events-{address}.jsonl'}")
        argv = [*self.launcher.argv, *flags, str(SCRIPT), f"--stamps={self.folder / 'stamps'}", *STEPS]
        with (self.folder / f"{address}.log").open("wb") as log:
            self.agents[address] = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=self.folder)
        return time.time()

    def _start_master(self) -> None:
        """Of dlrover, which its nodes expect to be there; it counts as an agent, so that it ends with them."""
        if not self.agents:
            argv = [*DLROVER_MASTER, f"--port={self.endpoint.rpartition(':')[2]}", "--job_name=bench"]
            with (self.folder / "master.log").open("wb") as log:
                self.agents["master"] = subprocess.Popen(argv, stdout=log, stderr=log, cwd=self.folder)
            time.sleep(MASTER_S)

    def kill(self, address: str) -> float:
        """SIGKILL all its processes, as if its power had gone. Returns when it was."""
        agent = self.agents.pop(address)
        pids, killed = descendants(agent.pid), time.time()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        agent.wait()
        return killed

    def stop(self) -> None:
        for address in [*self.agents]:
            self.kill(address)

    def stamps(self) -> list[Stamp]:
        path = self.folder / "stamps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def begun(self, ranks: int, after: float = 0.0) -> float | None:
        """When the last of so many workers, of one round that began after that time, ended its first step."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            first = [stamp for stamp in self.stamps() if stamp["step"] == 0 and stamp["t"] > after]
            if {stamp["rank"] for stamp in first} >= set(range(ranks)):
                return float(max(stamp["t"] for stamp in first))
            time.sleep(0.02)
        return None

    def say(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log"))


@contextmanager
def job(launcher: Launcher) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="tenplexrun-bench-") as folder:
        nodes = Nodes(launcher, Path(folder))
        try:
            yield nodes
        finally:
            nodes.stop()
            time.sleep(0.2)


def once(launcher: Launcher) -> dict[str, float | None]:
    """One job: a node starts alone, another one joins, and is lost. Seconds of each; None: it never came."""
    found: dict[str, float | None] = {LONE: None, JOINED: None, LOST: None}
    with job(launcher) as nodes:
        began = nodes.start("127.0.0.1")
        first = nodes.begun(1)
        if first is None:
            raise SystemExit(f"{launcher.name} never began:\n{nodes.say()}")
        found[LONE] = first - began
        time.sleep(SETTLE_S)
        came = nodes.start("127.0.0.2")
        if (both := nodes.begun(2, after=came)) is None:
            return found
        steps = [stamp for stamp in nodes.stamps() if stamp["rank"] == 0 and stamp["t"] <= both]
        at = max(index for index, stamp in enumerate(steps) if stamp["step"] == 0)
        found[JOINED] = steps[at]["t"] - steps[at - 1]["t"]
        time.sleep(SETTLE_S)
        killed = nodes.kill("127.0.0.2")
        again = nodes.begun(1, after=killed)
        found[LOST] = None if again is None else again - killed
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: two runs of ours, one of tuned torchrun")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    launchers = [(US, 2), (TORCHRUN_TUNED, 1)] if args.quick else [(US, args.runs), (TORCHRUN_TUNED, args.runs)]
    others = [(TORCHRUN, 1), *((peer, 1) for peer in (FT_LAUNCHER, DLROVER) if Path(peer.argv[0]).exists())]
    launchers += [] if args.quick else others
    results: dict[str, list[dict[str, float | None]]] = {launcher.name: [] for launcher, _ in launchers}
    for turn in range(max(runs for _, runs in launchers)):
        for launcher, runs in launchers:
            if turn < runs:
                results[launcher.name].append(once(launcher))
    print(f"two nodes of one worker ({SCRIPT.relative_to(ROOT)}, gloo), seconds\n")
    print(f"{'':12} {'':18}  {'median':>8}   {'least … most'}")
    seconds: dict[str, dict[str, list[float]]] = {}
    for case in (LOST, JOINED, LONE):
        for name, found in results.items():
            values = [value for run in found if (value := run[case]) is not None]
            seconds.setdefault(case, {})[name] = values
            print(f"{case:12} {name:18}  {cell(values, len(found))}")
    ours, theirs = median(seconds[LOST][US.name]), median(seconds[LOST][TORCHRUN_TUNED.name])
    goals = [
        Goal("kill -9 of a node → first step of the survivor", ours, 2.5),
        Goal("as a part of tuned torchrun's", ours / theirs if ours and theirs else None, 1 / 3, "×"),
        Goal("stall when a node joins", median(seconds[JOINED][US.name]), 0.5),
        Goal("lone first node → first step", median(seconds[LONE][US.name]), 5.0),
    ]
    return finish("membership", goals, {"seconds": seconds}, args.check)


if __name__ == "__main__":
    sys.exit(main())
