"""What many nodes cost the coordination store: simulated agents against one real etcd.

    goal                                                                        limit
    requests in all while a round forms, per node, 1,000 nodes / 100 nodes      1.5 ×   (linear in total: 1)
    requests a second in steady state, per node, 1,000 nodes / 100 nodes        1.2 ×   (constant: 1)
    bytes a second in steady state, per node, 1,000 nodes / 100 nodes           1.5 ×

Each agent is a coroutine with the real coordination adapter, rendezvous, decider and lifecycle; workers, stores and
links are left out. All begin at once; then nothing happens for a while; then one node is gone and the others form the
next round. Bytes are those on the loopback of a network namespace of their own (both directions, with TCP's headers).
The limit that no design escapes: every node reads the round document, which names all nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from launchers import Goal, finish

from tenplexrun.agent import etcd as coordination
from tenplexrun.agent.decider import Decider
from tenplexrun.agent.embedded import SERVING, etcd_command, find_etcd
from tenplexrun.agent.etcd_v2 import EtcdV2
from tenplexrun.agent.etcd_v3 import EtcdV3
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.rendezvous import join_run, resume
from tenplexrun.core import lifecycle as lc
from tenplexrun.core import rounds
from tenplexrun.core.lifecycle import Lifecycle
from tenplexrun.core.membership import Settings
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Member
from tenplexrun.errors import CoordinationError
from tenplexrun.ports import KeyValue, Lease

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
PORT = 2379
AGENTS_A_PROCESS = 50  # each has a few threads, and all of a process share its interpreter lock
LEASE_S, STEADY_S, PATIENCE_S = 30.0, 30.0, 300.0  # a decider forbears for one lease, then counts who is lost
APIS = {"v2": EtcdV2, "v3": EtcdV3}


class SimulatedAgent:
    """What agent/app.py does with the store, its workers ready at once."""

    def __init__(self, index: int, num_nodes: int, api: str) -> None:
        self.member = Member(f"n{index:05}", "10.0.0.1", f"10.0.0.1:{index}", f"10.0.0.1:{index}", 8, node_rank=index)
        self.settings = Settings(num_nodes - 1, num_nodes, 3, ParallelConfig(tp=8), join_window_s=PATIENCE_S)
        self.coordination = APIS[api]([f"127.0.0.1:{PORT}"])
        self.seen: KeyValue
        self.is_last = index == num_nodes - 1  # it will be removed, and does not come back

    async def run(self) -> None:
        folder, lease = await persistently(lambda: join_run(self.coordination, "scale", self.member, LEASE_S))
        events, machine, key = EventLog(self.member.node, None), Lifecycle(self.member.node), f"{folder}/round"
        events.say = lambda sentence: None  # type: ignore[method-assign]
        decider = Decider(self.coordination, folder, self.settings, _no_layout, events, LEASE_S, Everybody)
        campaign = asyncio.ensure_future(decider.run(self.member.node, self.member.link))
        keeping = asyncio.ensure_future(self.keep(folder, lease))
        async for content in self.coordination.watch(key):
            if key in content:
                self.seen = content[key]
                await self.handle(machine, folder, lc.RoundSeen(rounds.round_from_json(json.loads(content[key].value))))
        await asyncio.gather(campaign, keeping)

    async def keep(self, folder: str, lease: Lease) -> None:
        """A crowd on a few processors is late with its leases."""
        while await lease.lost.wait() and not self.is_last:
            again = functools.partial(resume, self.coordination, "scale", folder, self.member, self.seen, LEASE_S)
            found = await persistently(again)
            if isinstance(found, str):  # the others went on without it
                return
            lease = found

    async def handle(self, machine: Lifecycle, folder: str, event: lc.Event) -> None:
        for action in machine.on(event):
            if isinstance(action, lc.Gather):
                await self.handle(machine, folder, lc.Gathered(action.round, (), 1))
            elif isinstance(action, lc.StopWorkers):
                await self.handle(machine, folder, lc.Stopped(action.round))
            elif isinstance(action, lc.SendAck):
                key, ack = f"{folder}/acks/{action.round}/{self.member.node}", json.dumps(rounds.to_json(action.ack))
                await persistently(functools.partial(self.coordination.put, key, ack))
            elif isinstance(action, lc.StartRound):
                print(action.round.number, flush=True)


class Everybody:
    """There are no links here; nobody is missed."""

    def __contains__(self, node: object) -> bool:
        return True


async def persistently(work: Callable[[], Awaitable[T]]) -> T:
    """A thousand agents on a few processors outrun their own time-outs when all begin at once."""
    while True:
        try:
            return await work()
        except CoordinationError:
            await asyncio.sleep(1.0)


async def _no_layout(digest: str, holders: Any) -> dict[str, Any]:
    raise AssertionError("nothing is held here")


async def _agents(first: int, last: int, num_nodes: int, api: str) -> None:
    await asyncio.gather(*(SimulatedAgent(index, num_nodes, api).run() for index in range(first, last)))


# --- measuring ----------------------------------------------------------------------------------------------------


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.lstrip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def requests() -> float:
    """All that the etcd has answered so far, over both APIs (a watch is one)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as answer:
        text = answer.read().decode()
    names = r"^(?:etcd_http_received_total|grpc_server_started_total)(?:\{[^}]*\})? (\S+)"
    return sum(float(value) for value in re.findall(names, text, re.MULTILINE))


class Counter:
    def __init__(self) -> None:
        self.began, self._requests, self._bytes = time.monotonic(), requests(), loopback_bytes()

    def per_node(self, num_nodes: int) -> dict[str, float]:
        seconds = time.monotonic() - self.began
        counted = (requests() - self._requests, loopback_bytes() - self._bytes)
        return {"seconds": seconds, "requests": counted[0] / num_nodes, "bytes": counted[1] / num_nodes}


class Crowd:
    """The agents' processes; each prints the number of a round that one of its agents starts."""

    def __init__(self, num_nodes: int, api: str) -> None:
        processes = -(-num_nodes // AGENTS_A_PROCESS)
        self.started: dict[int, int] = {}
        bounds = [num_nodes * part // processes for part in range(processes + 1)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--agents", str(first), str(last), str(num_nodes), api],
                stdout=subprocess.PIPE,
            )
            for first, last in itertools.pairwise(bounds)
        ]
        for process in self.processes:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)

    def wait(self, round_number: int, count: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.started.get(round_number, 0) < count:
            if time.monotonic() > end:
                raise SystemExit(f"only {self.started} of {count} agents are in round {round_number}")
            for process in self.processes:
                if process.poll() is not None:
                    raise SystemExit(f"agents ended with {process.returncode}")
                assert process.stdout is not None
                for line in (process.stdout.read() or b"").split():
                    self.started[int(line)] = self.started.get(int(line), 0) + 1
            time.sleep(0.01)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measure(num_nodes: int, api: str) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tenplexrun-bench-") as folder:
        argv = etcd_command(asyncio.run(find_etcd()), Path(folder, "data"), "127.0.0.1", PORT)
        with Path(folder, "log").open("wb") as log:
            etcd = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            while SERVING not in Path(folder, "log").read_text(errors="replace"):
                time.sleep(0.05)
            crowd = Crowd(num_nodes, api)
            try:
                return _phases(crowd, num_nodes)
            finally:
                crowd.end()
        finally:
            etcd.kill()
            etcd.wait()


def _phases(crowd: Crowd, num_nodes: int) -> dict[str, dict[str, float]]:
    forming = Counter()
    crowd.wait(0, num_nodes)
    found = {"start": forming.per_node(num_nodes)}
    time.sleep(2.0)
    quiet = Counter()
    time.sleep(STEADY_S)
    steady = quiet.per_node(num_nodes)
    found["steady, a second"] = {name: value / steady["seconds"] for name, value in steady.items()}
    changing = Counter()
    _remove(num_nodes - 1)
    crowd.wait(1, num_nodes - 1)
    found["node lost"] = changing.per_node(num_nodes)
    return found


def _remove(index: int) -> None:
    """Its member key goes; it is not told."""

    async def remove() -> None:
        store = EtcdV2([f"127.0.0.1:{PORT}"]) if API == "v2" else EtcdV3([f"127.0.0.1:{PORT}"])
        members = [key for key in await store.list("runs/scale") if key.endswith(f"/members/n{index:05}")]
        await store.delete(members[0])
        await store.close()

    asyncio.run(remove())


API = "v2"


def main() -> int:
    global API
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: 10 and 50 agents, one API")
    parser.add_argument("--agents", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if args.agents:
        first, last, num_nodes = map(int, args.agents[:3])
        # Hundreds of threads that wait for one interpreter lock ask for it 200 times a second, and do little else.
        sys.setswitchinterval(0.5)
        coordination.REQUEST_TIMEOUT_S = 20.0  # a request that is given up and made again would count twice
        with suppress(KeyboardInterrupt):
            asyncio.run(_agents(first, last, num_nodes, args.agents[3]))
        return 0
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise SystemExit("needs a network namespace of its own, to count bytes: run it as root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    sizes, apis = ([10, 50], ["v2"]) if args.quick else (args.nodes, list(APIS))
    table: dict[str, Any] = {}
    print(f"{'api':4} {'nodes':>6} {'phase':18} {'seconds':>9} {'requests':>10} {'KiB':>10}   (a node)")
    for API in apis:
        for num_nodes in sizes:
            table[f"{API} {num_nodes}"] = found = measure(num_nodes, API)
            for phase, row in found.items():
                shown = f"{row['seconds']:9.2f} {row['requests']:10.2f} {row['bytes'] / 1024:10.2f}"
                print(f"{API:4} {num_nodes:6} {phase:18} {shown}", flush=True)
    goals = []
    for api in apis:
        small, large = table[f"{api} {sizes[-2]}"], table[f"{api} {sizes[-1]}"]
        for phase, name, limit in (("start", "requests", 1.5), ("steady, a second", "requests", 1.2),
                                   ("steady, a second", "bytes", 1.5)):  # fmt: skip
            value = large[phase][name] / small[phase][name]
            goals.append(Goal(f"{api}: {name} a node, {phase}, {sizes[-1]} / {sizes[-2]} nodes", value, limit, "×"))
    return finish("scale", goals, {"nodes": table}, args.check)


if __name__ == "__main__":
    sys.exit(main())
