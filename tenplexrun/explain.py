"""`tenplexctl plan`: what a resize would move, from where, how much, and why, before anything runs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenplexrun.assignment import least_cost
from tenplexrun.core import baselines, models
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import AXES, ParallelConfig
from tenplexrun.core.placement import place
from tenplexrun.core.planner import ALGORITHM, Holders, Planner, ReconfigurationPlan
from tenplexrun.core.ptc import PTC
from tenplexrun.core.regions import Region
from tenplexrun.core.validation import validate_part
from tenplexrun.errors import LayoutError, UsageError

OPERATIONS = {
    "split": "a part of what the sender holds",
    "merge": "a part of what the receiver needs",
    "split+merge": "a part of both",
    "reallocate": "as the sender holds it",
}
"""What a fetched box is."""

MOST_RANKS = 1 << 17

Nodes = tuple[tuple[str, int], ...]
"""(name, number of workers), in the order of ranks."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A question: from which nodes and layout to which. `link_bytes_per_s`: each node's, each way."""

    layout: Layout
    current: PTC
    target: PTC
    lost: frozenset[str]
    link_bytes_per_s: float

    @property
    def holders(self) -> Holders:
        living = sorted(set(self.current.nodes) - self.lost)
        return {node: self.current.regions_on(node) for node in living}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer. Bytes; by node where it says so. `by_operation`: (fetches, bytes) of each of `OPERATIONS`."""

    plan: ReconfigurationPlan
    by_operation: Mapping[str, tuple[int, int]]
    ingress: Mapping[str, int]
    egress: Mapping[str, int]
    needed: Mapping[str, int]
    held: Mapping[str, int]
    seconds: float
    pairs: int

    @property
    def peak_bytes(self) -> int:
        """Most memory that a node uses for state while it moves: what it had, and what it fetches."""
        nodes = {*self.held, *self.needed}
        return max((self.held.get(node, 0) + self.ingress.get(node, 0) for node in nodes), default=0)


def explain(resize: Resize) -> Explanation:
    """Plan, validate, and take apart. Raises StateLostError, LayoutError."""
    holders = resize.holders
    planner = Planner(resize.target, holders)
    planner.check()
    plan = ReconfigurationPlan({node: planner.part(node) for node in planner.nodes})
    for part in plan.parts.values():
        validate_part(part, resize.target, holders)
    by_operation = _by_operation(plan, resize.target, holders)
    ingress = {node: part.num_bytes for node, part in plan.parts.items()}
    egress = plan.egress()
    busiest = max([*ingress.values(), *egress.values()], default=0)
    return Explanation(
        plan,
        by_operation,
        ingress,
        egress,
        {node: part.needed_bytes for node, part in plan.parts.items()},
        {node: resize.current.bytes_on(node) for node in sorted(set(resize.current.nodes) - resize.lost)},
        busiest / resize.link_bytes_per_s,
        sum(len(part.batches()) for part in plan.parts.values()),
    )


def _by_operation(plan: ReconfigurationPlan, target: PTC, holders: Holders) -> dict[str, tuple[int, int]]:
    counts = {operation: [0, 0] for operation in OPERATIONS}
    known: dict[tuple[Region, int, int], list[int]] = {}  # by identity: regions of like tensors are one object
    for node, part in plan.parts.items():
        needed = target.regions_on(node)
        for fetch in part.fetches:
            held, wanted = holders[fetch.source][fetch.fqn], needed[fetch.fqn]
            key = (fetch.region, id(held), id(wanted))
            if key not in known:
                known[key] = counts[_operation(fetch.region, held, wanted)]
            known[key][0] += 1
            known[key][1] += fetch.num_bytes
    return {operation: (fetches, num_bytes) for operation, (fetches, num_bytes) in counts.items()}


def _operation(box: Region, held: Iterable[Region], wanted: Iterable[Region]) -> str:
    source, needed = _around(box, held), _around(box, wanted)
    if source == needed:
        return "reallocate"  # whole, or in parts that replicas share in sending
    splits, merges = source != box, needed != box
    return "split+merge" if splits and merges else "split" if splits else "merge" if merges else "reallocate"


def _around(box: Region, regions: Iterable[Region]) -> Region:
    return next((region for region in regions if region.contains(box)), box)


# --- as text and JSON ---------------------------------------------------------------------------------------------


def to_json(resize: Resize, found: Explanation, fetches: bool = False) -> dict[str, Any]:
    """Schema 1; `fetches` adds every transfer."""
    record: dict[str, Any] = {
        "schema": 1,
        "algorithm": ALGORITHM,
        "layout": resize.layout.digest,
        "from": {"config": resize.current.config.to_json(), "nodes": _runs(resize.current.nodes)},
        "to": {"config": resize.target.config.to_json(), "nodes": _runs(resize.target.nodes)},
        "lost": sorted(resize.lost),
        "num_bytes": found.plan.num_bytes,
        "lower_bound_bytes": found.plan.lower_bound_bytes,
        "needed_bytes": sum(found.needed.values()),
        "seconds": found.seconds,
        "peak_bytes": found.peak_bytes,
        "operations": {name: {"fetches": pair[0], "bytes": pair[1]} for name, pair in found.by_operation.items()},
        "ingress": dict(found.ingress),
        "egress": dict(found.egress),
        "pairs": found.pairs,
    }
    if fetches:
        record["plan"] = found.plan.to_json()
    return record


def text(resize: Resize, found: Explanation) -> str:
    """For people: one fact a line."""
    plan = found.plan
    needed = sum(found.needed.values())
    fetches = sum(len(part.fetches) for part in plan.parts.values())
    moved = sum(1 for part in plan.parts.values() if part.fetches)
    lines = [
        f"state      {len(resize.layout.tensors)} tensors, {size(resize.layout.num_bytes)}",
        f"from       {resize.current.config} on {_count(resize.current.nodes)}" + _lost(resize),
        f"to         {resize.target.config} on {_count(resize.target.nodes)}",
        f"moves      {size(plan.num_bytes)} of {size(needed)} that nodes need, in {_plural(fetches, 'fetch', 'es')} "
        f"between {_plural(found.pairs, 'pair')} of nodes",
        f"bound      {size(plan.lower_bound_bytes)} must cross the network at least"
        + (": met" if plan.num_bytes == plan.lower_bound_bytes else ": NOT MET"),
        f"receiving  {_spread(found.ingress)} over {moved} of {_plural(len(plan.parts), 'node')}",
        f"sending    {_spread(found.egress)} over {_plural(len(found.egress), 'node')}",
        f"time       {_seconds(found.seconds)} at {resize.link_bytes_per_s / 1e9:g} GB/s for each node, each way",
        f"memory     {_spread(found.needed)} of state a node after it, {size(found.peak_bytes)} at most while it moves",
    ]
    for operation, meaning in OPERATIONS.items():
        count, num_bytes = found.by_operation[operation]
        if count:
            share = f"{size(num_bytes)} ({num_bytes / plan.num_bytes:.0%})"
            lines.append(f"{operation:<10} {share} in {_plural(count, 'fetch', 'es')}: {meaning}")
    if busiest := _top(found.egress):
        lines.append("busiest    " + ", ".join(f"{source} sends {size(found.egress[source])}" for source in busiest))
    return "\n".join(lines)


def size(num_bytes: int) -> str:
    """Decimal units, three digits or more."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1000
    return f"{amount:.2f} TB"


def _spread(by_node: Mapping[str, int]) -> str:
    busy = [num_bytes for num_bytes in by_node.values() if num_bytes]
    if not busy:
        return "nothing"
    return size(busy[0]) if min(busy) == max(busy) else f"{size(min(busy))} to {size(max(busy))}"


def _seconds(seconds: float) -> str:
    return "less than 0.01 s" if 0 < seconds < 0.01 else f"{seconds:.2f} s"


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{ending * (count != 1)}"


def _top(by_node: Mapping[str, int]) -> list[str]:
    return sorted(by_node, key=lambda node: (-by_node[node], node))[:4]


def _count(nodes: Sequence[str]) -> str:
    return f"{_plural(len(set(nodes)), 'node')}, {_plural(len(nodes), 'rank')}"


def _lost(resize: Resize) -> str:
    return f"; lost: {', '.join(sorted(resize.lost))}" if resize.lost else ""


def _runs(nodes: Sequence[str]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for node in nodes:
        if runs and runs[-1][0] == node:
            runs[-1][1] += 1
        else:
            runs.append([node, 1])
    return runs


# --- the command --------------------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `tenplexctl plan`."""
    names = "|".join(models.SIZES)
    command.add_argument(
        "--model", required=True, metavar=f"{names}|FILE.json", help="a model with Adam's state, or a layout's JSON"
    )
    command.add_argument("--from", required=True, dest="current", metavar="pp=16,dp=8,tp=8", help="layout now")
    command.add_argument("--to", required=True, dest="target", metavar="pp=8,dp=12,tp=8", help="layout wanted")
    nodes = "a number, or names, each with :WORKERS where not as many as --nproc-per-node"
    command.add_argument("--nodes-from", metavar="NODES", help=f"nodes now, in the order of ranks: {nodes}")
    command.add_argument("--nodes-to", metavar="NODES", help="nodes then (default: the living ones, then new ones)")
    command.add_argument("--nproc-per-node", type=int, default=8, metavar="N", help="workers a node (default 8)")
    command.add_argument("--lost", default="", metavar="NODE,…", help="nodes whose memory is gone")
    command.add_argument("--link", type=float, default=12.5, metavar="GB/S", help="of each node, each way (12.5)")
    command.add_argument("--keep-order", action="store_true", help="nodes as given, not where the least moves")
    command.add_argument("--baselines", action="store_true", help="also what moving everything would take")
    command.add_argument("--json", action="store_true", help="as JSON, with every fetch")


def run(args: argparse.Namespace) -> int:
    """Raises UsageError, LayoutError, StateLostError."""
    resize = resize_of(args)
    found = explain(resize)
    print(json.dumps(to_json(resize, found, fetches=True)) if args.json else text(resize, found))
    if args.baselines and not args.json:
        print(_baselines(resize))
    return 0


def _baselines(resize: Resize) -> str:
    everything = baselines.migrate_all(resize.target, resize.holders)
    by_way = baselines.central(resize.target, resize.holders, resize.target.nodes[0])
    return (
        f"all        {size(everything.num_bytes)} if every node fetched all that it needs\n"
        f"central    {size(by_way.num_bytes)} by way of {by_way.gather.node}: {size(by_way.gather.num_bytes)} to it, "
        f"{size(by_way.scatter.num_bytes)} from it"
    )


def resize_of(args: argparse.Namespace) -> Resize:
    """The question that the options ask. Raises UsageError, LayoutError."""
    if not 0 < args.link < math.inf or args.nproc_per_node < 1:
        raise UsageError("--link and --nproc-per-node are numbers of more than 0")
    layout = _layout(args.model)
    before, after = _config(args.current), _config(args.target)
    lost = frozenset(filter(None, args.lost.split(",")))
    nodes_from = _nodes(args.nodes_from, before.world_size, args.nproc_per_node)
    unknown = sorted(lost - {name for name, _ in nodes_from})
    if unknown:
        raise UsageError(f"--lost {', '.join(unknown)}: not among the nodes now, {', '.join(n for n, _ in nodes_from)}")
    if args.nodes_to is None:
        nodes_to = _remaining(nodes_from, lost, after.world_size, args.nproc_per_node)
    else:
        nodes_to = _nodes(args.nodes_to, after.world_size, args.nproc_per_node)
    back = sorted(lost & {name for name, _ in nodes_to})
    if back:
        raise UsageError(f"{', '.join(back)} cannot be lost and among the nodes then; start it under a new name")
    current = PTC(layout, before, _ranks(nodes_from, before.world_size, "--nodes-from"))
    target = PTC(layout, after, _ranks(nodes_to, after.world_size, "--nodes-to"))
    resize = Resize(layout, current, target, lost, args.link * 1e9)
    if args.keep_order:
        return resize
    first = {name: sum(workers for _, workers in nodes_from[:index]) for index, (name, _) in enumerate(nodes_from)}
    order = place(layout, after, nodes_to, resize.holders, least_cost, first)
    target = PTC(layout, after, _ranks(order, after.world_size, "--nodes-to"))
    return Resize(layout, current, target, lost, args.link * 1e9)


def _layout(name: str) -> Layout:
    if name in models.SIZES:
        return models.layout(name)
    if not name.endswith(".json"):
        raise UsageError(f"--model {name!r} is none of {', '.join(models.SIZES)}, nor a FILE.json")
    try:
        return Layout.from_json(json.loads(Path(name).read_bytes()))
    except LayoutError as error:
        raise LayoutError(f"{name}: {error} (docs/layouts.md shows how to write one)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read a layout from {name}: {error}") from None


def _config(given: str) -> ParallelConfig:
    """From "pp=16,dp=8,tp=8"; `order=dp-pp-cp-tp` gives the axes, outermost first."""
    sizes: dict[str, Any] = {}
    for item in given.split(","):
        axis, _, number = item.partition("=")
        if axis in sizes:
            raise UsageError(f"{axis} is given twice in {given!r}")
        if axis == "order":
            sizes[axis] = tuple(number.split("-"))
        elif axis in (*AXES, "ep", "etp", "dp_shard") and number.isdecimal():
            sizes[axis] = int(number)
        else:
            raise UsageError(f"{item!r} in {given!r} is no size of an axis; write pp=4,dp=2,tp=8")
    try:
        config = ParallelConfig(**sizes)
    except ValueError as error:
        raise UsageError(f"{given!r}: {error}") from None
    if config.world_size > MOST_RANKS:
        raise UsageError(f"{given!r} makes {config.world_size} ranks; {MOST_RANKS} are the most that can be planned")
    return config


def _nodes(given: str | None, world_size: int, per_node: int) -> Nodes:
    if given is None:  # the last one may have fewer
        return tuple(
            (f"node{index}", min(per_node, world_size - first))
            for index, first in enumerate(range(0, world_size, per_node))
        )
    if given.isdecimal():
        if int(given) * per_node != world_size:
            raise LayoutError(
                f"the layout has {world_size} ranks, {given} nodes {int(given) * per_node} workers; see --nodes-from"
            )
        return tuple((f"node{index}", per_node) for index in range(int(given)))
    found = []
    for item in given.split(","):
        name, _, workers = item.partition(":")
        if not name or not (workers or "1").isdecimal() or int(workers or 1) > MOST_RANKS:
            raise UsageError(f"{item!r} in {given!r} is no NODE or NODE:WORKERS")
        found.append((name, int(workers or per_node)))
    if len({name for name, _ in found}) != len(found):
        raise UsageError(f"a node is named twice in {given!r}")
    return tuple(found)


def _remaining(nodes: Nodes, lost: frozenset[str], world_size: int, per_node: int) -> Nodes:
    """The living nodes, as many as are needed, then new ones."""
    found: list[tuple[str, int]] = []
    for name, workers in nodes:
        if name not in lost and sum(size for _, size in found) < world_size:
            found.append((name, workers))
    while (missing := world_size - sum(size for _, size in found)) > 0:
        found.append((f"new{len(found)}", min(per_node, missing)))
    return tuple(found)


def _ranks(nodes: Iterable[tuple[str, int]], world_size: int, option: str) -> tuple[str, ...]:
    ranks = tuple(name for name, workers in nodes for _ in range(workers))
    if len(ranks) != world_size:
        raise LayoutError(
            f"the layout has {world_size} ranks, the nodes {len(ranks)} workers; correct {option}, or name "
            f"each node's workers there, as in {option} node0:{world_size}"
        )
    return ranks
