"""The layout language: what tensors a job's state has, how each is partitioned, and which ranks own it.

A layout knows no sizes of axes: it is evaluated for any `ParallelConfig`. An axis that a tensor does not mention
holds replicas. Layouts are canonical JSON, so that equal ones have equal digests on every node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any, TypeVar

from tenplexrun.core import local, records
from tenplexrun.core.local import Local, Part
from tenplexrun.core.ops import Buffer, Flat, Op, Order, Pad, Run, Shard
from tenplexrun.core.parallel import ALL_AXES, ParallelConfig
from tenplexrun.core.ranges import Place, places
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.shared import Boxes, SharedRegions
from tenplexrun.core.spec import TensorSpec
from tenplexrun.core.stages import Stage, Stages
from tenplexrun.errors import LayoutError

__all__ = [
    "SCHEMA", "Buffer", "Flat", "Layout", "Local", "Op", "Order", "Pad", "Part", "Shard", "Stage", "Stages",
    "TensorSpec",
]  # fmt: skip

SCHEMA = 2
"""1 knew Shard with one axis, and neither buffers nor copies; it is still read."""

Coord = Mapping[str, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a job's state, sorted by name, and the buffers that `Flat` speaks of.

    Raises LayoutError when a name comes twice.
    """

    tensors: tuple[TensorSpec, ...]
    buffers: tuple[Buffer, ...] = ()
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tensors, key=lambda spec: spec.fqn))
        names = sorted(name for spec in ordered for name in (spec.fqn, *spec.aliases))
        for name, following in pairwise(names):
            if name == following:
                raise LayoutError(f"two tensors are called {name}; give names that are unique over all stages")
        buffers = {buffer.name: buffer for buffer in sorted(self.buffers, key=lambda buffer: buffer.name)}
        if len(buffers) != len(self.buffers):
            raise LayoutError("two buffers of the layout have one name")
        object.__setattr__(self, "tensors", ordered)
        object.__setattr__(self, "buffers", tuple(buffers.values()))
        specs = {spec.fqn: spec for spec in ordered}
        self._memo["specs"] = specs
        self._memo["aliases"] = {alias: spec for spec in ordered for alias in spec.aliases}
        self._memo["buffers"] = buffers
        self._memo["dims"] = {}
        for spec in ordered:
            named = spec.flat.buffer if spec.flat is not None else None
            if named is not None and (named not in buffers or spec.fqn not in buffers[named].fqns):
                raise LayoutError(f"tensor {spec.fqn} is a range of the buffer {named}, which does not name it")
        for buffer in buffers.values():
            flats = {specs[fqn].flat for fqn in buffer.fqns if fqn in specs}
            if len(flats) > 1 or None in flats:
                raise LayoutError(f"the tensors of buffer {buffer.name} need the same Flat operation, at their end")

    @classmethod
    def merge(cls, layouts: Iterable[Layout]) -> Layout:
        """The union. Raises LayoutError when two describe one name differently."""
        specs: dict[str, TensorSpec] = {}
        buffers: dict[str, Buffer] = {}
        for layout in layouts:
            for spec in layout.tensors:
                _same(specs.setdefault(spec.fqn, spec), spec, f"tensor {spec.fqn}")
            for buffer in layout.buffers:
                _same(buffers.setdefault(buffer.name, buffer), buffer, f"buffer {buffer.name}")
        return cls(tuple(specs.values()), tuple(buffers.values()))

    @classmethod
    def union(cls, config: ParallelConfig, declared: Mapping[int, Layout]) -> Layout:
        """`merge` of what each rank (all of them) declares, and proof that each has just what the union gives it.

        Raises LayoutError naming rank and tensor: layer numbers local to a stage, or a forgotten tensor, show so.
        """
        layout = cls.merge(declared.values())
        for rank, own in sorted(declared.items()):
            coord = config.expand(config.coord(rank))
            for spec in layout.tensors:
                if spec.owned(config, coord) != (spec.fqn in own._memo["specs"]):
                    has = "declares" if spec.fqn in own else "lacks"
                    raise LayoutError(
                        f"rank {rank} {has} {spec.fqn}, which by its stage and coordinate is "
                        f"{'another' if spec.fqn in own else 'its'} rank's; use global names on all ranks"
                    )
        return layout

    @property
    def digest(self) -> str:
        """blake2b of the canonical JSON, 32 hex digits."""
        if "digest" not in self._memo:
            canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
            self._memo["digest"] = hashlib.blake2b(canonical.encode("ascii"), digest_size=16).hexdigest()
        return str(self._memo["digest"])

    @property
    def num_bytes(self) -> int:
        """Of the whole state, each element once."""
        return sum(spec.num_bytes for spec in self.tensors)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._memo["specs"]

    def spec(self, fqn: str) -> TensorSpec:
        """By name or alias. Raises LayoutError for a name that is not in the layout."""
        found: TensorSpec | None = self._memo["specs"].get(fqn) or self._memo["aliases"].get(fqn)
        if found is None:
            raise LayoutError(f"the layout {self.digest} has no tensor {fqn}")
        return found

    def region(self, fqn: str, config: ParallelConfig, coord: Coord) -> Region | None:
        """What the rank at `coord` holds of a tensor that is one box; see `TensorSpec.region`."""
        return self.spec(fqn).region(config, coord)

    def local(self, fqn: str, config: ParallelConfig, coord: Coord) -> Local | None:
        """The rank's own array of a tensor, box by box; None where it is no owner. Raises LayoutError as `check`."""
        spec, full = self.spec(fqn), config.expand(coord)
        if not spec.owned(config, full):
            return None
        place = self._place(spec, config, full)
        runs = spec.runs(config, full)
        return local.whole(runs) if place is None else local.flat(runs, *place)

    def regions_of(self, config: ParallelConfig, rank: int) -> SharedRegions:
        """The non-empty regions that `rank` holds of each tensor that it owns, sorted, by name.

        They are the fewest boxes, disjoint. Raises LayoutError where `check` would, ValueError for a rank outside.
        """
        return self.regions_at([(config, rank)])

    def regions_at(self, ranks: Iterable[tuple[ParallelConfig, int]]) -> SharedRegions:
        """The distinct regions that several ranks, of one or more configs, hold together."""
        keys: set[tuple[ParallelConfig, tuple[int, ...]]] = set()
        own: dict[str, set[Region]] = {}
        for config, rank in ranks:
            full = config.expand(config.coord(rank))
            keys.add((config, tuple(full[axis] for axis in self.axes)))
            for spec in self._at(full):
                for region in self._regions(spec, config, full):
                    own.setdefault(spec.fqn, set()).add(region)
        shared = self._union(frozenset(keys))
        return SharedRegions(shared, {fqn: tuple(sorted(own[fqn])) for fqn in sorted(own)})

    def together(self, several: Iterable[Boxes]) -> SharedRegions:
        """The distinct regions of all; equal ones of several tensors are one object, as in all that is given here."""
        gathered: dict[str, list[tuple[Region, ...]]] = {}
        for boxes in several:
            for fqn, regions in boxes.items():
                gathered.setdefault(fqn, []).append(regions)
        merged: dict[tuple[int, ...], tuple[Region, ...]] = {}
        every = {fqn: self._together(gathered[fqn], merged) for fqn in sorted(gathered)}
        own = {fqn for fqn in every if self._memo["specs"][fqn].at is not None}
        shared = {fqn: regions for fqn, regions in every.items() if fqn not in own}
        return SharedRegions(shared, {fqn: every[fqn] for fqn in sorted(own)})

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes on which the tensors that are not one coordinate's own depend."""
        if "axes" not in self._memo:
            named = {axis for spec in self.tensors if spec.at is None for axis in spec.axes}
            self._memo["axes"] = tuple(axis for axis in ALL_AXES if axis in named)
        axes: tuple[str, ...] = self._memo["axes"]
        return axes

    def check(self, config: ParallelConfig) -> None:
        """Raises LayoutError, one line, when this state cannot be laid out under `config`."""
        if ("checked", config) in self._memo:
            return
        seen: set[_Dim] = set()
        for spec in self.tensors:
            for stage in (spec.stage, *spec.copies) if spec.stage is not None else ():
                if config.pp > stage.of:
                    raise LayoutError(
                        f"pp={config.pp} stages cannot share {stage.of} items ({spec.fqn}); use pp <= {stage.of}"
                    )
            if spec.expert is not None and config.ep > spec.expert.of:
                raise LayoutError(f"ep={config.ep} ranks cannot share {spec.expert.of} experts ({spec.fqn}); use less")
            try:
                for dim in self._dims(spec):
                    if dim not in seen:
                        seen.add(dim)
                        dim.check(config)
            except LayoutError as error:
                raise LayoutError(f"tensor {spec.fqn} {spec.shape}: {error}; choose other sizes") from None
        for buffer in self.buffers:
            absent = [fqn for fqn in buffer.fqns if fqn not in self]
            if absent:
                raise LayoutError(f"buffer {buffer.name} names {absent[0]}, which is no tensor of the layout")
        self._memo["checked", config] = True

    def to_json(self) -> Record:
        record: Record = {"schema": SCHEMA, "tensors": [spec.to_json() for spec in self.tensors]}
        if self.buffers:
            record["buffers"] = [buffer.to_json() for buffer in self.buffers]
        return record

    @classmethod
    def from_json(cls, record: object) -> Layout:
        """Raises LayoutError for other schema versions and for anything unknown."""
        known = records.fields(record, "a layout", ("schema", "tensors"), ("buffers",))
        if records.whole(known["schema"], "the schema of a layout") not in (1, SCHEMA):
            raise LayoutError(f"layout schema {known['schema']!r}, want {SCHEMA}; run one version on all nodes")
        buffers = map(Buffer.from_json, records.items(known.get("buffers", ()), "a layout's buffers"))
        specs = map(TensorSpec.from_json, records.items(known["tensors"], "a layout's tensors"))
        return cls(tuple(specs), tuple(buffers))

    def remember(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gave for this key first: for whatever else is worked out of a layout alone."""
        if ("made", key) not in self._memo:
            self._memo["made", key] = make()
        found: T = self._memo["made", key]
        return found

    # --- evaluation: a model has few distinct tensors and a mesh few distinct ranks, so all is remembered ----------

    def _at(self, coord: Coord) -> Iterable[TensorSpec]:
        """The tensors that are this coordinate's own."""
        if "at" not in self._memo:
            by_axes: dict[tuple[str, ...], dict[tuple[int, ...], list[TensorSpec]]] = {}
            for spec in self.tensors:
                if spec.at is not None:
                    axes = tuple(axis for axis, _ in spec.coordinate)
                    index = tuple(index for _, index in spec.coordinate)
                    by_axes.setdefault(axes, {}).setdefault(index, []).append(spec)
            self._memo["at"] = by_axes
        for axes, found in self._memo["at"].items():
            yield from found.get(tuple(coord[axis] for axis in axes), ())

    def _union(self, keys: frozenset[tuple[ParallelConfig, tuple[int, ...]]]) -> Boxes:
        """One mapping object for equal keys: that objects are the same lets the planner know equal nodes by it."""
        if keys not in self._memo:
            if len(keys) == 1:
                self._memo[keys] = self._base(*next(iter(keys)))
            else:
                bases = [self._base(config, key) for config, key in sorted(keys, key=lambda one: (str(one[0]), one[1]))]
                self._memo[keys] = self.together(bases).shared
        found: Boxes = self._memo[keys]
        return found

    def _together(
        self, several: list[tuple[Region, ...]], merged: dict[tuple[int, ...], tuple[Region, ...]]
    ) -> tuple[Region, ...]:
        key = tuple(map(id, several))  # the caller keeps them
        if key not in merged:
            merged[key] = self.interned(tuple(sorted({region for boxes in several for region in boxes})))
        return merged[key]

    def interned(self, boxes: tuple[Region, ...]) -> tuple[Region, ...]:
        known: tuple[Region, ...] = self._memo.setdefault(("boxes", boxes), boxes)
        return known

    def _base(self, config: ParallelConfig, key: tuple[int, ...]) -> Boxes:
        """What a rank with these coordinates on `axes` holds."""
        if (config, key) not in self._memo:
            coord = {**dict.fromkeys(ALL_AXES, 0), **dict(zip(self.axes, key, strict=True))}
            found: dict[str, tuple[Region, ...]] = {}
            for spec, axes, known, fqns in self._kinds(config, coord["pp"]):
                if spec.expert is not None and spec.expert.owner(config.ep) != coord["ep"]:
                    continue
                index = tuple([coord[axis] for axis in axes])
                if index not in known:
                    known[index] = self.interned(self._regions(spec, config, coord))
                if known[index]:
                    found.update(dict.fromkeys(fqns, known[index]))
            self._memo[config, key] = found
        base: Boxes = self._memo[config, key]
        return base

    def _kinds(self, config: ParallelConfig, stage: int) -> Iterable[_Kind]:
        """The tensors of a stage, those together that are parted alike."""
        if ("kinds", config, stage) not in self._memo:
            kinds: dict[Any, _Kind] = {}
            for spec in self._owned(config.pp, stage):
                buffered = spec.flat is not None and spec.flat.buffer is not None
                alike = (spec.shape, spec.ops, spec.fqn if buffered else None)
                if (alike, spec.expert) not in kinds:
                    axes = self.axes if buffered else spec.parting_axes
                    known = self._memo.setdefault(("known", config, alike), {})
                    kinds[alike, spec.expert] = (spec, axes, known, [])
                kinds[alike, spec.expert][3].append(spec.fqn)
            self._memo["kinds", config, stage] = tuple(kinds.values())
        found: Iterable[_Kind] = self._memo["kinds", config, stage]
        return found

    def _owned(self, pp: int, stage: int) -> list[TensorSpec]:
        if ("owned", pp) not in self._memo:
            by_stage: list[list[TensorSpec]] = [[] for _ in range(pp)]
            for spec in self.tensors:
                if spec.at is None:
                    owners = spec.owners(pp)
                    for owner in range(pp) if owners is None else owners:
                        by_stage[owner].append(spec)
            self._memo["owned", pp] = by_stage
        found: list[TensorSpec] = self._memo["owned", pp][stage]
        return found

    def _regions(self, spec: TensorSpec, config: ParallelConfig, coord: Coord) -> tuple[Region, ...]:
        if spec.flat is None:
            return local.boxes([dim.intervals(config, coord) for dim in self._dims(spec)])
        place = self._place(spec, config, coord)
        assert place is not None
        return local.joined([part.region for part in local.flat(spec.runs(config, coord), *place).parts])

    def _dims(self, spec: TensorSpec) -> list[_Dim]:
        if spec.fqn not in self._memo["dims"]:
            self._memo["dims"][spec.fqn] = [
                self._memo.setdefault(("dim", length, spec.ops_on(dim)), _Dim(length, spec.ops_on(dim)))
                for dim, length in enumerate(spec.shape)
            ]
        found: list[_Dim] = self._memo["dims"][spec.fqn]
        return found

    def _place(self, spec: TensorSpec, config: ParallelConfig, coord: Coord) -> Place | None:
        """Which range of the stored tensor a rank has by `Flat`, and where; None without `Flat`."""
        if spec.flat is None:
            return None
        if spec.flat.buffer is None:
            low, high, length = spec.range(config, coord, prod(local.lengths(spec.runs(config, coord))))
            return low, high, 0, length
        key = ("places", spec.flat.buffer, config, tuple(coord[axis] for axis in (*self.axes, *spec.axes)))
        if key not in self._memo:
            buffer: Buffer = self._memo["buffers"][spec.flat.buffer]
            members = [self._memo["specs"][fqn] for fqn in buffer.fqns if fqn in self]
            sizes = {
                member.fqn: prod(local.lengths(member.runs(config, coord)))
                for member in members
                if member.owned(config, coord)
            }
            self._memo[key] = places(buffer, spec.flat, sizes, config, coord)
        found: Place = self._memo[key][spec.fqn]
        return found


_Kind = tuple[TensorSpec, tuple[str, ...], dict[tuple[int, ...], tuple[Region, ...]], list[str]]
"""One of them, the axes that tell its regions apart, these by coordinates on the axes, and the names of all."""


class _Dim:
    """A dim with its operations: whatever the number of ranks, it is evaluated once for each coordinate on its axes."""

    def __init__(self, length: int, ops: tuple[Order | Pad | Shard, ...]) -> None:
        self._length, self._ops = length, ops
        self._axes = tuple(axis for op in ops if isinstance(op, Shard) for axis in op.axes)
        self._repeats = any(isinstance(op, Shard) and op.policy == "repeat" for op in ops)
        self._known: dict[tuple[Any, ...], list[Run]] = {}

    def check(self, config: ParallelConfig) -> None:
        """Raises LayoutError unless every coordinate can have its part, and all parts together are the dim."""
        axes = self._axes
        held: set[tuple[Run, ...]] = set()
        for index in product(*(range(config.size(axis)) for axis in axes)):
            held.add(tuple(self.intervals(config, dict(zip(axes, index, strict=True)))))
        reached = 0
        for start, length in sorted(run for runs in held for run in runs):
            overlap = reached - start
            if overlap < 0 or (overlap and not self._repeats):  # a gap, or rows that two parts have
                break
            reached = max(reached, start + length)
        if reached != self._length:
            raise LayoutError(f"the parts of a dim of {self._length} rows are not the dim: {sorted(held)}")

    def intervals(self, config: ParallelConfig, coord: Coord) -> list[Run]:
        """The canonical intervals that a rank holds, sorted."""
        key = (config, *(coord[axis] for axis in self._axes))
        found = self._known.get(key)
        if found is None:
            found = local.merge(local.stored(self._length, self._ops, config.size, coord.__getitem__))
            self._known[key] = found
        return found


def _same(known: TensorSpec | Buffer, other: TensorSpec | Buffer, what: str) -> None:
    if known != other:
        raise LayoutError(
            f"{what} is declared in two ways: {known.to_json()} and {other.to_json()}; "
            "use global names (a stage's own layer numbers collide) and equal rules on all ranks"
        )
