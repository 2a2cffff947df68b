"""State between nodes: two stores over loopback, and four hosts (network namespaces) on links of 1 Gbit/s.

    goal (medians)                                                             limit
    1 GiB, one store to another: raw's rate / tenplexrun's                     1/0.7
    bytes moved / the least that must be                                       1
    four hosts, tp4 → dp2·tp2: seconds / (busiest host's bytes / link rate)    1.15
    four hosts: tenplexrun / everything by way of one node                     1/3

Measured: `pull` of a real store process, from the order to the snapshot that is listed there, with every checksum
proved: into the free slot of a node that was there before, whose pages exist; "to a new node": into a file whose pages
come with it. raw: sendfile → recv_into by as many streams, from the same slots to memory that exists, nothing
verified; "to a new file": written there in pieces of 1 MiB. By way of one node: `core.baselines.central`, carried out
by the same stores. raw on the hosts: the same bytes between the same pairs; a link that is full carries 0.956 of its
rate (1,448 of 1,514 bytes are payload). The hosts need root and iproute2, else that part is not measured.

    benchmarks/transfer.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import raw
import states
from launchers import ROOT, Goal, cell, finish, median

from tenplexrun.core import baselines
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import Fetch, plan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.snapshots import Claim
from tenplexrun.store.client import StoreClient

ONE, TP4, DP2_TP2 = ParallelConfig(), ParallelConfig(tp=4), ParallelConfig(dp=2, tp=2)
LINK_MBIT = 1000
HOSTS = ("a", "b", "c", "d")
PLACES = ("a", "c", "b", "d")
"""Which host has each rank of dp2·tp2: half of it is there already."""


class Node:
    """A store whose node has `ranks` of a layout; none: it joins."""

    def __init__(self, store: states.Store, layout: Layout, config: ParallelConfig, ranks: Sequence[int]) -> None:
        self.store, self._layout, self._config, self._ranks = store, layout, config, ranks
        self.round = 0

    async def connect(self) -> None:
        self.client: StoreClient = await self.store.client()
        if self._ranks:
            await self.begin()
            for path in self.slots:  # what later rounds have in their slots matters to nobody
                states.fill_slot(path, self._layout, self._config, self._ranks)

    async def begin(self) -> dict[str, Any]:
        """A round, as it is when the next one is to start: one slot with a committed snapshot, one free. Returns the
        snapshot's id."""
        self.round += 1
        await self.client.commit(self.round, 0)  # drops all that there was
        if not self._ranks:
            return {}
        opened = await self.client.open_round(self.round, self._layout.to_json(), self._config.to_json(), self._ranks)
        self.slots = opened["slots"]
        await self.client.seal(self.round, 1, 1, {})
        snapshot = await self.client.seal(self.round, 2, 0, {"step": 2, "consumed": 2})
        await self.client.commit(self.round, 2)
        return snapshot

    async def pull(self, snapshot: dict[str, Any], claim: Claim, fetches: Sequence[Fetch], addresses: Any) -> int:
        """As the next round starts."""
        found = [{**one.to_json(), "address": addresses[one.source]} for one in fetches]
        report = await self.client.pull(self.round + 1, snapshot, self._layout.to_json(), claim.to_json(), found)
        return int(report["num_bytes"])


# -- two stores -------------------------------------------------------------------------------------------------


async def between_two(folder: Path, num_bytes: int, runs: int, crew: states.Crew) -> tuple[dict[str, list[float]], int]:
    """Seconds by name; the bytes that were moved beyond the least."""
    layout = states.gpt(num_bytes)
    addresses = crew.run(raw.listen, [("127.0.0.1",)] * 2)[1]
    seconds: dict[str, list[float]] = {}
    beyond = 0
    with contextlib.ExitStack() as stack:
        stores = {name: stack.enter_context(states.store(folder / name)) for name in ("a", "b", "c")}
        source, member, joiner = (Node(store, layout, ONE, [0] * (name != "c")) for name, store in stores.items())
        for node in (source, member, joiner):
            await node.connect()
        snapshot = await source.begin()
        part = plan(PTC(layout, ONE, ("b",)), {"a": PTC(layout, ONE, ("a",)).regions_on("a")}).parts["b"]
        flow, paths = [raw.Flow(0, 1, num_bytes)], [source.slots[0], str(folder / "b")]
        for run in range(runs + 1):
            found = {}
            for name, node in (("tenplexrun", member), ("tenplexrun, to a new node", joiner)):
                await node.begin()
                began = time.monotonic()
                moved = await node.pull(snapshot, Claim(ONE, (0,)), part.fetches, {"a": stores["a"].address})
                found[name] = time.monotonic() - began
                beyond = max(beyond, moved - part.lower_bound_bytes)
                await node.client.commit(node.round + 1, 0)
            for name, new in (("raw", False), ("raw, to a new file", True)):
                found[name] = crew.run(raw.carry, addresses, flow, paths, new)[0]
            for name, value in found.items():
                seconds.setdefault(name, []).extend([value] * (run > 0))  # the first one warms
        for node in (source, member, joiner):
            await node.client.close()
    return seconds, beyond


# -- four hosts -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def four_hosts(folder: Path, crew: states.Crew) -> Iterator[tuple[dict[str, states.Store], list[raw.Address]]]:
    """Their stores, and where the crew listens."""
    hosts = runpy.run_path(str(ROOT / "examples" / "hosts.py"))
    if reason := hosts["missing"]():
        raise NotImplementedError(reason)
    with hosts["Hosts"]() as network, contextlib.ExitStack() as stack:
        stores, places = {}, []
        for name in HOSTS:
            address = network.add(name)
            network.limit(name, LINK_MBIT)
            # without the private /dev/shm of `enter`: the slots are written from here
            prefix = ["ip", "netns", "exec", network.enter(name)[3]]
            stores[name] = stack.enter_context(states.store(folder / name, address, prefix))
            places.append((address, prefix[-1]))
        yield stores, crew.run(raw.listen, places)[1]


async def between_four(
    stores: dict[str, states.Store], num_bytes: int, runs: int, crew: states.Crew, listening: list[raw.Address]
) -> tuple[dict[str, list[float]], float]:
    """Seconds by name; least possible seconds of the busiest link under the plan."""
    layout = states.gpt(num_bytes)
    nodes = {name: Node(store, layout, TP4, [rank]) for rank, (name, store) in enumerate(stores.items())}
    for node in nodes.values():
        await node.connect()
    addresses = {name: store.address for name, store in stores.items()}
    before, target = PTC(layout, TP4, HOSTS), PTC(layout, DP2_TP2, PLACES)
    holders = {name: before.regions_on(name) for name in HOSTS}
    planned, by_way = plan(target, holders), baselines.central(target, holders, HOSTS[0])
    assert planned.num_bytes == planned.lower_bound_bytes
    claims = {name: Claim(DP2_TP2, (rank,)) for rank, name in enumerate(PLACES)}
    sent: dict[tuple[str, str], int] = {}
    for name, part in planned.parts.items():
        for fetch in part.fetches:
            sent[fetch.source, name] = sent.get((fetch.source, name), 0) + fetch.num_bytes
    flows = [raw.Flow(HOSTS.index(source), HOSTS.index(name), size) for (source, name), size in sent.items()]

    async def all_pull(snapshot: dict[str, Any], parts: Any) -> None:
        await asyncio.gather(
            *(nodes[name].pull(snapshot, claims[name], part.fetches, addresses) for name, part in parts.items())
        )

    async def straight(snapshot: dict[str, Any]) -> None:
        await all_pull(snapshot, planned.parts)

    async def through_one(snapshot: dict[str, Any]) -> None:
        await nodes[HOSTS[0]].pull(snapshot, Claim(ONE, (0,)), by_way.gather.fetches, addresses)
        await all_pull(snapshot, by_way.scatter.parts)

    seconds: dict[str, list[float]] = {"tenplexrun": [], "by way of one node": [], "raw": []}
    for _ in range(runs):
        for name, move in (("tenplexrun", straight), ("by way of one node", through_one)):
            snapshots = [await node.begin() for node in nodes.values()]
            began = time.monotonic()
            await move(snapshots[0])
            seconds[name].append(time.monotonic() - began)
        paths = [node.slots[0] for node in nodes.values()]
        seconds["raw"].append(crew.run(raw.carry, listening, flows, paths, False)[0])
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
    with states.shared_folder(8 * states.GIB) as folder:
        with states.crew(2) as crew:
            two, beyond = asyncio.run(between_two(folder / "two", states.GIB, runs, crew))
        try:
            with states.crew(4) as crew, four_hosts(folder / "four", crew) as (stores, listening):
                four, least = asyncio.run(between_four(stores, on_hosts, runs, crew, listening))
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
