"""The planner at scale, without a cluster.

Goals (this project's; a quiet machine):

    175 B parameters with Adam, 1,024 ranks: the whole plan              <= 5 s
    the same on 10,240 ranks: set-up (layouts, holders, balance)         <= 2 s
    then one node's part                                                 <= 50 ms
    memory of the 10,240-rank planner                                    <= 1 GiB
    the same with the optimizer in flat ranges over dp, ZeRO-1: one part <= 50 ms, within 1 GiB
    growth of set-up from 64 to 10,240 ranks, for both                   <= 2 x linear in ranks x tensors
    one tensor from an 80x80 grid to a 72x72 grid                        <= 0.5 s
    bytes moved / lower bound                                            = 1
    busiest sender / least possible (linear program, scipy)              <= 1.2

The limit beside us is the lower bound of bytes and the linear programme's load; the baseline is moving everything
that nodes need ("migrate all"). Times are CPU seconds of this process, so that other load does not count;
wall-clock seconds are printed too.
Of the grids the best of three counts.

    benchmarks/planner.py [--quick] [--check]
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import linprog

from tenplexrun.core import models
from tenplexrun.core.layout import Flat, Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.planner import Planner, ReconfigurationPlan, plan
from tenplexrun.core.ptc import PTC

T = TypeVar("T")
WORKERS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer sizes")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    args = parser.parse_args()
    results: list[tuple[str, float, float | None, str]] = []
    whole_plan(results, 256 if args.quick else 1024)
    worlds = (64, 1024, 10240) if args.quick else (64, 256, 1024, 4096, 10240)
    growth(results, "", lambda: models.layout("gpt3-175b"), worlds)
    growth(results, ", flat", zero, worlds[:-1] if args.quick else worlds)
    grids(results)
    egress(results, 5 if args.quick else 20)
    print(f"{'measured':<58}{'value':>12}{'goal':>10}  unit")
    for name, value, goal, unit in results:
        verdict = "" if goal is None or value <= goal else "  MISSED"
        print(f"{name:<58}{value:>12.4g}{'' if goal is None else f'{goal:g}':>10}  {unit}{verdict}")
    missed = [name for name, value, goal, _ in results if goal is not None and value > goal]
    record = {"benchmark": "planner", "missed": missed, **{name: value for name, value, _, _ in results}}
    print(json.dumps(record))
    return 1 if args.check and missed else 0


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """(result, CPU seconds, wall-clock seconds); without the garbage collector, as `timeit` does."""
    gc.disable()
    try:
        cpu, wall = time.process_time(), time.perf_counter()
        result = work()
        return result, time.process_time() - cpu, time.perf_counter() - wall
    finally:
        gc.enable()


def placed(layout: Layout, config: ParallelConfig, first: int = 0, workers: int = WORKERS) -> PTC:
    return PTC(layout, config, tuple(f"n{first + rank // workers:05d}" for rank in range(config.world_size)))


def holders_of(ptc: PTC) -> dict[str, Any]:
    return {node: ptc.regions_on(node) for node in sorted(set(ptc.nodes))}


def gpt(world: int) -> tuple[ParallelConfig, ParallelConfig]:
    """Half the pipeline stages and 3/4 of the ranks, but at least one replica; tp inside a node."""
    pp = min(16, world // 16)
    return ParallelConfig(pp=pp, dp=world // (8 * pp), tp=8), ParallelConfig(
        pp=pp // 2, dp=world * 3 // (16 * pp), tp=8
    )


def whole_plan(results: list[tuple[str, float, float | None, str]], world: int) -> None:
    layout = models.layout("gpt3-175b")
    current, target = (placed(layout, config) for config in gpt(world))
    found, cpu, wall = timed(lambda: plan(target, holders_of(current)))
    fetches = sum(len(part.fetches) for part in found.parts.values())
    everything = sum(part.needed_bytes for part in found.parts.values())
    results += [
        (f"whole plan, {world} ranks", cpu, 5.0, "s CPU"),
        (f"whole plan, {world} ranks, wall clock", wall, None, "s"),
        (f"whole plan, {world} ranks: fetches", fetches, None, ""),
        (f"whole plan, {world} ranks: bytes / lower bound", found.num_bytes / found.lower_bound_bytes, 1.0, ""),
        (f"whole plan, {world} ranks: bytes / moving everything", found.num_bytes / everything, None, ""),
    ]


def zero() -> Layout:
    """ZeRO-1: each rank has a range of its tensor-parallel part of the optimizer's tensors, so no two are alike."""
    return Layout(
        tuple(
            replace(spec, ops=(*spec.ops, Flat("dp"))) if spec.fqn.startswith("optim.") and spec.shape else spec
            for spec in models.layout("gpt3-175b").tensors
        )
    )


def growth(
    results: list[tuple[str, float, float | None, str]], kind: str, make: Callable[[], Layout], worlds: Sequence[int]
) -> None:
    """Set-up and one node's part at several sizes; goals at 10,240 ranks, growth against the smallest world."""
    costs = [one_part(results, kind, make, world) for world in worlds]
    results.append(
        (f"growth{kind}: cost per rank x tensor, {worlds[-1]} / {worlds[0]} ranks", costs[-1] / costs[0], 2.0, "")
    )


def one_part(
    results: list[tuple[str, float, float | None, str]], kind: str, make: Callable[[], Layout], world: int
) -> float:
    """CPU seconds of the set-up per rank and tensor."""

    def set_up() -> tuple[Planner, PTC]:
        layout = make()
        current, target = (placed(layout, config) for config in gpt(world))
        return Planner(target, holders_of(current)), target

    (planner, target), cpu, wall = timed(set_up)
    slowest = max(timed(lambda node=node: planner.part(node))[1] for node in (planner.nodes[0], planner.nodes[-1]))
    last = world == 10240
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cost = cpu / target.config.world_size / len(target.layout.tensors)
    results += [
        (f"set-up{kind}, {world} ranks", cpu, 2.0 if last and not kind else None, "s CPU"),
        (f"set-up{kind}, {world} ranks, wall clock", wall, None, "s"),
        (f"set-up{kind}, {world} ranks, per rank x tensor", cost * 1e9, None, "ns"),
        (f"one node's part{kind}, {world} ranks", slowest * 1e3, 50.0 if last else None, "ms CPU"),
    ]
    if last:
        results.append((f"memory of the process so far{kind}", peak, 1.0, "GiB"))
    return cost


def grids(results: list[tuple[str, float, float | None, str]]) -> None:
    layout = Layout((TensorSpec("w", (5760, 5760), "float32", (Shard(0, "dp"), Shard(1, "tp"))),))
    current = placed(layout, ParallelConfig(dp=80, tp=80), workers=1)
    target = placed(layout, ParallelConfig(dp=72, tp=72), 10_000, workers=1)
    holders = holders_of(current)
    for node in set(target.nodes):
        target.regions_on(node)
    found, cpu, wall = min((timed(lambda: plan(target, holders)) for _ in range(3)), key=itemgetter(1))
    results += [
        ("80x80 grid to 72x72 grid, one tensor: planning", cpu, 0.5, "s CPU"),
        ("80x80 grid to 72x72 grid, wall clock", wall, None, "s"),
        ("80x80 grid to 72x72 grid: fetches", sum(len(p.fetches) for p in found.parts.values()), None, ""),
    ]


def egress(results: list[tuple[str, float, float | None, str]], cases: int) -> None:
    """Random resizes with losses: the busiest sender against the linear programme's optimum."""
    random = np.random.default_rng(7)
    worst = 1.0
    for _ in range(cases):
        layout = Layout(
            tuple(
                TensorSpec(f"t{index}", (int(random.integers(64, 4096)), 1024), "float32", (Shard(0, "tp"),))
                for index in range(8)
            )
        )
        configs = [ParallelConfig(dp=int(random.integers(2, 5)), tp=int(random.choice([1, 2, 3, 4]))) for _ in range(2)]
        current, target = (
            PTC(layout, config, tuple(f"n{random.integers(0, 8)}" for _ in range(config.world_size)))
            for config in configs
        )
        found = plan(target, holders_of(current))
        worst = max(worst, busiest(found) / max(1.0, optimum(target, holders_of(current))))
    results.append((f"busiest sender / least possible, worst of {cases}", worst, 1.2, ""))


def busiest(found: ReconfigurationPlan) -> float:
    return float(max(found.egress().values(), default=0))


def optimum(target: PTC, holders: dict[str, Any]) -> float:
    """The least load of the busiest sender, tensors being divisible: a linear programme over (tile, source)."""
    tiles: dict[frozenset[str], float] = {}
    for node, part in plan(target, holders, split_bytes=1 << 62).parts.items():
        for fetch in part.fetches:
            able = frozenset(
                source
                for source, held in holders.items()
                if source != node and any(region.contains(fetch.region) for region in held.get(fetch.fqn, ()))
            )
            tiles[able] = tiles.get(able, 0.0) + fetch.num_bytes
    sources = sorted(holders)
    pairs = [(row, source) for row, able in enumerate(tiles) for source in sorted(able)]
    if not pairs:
        return 0.0
    equal = np.zeros((len(tiles), len(pairs) + 1))
    loads = np.zeros((len(sources), len(pairs) + 1))
    loads[:, -1] = -1.0
    for column, (row, source) in enumerate(pairs):
        equal[row, column] = 1.0
        loads[sources.index(source), column] = 1.0
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    found = linprog(cost, loads, np.zeros(len(sources)), equal, list(tiles.values()))
    return float(found.fun)


if __name__ == "__main__":
    sys.exit(main())
