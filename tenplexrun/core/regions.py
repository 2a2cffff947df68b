"""Boxes of tensors, in global canonical coordinates, and the set algebra on them.

A `Region` of a tensor with D dims has D offsets and D lengths. A 0-d tensor's only region has none of either,
and one element. All functions are exact, deterministic, and keep the order of what they are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tenplexrun.core import records
from tenplexrun.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The box `offsets[d] <= index[d] < offsets[d] + lengths[d]`. Both tuples have one entry a dim."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise LayoutError(f"a region needs as many offsets as lengths: {self.offsets} against {self.lengths}")
        for number in (*self.offsets, *self.lengths):  # `min` takes longer than all else here
            if number < 0:
                raise LayoutError(f"a region cannot be negative: offsets {self.offsets}, lengths {self.lengths}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.lengths)

    @property
    def is_empty(self) -> bool:
        return 0 in self.lengths

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes an array of the whole tensor; `()` for a 0-d one."""
        return tuple(slice(start, stop) for start, stop in zip(self.offsets, self.stops, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None where there is no common element. Raises LayoutError when the dims differ."""
        self._same_dims(other)
        offsets, lengths = [], []
        for own, length, others, size in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            start = own if own > others else others  # planning is made of this: max and min are slower
            stop = own + length if own + length < others + size else others + size
            if stop <= start:
                return None
            offsets.append(start)
            lengths.append(stop - start)
        return Region(tuple(offsets), tuple(lengths))

    def contains(self, other: Region) -> bool:
        """Whether every element of `other` is here; an empty region is everywhere."""
        self._same_dims(other)
        for start, size, offset, length in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            if offset < start or offset + length > start + size:
                return other.is_empty
        return True

    def relative_to(self, outer: Region) -> Region:
        """The same box counted from the corner of `outer`. Raises LayoutError where `outer` does not contain it."""
        if not outer.contains(self):
            raise LayoutError(f"region {self} does not lie in {outer}")
        if self.is_empty:
            return Region((0,) * len(self.lengths), self.lengths)
        return Region(tuple(own - start for own, start in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def to_json(self) -> list[list[int]]:
        return [list(self.offsets), list(self.lengths)]

    @classmethod
    def from_json(cls, record: object) -> Region:
        """Raises LayoutError unless `record` is `[offsets, lengths]`."""
        pair = records.items(record, "a region")
        if len(pair) != 2:
            raise LayoutError(f"a region is [offsets, lengths], got {len(pair)} lists")
        offsets, lengths = (
            tuple(records.whole(number, "a region's number") for number in records.items(part, "half a region"))
            for part in pair
        )
        return cls(offsets, lengths)

    def __str__(self) -> str:
        """As in numpy: `[0:4, 8:16]`."""
        spans = (f"{start}:{stop}" for start, stop in zip(self.offsets, self.stops, strict=True))
        return f"[{', '.join(spans)}]"

    def _same_dims(self, other: Region) -> None:
        if len(self.offsets) != len(other.offsets):
            raise LayoutError(f"regions of {len(self.offsets)} and {len(other.offsets)} dims have nothing in common")


def subtract(region: Region, holes: Iterable[Region]) -> list[Region]:
    """Disjoint non-empty boxes that hold exactly the elements of `region` in none of `holes`."""
    left = [] if region.is_empty else [region]
    for hole in holes:
        if not left:
            break
        left = [rest for box in left for rest in _cut(box, hole)]
    return left


def disjoint(regions: Sequence[Region]) -> list[Region]:
    """Disjoint boxes with the same elements: `regions` themselves where none overlaps another."""
    found: list[Region] = []
    for region in regions:
        near = [one for one in found if one.intersect(region) is not None]
        found.extend(subtract(region, near) if near else [region])
    return found


def cover(region: Region, pieces: Sequence[Region]) -> list[tuple[int, Region]]:
    """Tile `region` with parts of `pieces`: pairs (index of the piece, box), the boxes disjoint, earlier pieces first.

    Raises LayoutError, naming the first gap, when the pieces do not cover the region.
    """
    tiles: list[tuple[int, Region]] = []
    left = [] if region.is_empty else [region]
    for index, piece in enumerate(pieces):
        if not left:
            break
        if not tiles and piece.contains(region):  # mostly
            return [(index, region)]
        tiles.extend((index, common) for box in left if (common := box.intersect(piece)) is not None)
        left = [rest for box in left for rest in _cut(box, piece)]
    if left:
        raise LayoutError(f"{left[0]} of region {region} is in none of the {len(pieces)} pieces that should cover it")
    return tiles


def _cut(box: Region, hole: Region) -> list[Region]:
    """`box` without `hole`: at most two slabs a dim, cut off from the outermost dim inwards."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    slabs = []
    offsets, lengths = list(box.offsets), list(box.lengths)
    for dim, (start, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
        end = offsets[dim] + lengths[dim]
        for low, high in ((offsets[dim], start), (stop, end)):
            if low < high:
                slab_offsets, slab_lengths = offsets.copy(), lengths.copy()
                slab_offsets[dim], slab_lengths[dim] = low, high - low
                slabs.append(Region(tuple(slab_offsets), tuple(slab_lengths)))
        offsets[dim], lengths[dim] = start, stop - start
    return slabs
