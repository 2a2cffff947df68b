"""State between nodes: two stores over loopback, and four hosts (network namespaces) on links of 1 Gbit/s.

    goal (medians)                                                             limit
    1 GiB, one store to another: raw's rate / tenplexrun's                     1/0.7
    bytes moved / the least that must be                                       1
    four hosts, tp4 → dp2·tp2: seconds / (busiest host's bytes / link rate)    1.15
    four hosts: tenplexrun / everything by way of one node                     1/3

Measured: `pull` of a real store process, from the order to the snapshot that is listed there, with every checksum
proved; the file that it goes to is new. raw: two processes, sendfile → recv_into by as many streams, from the same slot
to memory that exists, nothing verified; "to a new file": that is reserved in the time, as a pull's must be. One node:
`core.baselines.central`, carried out by the same stores. The hosts need root and iproute2, else that part is not
measured.

    benchmarks/transfer.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import states
from launchers import ROOT, Goal, cell, finish, median

from tenplexrun.core import baselines
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import Fetch, plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.snapshots import Claim
from tenplexrun.store.client import StoreClient
from tenplexrun.store.sockets import tune
from tenplexrun.store.transfer import STREAMS_PER_SOURCE

ONE, TP4, DP2_TP2 = ParallelConfig(), ParallelConfig(tp=4), ParallelConfig(dp=2, tp=2)
LINK_MBIT = 1000
HOSTS = ("a", "b", "c", "d")
PLACES = ("a", "c", "b", "d")
"""Which host has each rank of dp2·tp2: half of it is there already."""
Held = dict[str, Any]


class Node:
    """A store that holds `ranks` of a layout. Each `seal` makes a new snapshot of them, and forgets the one before."""

    def __init__(self, store: states.Store, layout: Layout) -> None:
        self.store, self._layout, self.step = store, layout, 0

    async def open(self, config: ParallelConfig, ranks: Sequence[int]) -> None:
        self.client: StoreClient = await self.store.client()
        if ranks:
            opened = await self.client.open_round(0, self._layout.to_json(), config.to_json(), ranks)
            self.slots = opened["slots"]
            for path in self.slots:
                states.fill_slot(path, self._layout, config, ranks)

    async def seal(self, step: int) -> dict[str, Any]:
        snapshot = await self.client.seal(0, step, step % 2, {"step": step, "consumed": step})
        await self.client.commit(0, step)
        return snapshot

    async def pull(self, snapshot: dict[str, Any], claim: Claim, fetches: Sequence[Fetch], addresses: Any) -> int:
        found = [{**one.to_json(), "address": addresses[one.source]} for one in fetches]
        report = await self.client.pull(snapshot, self._layout.to_json(), claim.to_json(), found)
        return int(report["num_bytes"])


# -- two stores -------------------------------------------------------------------------------------------------


def send(held: Held, path: str, num_bytes: int) -> None:
    """Connect to the receiver, and send each stream its part of the file."""
    file = os.open(path, os.O_RDONLY)
    share = num_bytes // STREAMS_PER_SOURCE

    def stream(number: int) -> None:
        with socket.create_connection(("127.0.0.1", held["port"])) as sock:
            tune(sock, 60.0)
            sock.setblocking(True)
            offset, stop = number * share, (number + 1) * share
            sock.sendall(bytes([number]))
            while offset < stop:
                offset += os.sendfile(sock.fileno(), file, offset, stop - offset)

    in_threads(stream)
    os.close(file)


def listen(held: Held) -> int:
    held["listener"] = socket.create_server(("127.0.0.1", 0))
    return int(held["listener"].getsockname()[1])


def reach(held: Held, port: int) -> None:
    held["port"] = port


def receive(held: Held, path: str, num_bytes: int, new: bool) -> None:
    """Into a file in shared memory: one that exists, or a new one."""
    share = num_bytes // STREAMS_PER_SOURCE
    if new or "memory" not in held:
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(file, 0, num_bytes)
        memory = mmap.mmap(file, num_bytes)
        os.close(file)
        if new:
            os.unlink(path)
        else:
            held["memory"] = memory
    view = memoryview(memory if new else held["memory"])

    def stream(_: int) -> None:
        sock, _ = held["listener"].accept()
        with sock:
            tune(sock, 60.0)
            sock.setblocking(True)
            offset = sock.recv(1)[0] * share
            stop = offset + share
            while offset < stop:
                offset += sock.recv_into(view[offset:stop])

    in_threads(stream)


def in_threads(stream: Any) -> None:
    threads = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS_PER_SOURCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def transfer(held: Held, source: str, target: str, num_bytes: int, new: bool) -> None:
    if held["rank"] == 0:
        send(held, source, num_bytes)
    else:
        receive(held, target, num_bytes, new)


async def between_two(folder: Path, num_bytes: int, runs: int, crew: states.Crew) -> tuple[dict[str, list[float]], int]:
    """Seconds by name; the bytes that were moved beyond the least."""
    layout = states.gpt(num_bytes)
    seconds: dict[str, list[float]] = {"tenplexrun": [], "raw": [], "raw, to a new file": []}
    beyond = 0
    with states.store(folder / "a") as a, states.store(folder / "b") as b:
        source, joiner = Node(a, layout), Node(b, layout)
        await source.open(ONE, [0])
        await joiner.open(ONE, [])
        target = PTC(layout, ONE, ("b",))
        part = plan(target, {"a": PTC(layout, ONE, ("a",)).regions_on("a")}).parts["b"]
        for step in range(1, runs + 2):
            snapshot = await source.seal(step)
            began = time.monotonic()
            moved = await joiner.pull(snapshot, Claim(ONE, (0,)), part.fetches, {"a": a.address})
            found = {"tenplexrun": time.monotonic() - began}
            beyond = max(beyond, moved - part.lower_bound_bytes)
            await joiner.client.commit(0, step + 1)  # drops what came
            for name, new in (("raw", False), ("raw, to a new file", True)):
                found[name] = crew.run(transfer, source.slots[0], str(folder / "raw"), moved // 2 * 2, new)[0]
            for name, value in found.items():
                seconds[name] += [value] if step > 1 else []  # the first one warms
        for node in (source, joiner):
            await node.client.close()
    return seconds, beyond


# -- four hosts -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def four_hosts(folder: Path) -> Iterator[dict[str, states.Store]]:
    hosts = runpy.run_path(str(ROOT / "examples" / "hosts.py"))
    if reason := hosts["missing"]():
        raise NotImplementedError(reason)
    with hosts["Hosts"]() as network, contextlib.ExitStack() as stack:
        stores = {}
        for name in HOSTS:
            address = network.add(name)
            network.limit(name, LINK_MBIT)
            # without the private /dev/shm of `enter`: the slots are written from here
            prefix = ["ip", "netns", "exec", network.enter(name)[3]]
            stores[name] = stack.enter_context(states.store(folder / name, address, prefix))
        yield stores


async def between_four(
    stores: dict[str, states.Store], num_bytes: int, runs: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds by name; least possible seconds of the busiest link under the plan."""
    layout = states.gpt(num_bytes)
    nodes = {name: Node(store, layout) for name, store in stores.items()}
    for rank, name in enumerate(HOSTS):
        await nodes[name].open(TP4, [rank])
    addresses = {name: store.address for name, store in stores.items()}
    before, target = PTC(layout, TP4, HOSTS), PTC(layout, DP2_TP2, PLACES)
    holders = {name: before.regions_on(name) for name in HOSTS}
    planned, by_way = plan(target, holders), baselines.central(target, holders, HOSTS[0])
    assert planned.num_bytes == planned.lower_bound_bytes
    claims = {name: Claim(DP2_TP2, (rank,)) for rank, name in enumerate(PLACES)}

    async def all_pull(snapshot: dict[str, Any], parts: Any) -> None:
        await asyncio.gather(
            *(nodes[name].pull(snapshot, claims[name], part.fetches, addresses) for name, part in parts.items())
        )

    async def straight(snapshot: dict[str, Any]) -> None:
        await all_pull(snapshot, planned.parts)

    async def through_one(snapshot: dict[str, Any]) -> None:
        await nodes[HOSTS[0]].pull(snapshot, Claim(ONE, (0,)), by_way.gather.fetches, addresses)
        await all_pull(snapshot, by_way.scatter.parts)

    seconds: dict[str, list[float]] = {"tenplexrun": [], "by way of one node": []}
    step = 0
    for _ in range(runs):
        for name, move in zip(seconds, (straight, through_one), strict=True):
            step += 1
            snapshots = [await node.seal(step) for node in nodes.values()]
            began = time.monotonic()
            await move(snapshots[0])
            seconds[name].append(time.monotonic() - began)
    for node in nodes.values():
        await node.client.close()
    busiest = max([*planned.egress().values(), *(part.num_bytes for part in planned.parts.values())])
    return seconds, busiest / (LINK_MBIT * 1e6 / 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer runs, 64 MiB on the hosts")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    runs = 3 if args.quick else max(3, args.runs)
    on_hosts = (64 if args.quick else 192) * states.MIB
    four: dict[str, list[float]] = {}
    least = None
    with states.shared_folder(6 * states.GIB) as folder, states.crew(2) as crew:
        _, ports = crew.run(listen)
        crew.run(reach, ports[1])
        two, beyond = asyncio.run(between_two(folder / "two", states.GIB, runs, crew))
        try:
            with four_hosts(folder / "four") as stores:
                four, least = asyncio.run(between_four(stores, on_hosts, runs))
        except NotImplementedError as error:
            print(f"four hosts: not measured, {error}")
    print(f"1 GiB over loopback; {on_hosts >> 20} MiB on four hosts at {LINK_MBIT} Mbit/s; seconds\n")
    print(f"{'':26}  {'median':>8}   {'least … most'}")
    for title, seconds in (("two stores", two), ("four hosts", four)):
        print(title)
        for name, values in seconds.items():
            print(f"  {name:24}  {cell(values, runs)}")
    if least is not None:
        print(f"  {'busiest link':24}  {least:8.3f}")
    ours, hosts = median(two["tenplexrun"]), median(four.get("tenplexrun", []))
    central = median(four.get("by way of one node", []))
    goals = [
        Goal("two stores: raw's time, times", ours / median(two["raw"]), round(1 / 0.7, 3), "×"),
        Goal("bytes moved / least possible", 1 + beyond / states.GIB, 1.0, ""),
        Goal("four hosts: the busiest link's time, times", hosts / least if hosts else None, 1.15, "×"),
        Goal("four hosts: as a part of the way through one", hosts / central if hosts else None, 0.333, "×"),
    ]
    return finish("transfer", goals, {"two": two, "four": four, "busiest_link": least}, args.check)


if __name__ == "__main__":
    sys.exit(main())
