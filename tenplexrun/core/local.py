"""What a rank holds of one tensor: canonical boxes, and where their elements lie in the rank's own array."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from tenplexrun.core.ops import PAD, Order, Pad, Run, Shard, Sizes
from tenplexrun.core.regions import Region


@dataclass(frozen=True, slots=True)
class Part:
    """A canonical box in a local array: element i of the box, counted from its corner, is at offset + i · strides.

    `offset` and `strides` (one a dim) count elements of the local array seen as flat and row-major.
    """

    region: Region
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """A rank's array of one tensor. `shape` includes padding, and is one-dimensional after `Flat`.

    The parts are disjoint, and in stored order; what is in none of them is padding.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def is_plain(self) -> bool:
        """The array is one canonical box, element for element."""
        return len(self.parts) == 1 and self.parts[0].region.lengths == self.shape


def stored(length: int, ops: Sequence[Order | Pad | Shard], size: Sizes, coord: Sizes) -> list[Run]:
    """The runs that a rank stores of a dim, by the operations on it. Raises LayoutError as they do."""
    runs: list[Run] = [(0, length)]
    for op in ops:
        if isinstance(op, Order):
            runs = op.apply(runs)
        elif isinstance(op, Pad):
            runs = op.apply(runs, size)
        else:
            runs = op.apply(runs, size, coord)
    return runs


def lengths(dims: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    """The shape of the stored array."""
    return tuple(sum(length for _, length in runs) for runs in dims)


def whole(dims: Sequence[Sequence[Run]]) -> Local:
    """The stored array itself."""
    return _whole(tuple(map(tuple, dims)))


@functools.lru_cache(maxsize=1024)  # the layers of a model are alike
def _whole(dims: tuple[tuple[Run, ...], ...]) -> Local:
    shape = lengths(dims)
    return Local(shape, tuple(_parts(dims, tuple((0, length) for length in shape), 0)))


def flat(dims: Sequence[Sequence[Run]], low: int, high: int, place: int, length: int) -> Local:
    """Elements low … high - 1 of the stored array in row-major order, at `place` of a flat array of `length`."""
    parts: list[Part] = []
    for box in _row_major(lengths(dims), low, high):
        parts.extend(_parts(dims, box, place - low))
    return Local((length,), tuple(parts))


def boxes(merged: Sequence[Sequence[Run]]) -> tuple[Region, ...]:
    """All boxes with one interval a dim, sorted where the intervals of each dim are."""
    if all(len(runs) == 1 for runs in merged):
        return (Region(tuple(runs[0][0] for runs in merged), tuple(runs[0][1] for runs in merged)),)
    return tuple(Region(tuple(start for start, _ in box), tuple(size for _, size in box)) for box in product(*merged))


def joined(boxes: Sequence[Region]) -> tuple[Region, ...]:
    """Disjoint boxes with neighbours put together, dim by dim, sorted."""
    found = sorted(set(boxes))
    for dim in reversed(range(len(found[0].lengths) if found else 0)):
        # neighbours along `dim` are next to each other when all else is compared first
        found.sort(key=lambda box: (_without(box.offsets, dim), _without(box.lengths, dim), box.offsets[dim]))
        together: list[Region] = []
        for box in found:
            last = together[-1] if together else None
            if (
                last is not None
                and last.stops[dim] == box.offsets[dim]
                and _without(last.offsets, dim) == _without(box.offsets, dim)
                and _without(last.lengths, dim) == _without(box.lengths, dim)
            ):
                size = last.lengths[dim] + box.lengths[dim]
                together[-1] = Region(last.offsets, (*last.lengths[:dim], size, *last.lengths[dim + 1 :]))
            else:
                together.append(box)
        found = together
    return tuple(sorted(found))


def _without(numbers: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return numbers[:dim] + numbers[dim + 1 :]


def merge(runs: Sequence[Run]) -> list[Run]:
    """The canonical intervals of stored runs, sorted, neighbours put together, padding left out."""
    merged: list[Run] = []
    for start, length in sorted(runs):
        if start == PAD or not length:
            continue
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _parts(dims: Sequence[Sequence[Run]], box: Sequence[Run], shift: int) -> Iterator[Part]:
    """The canonical boxes in the local box `box` ((start, length) a dim); `shift` is added to row-major places."""
    shape = lengths(dims)
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    cuts = [list(_overlaps(runs, start, count)) for runs, (start, count) in zip(dims, box, strict=True)]
    for cut in product(*cuts):
        region = Region(tuple(start for _, start, _ in cut), tuple(count for _, _, count in cut))
        place = sum(local * stride for (local, _, _), stride in zip(cut, strides, strict=True))
        yield Part(region, place + shift, strides)


def _overlaps(runs: Sequence[Run], low: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(local start, canonical start, length) of what `runs` have in the local rows low … low + count - 1."""
    place = 0
    for start, length in runs:
        first, last = max(low, place), min(low + count, place + length)
        if first < last and start != PAD:
            yield first, start + first - place, last - first
        place += length


def _row_major(shape: Sequence[int], low: int, high: int) -> Iterator[tuple[Run, ...]]:
    """Boxes that make up the elements low … high - 1 of an array of `shape`, in row-major order."""
    if low >= high:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    first, last = low // row, (high - 1) // row
    if low == first * row and high == (last + 1) * row:
        yield ((first, last - first + 1), *((0, length) for length in shape[1:]))
    elif first == last:
        for box in _row_major(shape[1:], low - first * row, high - first * row):
            yield ((first, 1), *box)
    else:
        middle = -(-low // row)
        end = high // row
        yield from _row_major(shape, low, middle * row)
        if middle < end:
            yield ((middle, end - middle), *((0, length) for length in shape[1:]))
        yield from _row_major(shape, end * row, high)
