"""The operations of the layout language: how the ranks' local arrays come from a canonical tensor.

While operations are applied, each dim is a list of runs of canonical indices in the order in which they are stored:
pairs (start, length), where a start of `PAD` means rows that are filled and belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeAlias

from tenplexrun.core import records
from tenplexrun.core.parallel import ALL_AXES
from tenplexrun.core.records import Record
from tenplexrun.errors import LayoutError

PAD = -1
POLICIES = ("ceil", "even", "front", "repeat")

Run = tuple[int, int]
Sizes = Callable[[str], int]
"""Size of a mesh axis by name, or this rank's index on it."""


@dataclass(frozen=True, slots=True)
class Order:
    """Dim `dim` is stored as `groups` groups, each with its share of every one of the canonical `parts` (lengths).

    Megatron's fused QKV: canonical is [Q; K; V] (`parts` are their rows), stored is, for each query group, the group's
    query heads, its key head, its value head.
    """

    dim: int
    groups: int
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        records.whole(self.dim, "the dim of an order")
        groups = records.whole(self.groups, "the groups of an order", 1)
        for part in self.parts:
            if records.whole(part, "a part of an order") % groups:
                raise LayoutError(f"a part of {part} rows does not divide into {groups} groups; correct Order")

    def apply(self, runs: Sequence[Run]) -> list[Run]:
        length = sum(size for _, size in runs)
        if length != sum(self.parts):
            raise LayoutError(f"the parts of Order make {sum(self.parts)} rows, dim {self.dim} has {length} here")
        starts = [sum(self.parts[:index]) for index in range(len(self.parts))]
        stored: list[Run] = []
        for group in range(self.groups):
            for start, part in zip(starts, self.parts, strict=True):
                share = part // self.groups
                stored += _cut(runs, start + group * share, share)
        return stored

    def to_json(self) -> Record:
        return {"op": "order", "dim": self.dim, "groups": self.groups, "parts": list(self.parts)}


@dataclass(frozen=True, slots=True)
class Pad:
    """Dim `dim` is padded at its end to a multiple of `multiple` times the sizes of the mesh axes `axes`.

    Megatron pads the vocabulary to a multiple of 128 · tp: `Pad(0, 128, ("tp",))`. Pad rows never move.
    """

    dim: int
    multiple: int
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _axes(self.axes))
        records.whole(self.dim, "the dim of a pad")
        records.whole(self.multiple, "the multiple of a pad", 1)

    def apply(self, runs: Sequence[Run], size: Sizes) -> list[Run]:
        multiple = self.multiple
        for axis in self.axes:
            multiple *= size(axis)
        rest = -sum(length for _, length in runs) % multiple
        return [*runs, (PAD, rest)] if rest else list(runs)

    def to_json(self) -> Record:
        return {"op": "pad", "dim": self.dim, "multiple": self.multiple, "axes": list(self.axes)}


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim` is split over the mesh axis `axis`; a tuple of axes counts as one, the first outermost.

    `policy` says what happens to a length that the axis does not divide: `ceil` makes parts of ceil(length / parts),
    the last ones shorter or empty (torch.chunk, DTensor); `front` gives the first parts one more (numpy.array_split);
    `even` refuses; `repeat` is `even`, but where there are fewer units than ranks each is on as many consecutive ones
    (key and value heads, as in vLLM's QKVParallelLinear); a tuple gives the length of each part. `unit`: rows that
    stay together (a head, a quantised block); policies then count units. `segs`: relative lengths of segments that are
    each split by themselves: (1, 1) for fused gate and up, the rows of Q, K and V for a fused QKV in that order.
    """

    dim: int
    axis: str | tuple[str, ...]
    policy: str | tuple[int, ...] = "ceil"
    segs: tuple[int, ...] = ()
    unit: int = 1

    def __post_init__(self) -> None:
        records.whole(self.dim, "the dim of a shard")
        axes = _axes(self.axis)
        object.__setattr__(self, "axis", axes[0] if len(axes) == 1 else axes)
        if not isinstance(self.policy, str):
            sizes = records.items(self.policy, "the sizes of a shard")
            object.__setattr__(self, "policy", tuple(records.whole(size, "a size of a shard") for size in sizes))
        elif self.policy not in POLICIES:
            raise LayoutError(
                f"unknown shard policy {self.policy!r}; use one of {', '.join(POLICIES)} or a list of sizes"
            )
        object.__setattr__(self, "segs", tuple(records.whole(seg, "a segment of a shard", 1) for seg in self.segs))
        records.whole(self.unit, "the unit of a shard", 1)

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def apply(self, runs: Sequence[Run], size: Sizes, coord: Sizes) -> list[Run]:
        """This rank's part. Raises LayoutError where the policy cannot be had."""
        parts, index = flat_index(self.axes, size, coord)
        kept: list[Run] = []
        for start, length in self._segments(sum(length for _, length in runs)):
            low, count = self.part(length, parts, index)
            kept += _cut(runs, start + low, count)
        return kept

    def part(self, length: int, parts: int, index: int) -> tuple[int, int]:
        """(start, length) of one of `parts` parts of `length` rows."""
        units = -(-length // self.unit)
        if isinstance(self.policy, tuple):
            if len(self.policy) != parts or sum(self.policy) != units or length % self.unit:
                raise LayoutError(
                    f"dim {self.dim} of {length} rows is to have {len(self.policy)} parts of {list(self.policy)} "
                    f"units of {self.unit}, but {_named(self.axes)} has {parts} ranks; correct the sizes"
                )
            low = sum(self.policy[:index])
            return low * self.unit, self.policy[index] * self.unit
        if self.policy == "ceil":
            chunk = -(-units // parts)
            low, high = index * chunk, (index + 1) * chunk
        else:
            if self.policy == "repeat" and units and parts % units == 0:
                parts, index = units, index // (parts // units)
            count, rest = divmod(units, parts)
            if self.policy != "front" and (rest or length % self.unit):
                of = f" in units of {self.unit}" if self.unit > 1 else ""
                raise LayoutError(
                    f"dim {self.dim} of length {length} does not divide by {_named(self.axes)}={parts}{of}"
                )
            low = index * count + min(index, rest)
            high = low + count + (index < rest)
        low, high = min(low * self.unit, length), min(high * self.unit, length)
        return low, high - low

    def _segments(self, length: int) -> list[Run]:
        if not self.segs:
            return [(0, length)]
        scale, rest = divmod(length, sum(self.segs))
        if rest:
            raise LayoutError(f"dim {self.dim} of length {length} does not divide into segments {list(self.segs)}")
        return [(scale * sum(self.segs[:index]), scale * seg) for index, seg in enumerate(self.segs)]

    def to_json(self) -> Record:
        axis = self.axis if isinstance(self.axis, str) else list(self.axis)
        policy = self.policy if isinstance(self.policy, str) else list(self.policy)
        record: Record = {"op": "shard", "dim": self.dim, "axis": axis, "policy": policy}
        if self.segs:
            record["segs"] = list(self.segs)
        if self.unit != 1:
            record["unit"] = self.unit
        return record


@dataclass(frozen=True, slots=True)
class Flat:
    """The last operation: row-major ranges of what the others leave, one a rank along `axis` (ZeRO, FSDP1).

    With a `buffer` (a `Buffer` of the layout) the range is of the concatenation of its tensors. Lengths are padded so
    that every part is a multiple of `align` elements (DeepSpeed: 2) and the whole one of `multiple` (Megatron: 128).
    """

    axis: str | tuple[str, ...]
    align: int = 1
    multiple: int = 1
    buffer: str | None = None

    def __post_init__(self) -> None:
        axes = _axes(self.axis)
        object.__setattr__(self, "axis", axes[0] if len(axes) == 1 else axes)
        records.whole(self.align, "the alignment of a flat range", 1)
        records.whole(self.multiple, "the multiple of a flat range", 1)
        if self.buffer is not None:
            records.text(self.buffer, "the buffer of a flat range")

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def part_length(self, length: int, parts: int) -> int:
        """Elements of each part of a range of `length` elements, padding included."""
        whole = lcm(parts * self.align, self.multiple)
        return -(-length // whole) * whole // parts

    def to_json(self) -> Record:
        axis = self.axis if isinstance(self.axis, str) else list(self.axis)
        record: Record = {"op": "flat", "axis": axis, "align": self.align, "multiple": self.multiple}
        if self.buffer is not None:
            record["buffer"] = self.buffer
        return record


@dataclass(frozen=True, slots=True)
class Buffer:
    """An ordered concatenation of tensors for `Flat`: on each rank, of those that it owns.

    Each tensor begins at a multiple of `start` elements (Megatron: 64). With `bucket` > 0 a bucket ends after the
    tensor that fills it to at least so many elements; each bucket is padded and split by itself (Megatron's
    distributed optimizer: `fqns` in reverse order of the parameters).
    """

    name: str
    fqns: tuple[str, ...]
    start: int = 1
    bucket: int = 0

    def __post_init__(self) -> None:
        records.text(self.name, "the name of a buffer")
        fqns = tuple(records.text(fqn, "a name in a buffer") for fqn in records.items(self.fqns, "a buffer's names"))
        object.__setattr__(self, "fqns", fqns)
        records.whole(self.start, "the start of a buffer's tensors", 1)
        records.whole(self.bucket, "the bucket of a buffer")
        if len(set(fqns)) != len(fqns):
            raise LayoutError(f"buffer {self.name} names a tensor twice")

    def to_json(self) -> Record:
        return {"name": self.name, "fqns": list(self.fqns), "start": self.start, "bucket": self.bucket}

    @classmethod
    def from_json(cls, record: object) -> Buffer:
        known = records.fields(record, "a buffer of a layout", ("name", "fqns", "start", "bucket"))
        return cls(known["name"], known["fqns"], known["start"], known["bucket"])


Op: TypeAlias = Order | Pad | Shard | Flat

_FIELDS: dict[str, tuple[type[Op], tuple[str, ...], tuple[str, ...]]] = {
    "order": (Order, ("dim", "groups", "parts"), ()),
    "pad": (Pad, ("dim", "multiple", "axes"), ()),
    "shard": (Shard, ("dim", "axis", "policy"), ("segs", "unit")),
    "flat": (Flat, ("axis", "align", "multiple"), ("buffer",)),
}


def op_from_json(record: object) -> Op:
    """Raises LayoutError for anything unknown."""
    kind = record.get("op") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise LayoutError(f"unknown layout operation {kind!r}; run one version of tenplexrun on all nodes")
    build, required, optional = _FIELDS[kind]
    known = dict(records.fields(record, "an operation of a layout", ("op", *required), optional))
    del known["op"]
    for name in ("parts", "axes", "segs"):
        if name in known:
            known[name] = tuple(records.items(known[name], f"`{name}` of an operation"))
    return build(**known)


def flat_index(axes: Sequence[str], size: Sizes, coord: Sizes) -> tuple[int, int]:
    """(number of parts, this rank's) when `axes` count as one, the first outermost."""
    parts, index = 1, 0
    for axis in axes:
        parts, index = parts * size(axis), index * size(axis) + coord(axis)
    return parts, index


def _axes(axis: object) -> tuple[str, ...]:
    axes = (axis,) if isinstance(axis, str) else tuple(records.items(axis, "mesh axes"))
    for one in axes:
        if one not in ALL_AXES:
            raise LayoutError(f"no mesh axis is called {one!r}; use {', '.join(ALL_AXES)}")
    return axes


def _named(axes: Sequence[str]) -> str:
    return "*".join(axes)


def _cut(runs: Sequence[Run], low: int, count: int) -> Iterator[Run]:
    """The stored rows low … low + count - 1 of `runs`."""
    high, place = low + count, 0
    for start, length in runs:
        first, last = max(low - place, 0), min(high - place, length)
        if first < last:
            yield (start if start == PAD else start + first), last - first
        place += length
