"""Which source serves how much: the least possible load of the busiest one, shared out in long runs.

All demands for the same set of sources are laid on one line, in the order of those who ask; the line is cut into one
run for each source. So each asks few sources, and only tensors at the cuts are split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from tenplexrun.core.regions import Region

Group = TypeVar("Group", bound=Hashable)

SWEEPS = 100
WORK = 2_000_000
"""Bound on sweeps × sources of all sets, so that planning ends in time when everything differs."""
CLOSE = 0.002
"""Sweeps end when none of them changes a load by more than this fraction of the busiest."""


def quotas(demands: Sequence[tuple[tuple[Group, ...], int]], sizes: Mapping[Group, int]) -> list[dict[Group, float]]:
    """How many bytes of each demand (groups that can serve it, bytes) each group serves.

    A group is `sizes[group]` equal nodes. The loads per node are as equal as can be: the largest is the least possible
    (of the convex quadratic problem, by block-wise descent: each demand in turn is poured on the lowest loads).
    """
    load: dict[Group, float] = dict.fromkeys(sizes, 0.0)
    given: list[dict[Group, float]] = [{} for _ in demands]
    free = sorted(
        (index for index, (groups, _) in enumerate(demands) if len(groups) > 1),
        key=lambda index: (len(demands[index][0]), index),
    )
    for index, (groups, num_bytes) in enumerate(demands):
        if len(groups) == 1:
            given[index] = {groups[0]: float(num_bytes)}
            load[groups[0]] += num_bytes / sizes[groups[0]]
    work = sum(len(demands[index][0]) for index in free)
    for _ in range(max(2, min(SWEEPS, WORK // max(1, work))) if free else 0):
        moved = 0.0
        for index in free:
            groups, num_bytes = demands[index]
            for group, amount in given[index].items():
                load[group] -= amount / sizes[group]
            poured = _pour(num_bytes, groups, load, sizes)
            for group, amount in poured.items():
                load[group] += amount / sizes[group]
                moved = max(moved, abs(amount - given[index].get(group, 0.0)) / sizes[group])
            given[index] = poured
        if moved <= CLOSE * max(load.values()):
            break
    return given


def _pour(
    num_bytes: int, groups: Sequence[Group], load: Mapping[Group, float], sizes: Mapping[Group, int]
) -> dict[Group, float]:
    """Raise the lowest loads to one level: the least at which some of the lowest, all filled up, hold the bytes."""
    lowest = sorted(groups, key=lambda group: load[group])  # stable: ties as the groups come
    width = accumulate(float(sizes[group]) for group in lowest)
    water = accumulate(load[group] * sizes[group] for group in lowest)
    level = min((num_bytes + below) / wide for below, wide in zip(water, width, strict=True))
    return {group: max(0.0, level - load[group]) * sizes[group] for group in groups}


@dataclass(frozen=True, slots=True)
class Line:
    """The demands for one set of sources: source i serves the bytes from `ends[i - 1]` to `ends[i]`."""

    sources: tuple[str, ...]
    ends: tuple[int, ...]

    @classmethod
    def cut(cls, total: int, shares: Sequence[tuple[Sequence[str], float]]) -> Line:
        """`shares`: nodes that together serve so many of the `total` bytes, in equal parts."""
        sources: list[str] = []
        ends: list[int] = []
        reached = 0.0
        for nodes, amount in shares:
            for place, node in enumerate(nodes):
                sources.append(node)
                ends.append(min(total, round(reached + amount * (place + 1) / len(nodes))))
            reached += amount
        ends[-1] = total
        return cls(tuple(sources), tuple(ends))

    def serve(self, place: int, region: Region, num_bytes: int, split_bytes: int) -> Iterator[tuple[str, Region, int]]:
        """Who gives which part of a region whose bytes are at `place` of the line: (source, part, its bytes).

        It is split, along its outermost dim, only into parts of at least `split_bytes`; a source with less than that
        left is passed over.
        """
        last = len(self.sources) - 1
        dim = next((dim for dim, length in enumerate(region.lengths) if length > 1), None)
        while last > 0 and dim is not None and num_bytes >= 2 * split_bytes:
            index = min(bisect_right(self.ends, place), last)
            rows = region.lengths[dim]
            row = num_bytes // rows
            here = round((self.ends[index] - place) / row)
            if index == last or rows == 1 or here >= rows or (rows - here) * row < split_bytes:
                break
            if here == 0 or here * row < split_bytes:
                place = self.ends[index]
                continue
            first, region = _halve(region, dim, here)
            yield self.sources[index], first, here * row
            place, num_bytes = self.ends[index], num_bytes - here * row
        yield self.sources[min(bisect_right(self.ends, place + num_bytes // 2), last)], region, num_bytes


def _halve(region: Region, dim: int, rows: int) -> tuple[Region, Region]:
    """The first `rows` rows of a dim, and the others."""
    start, length = region.offsets[dim], region.lengths[dim]
    offsets = (*region.offsets[:dim], start + rows, *region.offsets[dim + 1 :])
    return (
        Region(region.offsets, (*region.lengths[:dim], rows, *region.lengths[dim + 1 :])),
        Region(offsets, (*region.lengths[:dim], length - rows, *region.lengths[dim + 1 :])),
    )
