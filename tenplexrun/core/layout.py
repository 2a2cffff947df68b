"""The layout language: what tensors a job's state has, how each is partitioned, and which ranks own it.

A layout knows no sizes of axes: it is evaluated for any `ParallelConfig`. An axis that a tensor does not mention
holds replicas. Layouts are canonical JSON, so that equal ones have equal digests on every node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tenplexrun.core import records
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.parallel import AXES, ParallelConfig
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.stages import Stage, Stages
from tenplexrun.errors import LayoutError

__all__ = ["SCHEMA", "Layout", "Shard", "Stage", "Stages", "TensorSpec"]

SCHEMA = 1
POLICIES = ("ceil", "even", "front")


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim` is split over mesh axis `axis`.

    Policy for a length that the axis does not divide: `ceil` makes parts of ceil(length / parts), the last ones
    shorter or empty (torch.chunk, DTensor); `front` gives the first parts one more (numpy.array_split); `even` refuses.
    """

    dim: int
    axis: str
    policy: str = "ceil"

    def __post_init__(self) -> None:
        records.whole(self.dim, "the dim of a shard")
        if self.axis not in AXES:
            raise LayoutError(f"no mesh axis is called {self.axis!r}; use one of {', '.join(AXES)}")
        if self.policy not in POLICIES:
            raise LayoutError(f"unknown shard policy {self.policy!r}; use one of {', '.join(POLICIES)}")

    def part(self, start: int, length: int, parts: int, index: int) -> tuple[int, int]:
        """(start, length) of one of `parts` parts of an interval. Raises LayoutError where `even` does not divide."""
        if self.policy == "ceil":
            chunk = -(-length // parts)
            low, high = min(index * chunk, length), min((index + 1) * chunk, length)
            return start + low, high - low
        size, rest = divmod(length, parts)
        if rest and self.policy == "even":
            raise LayoutError(f"dim {self.dim} of length {length} does not divide by {self.axis}={parts}")
        return start + index * size + min(index, rest), size + (index < rest)

    def to_json(self) -> Record:
        return {"op": "shard", "dim": self.dim, "axis": self.axis, "policy": self.policy}

    @classmethod
    def from_json(cls, record: object) -> Shard:
        known = records.fields(record, "an operation of a layout", ("op", "dim", "axis", "policy"))
        if known["op"] != "shard":
            raise LayoutError(f"unknown layout operation {known['op']!r}; run one version of tenplexrun on all nodes")
        return cls(known["dim"], known["axis"], known["policy"])


At = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the state: global name, global shape, element type, partitioning and owners.

    `ops` apply in order; several on one dim nest, the first outermost. `stage`: owned by one pp coordinate.
    `at`: the state of one mesh coordinate alone (a random generator's), as (axis, coordinate) pairs or a mapping;
    where a config has no such coordinate nobody needs it, and when its owner is lost, it is lost.
    Raises LayoutError when these contradict one another.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    ops: tuple[Shard, ...] = ()
    stage: Stage | None = None
    at: At | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        records.text(self.fqn, "the name of a tensor")
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "ops", tuple(self.ops))
        pairs = dict(self.at) if self.at is not None else None
        object.__setattr__(self, "at", None if pairs is None else tuple(sorted(pairs.items())))
        try:
            self._check(pairs or {})
        except LayoutError as error:
            raise LayoutError(f"tensor {self.fqn}: {error}") from None

    @property
    def coordinate(self) -> At:
        """`at` as sorted pairs; empty where there is none."""
        return tuple(self.at) if isinstance(self.at, tuple) else ()

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor, once."""
        return self.whole.num_elements * item_bytes(self.dtype)

    @property
    def whole(self) -> Region:
        return Region.whole(self.shape)

    def region(self, config: ParallelConfig, coord: Mapping[str, int]) -> Region | None:
        """The box that the rank at mesh coordinate `coord` holds (it may be empty); None where it is no owner.

        Raises LayoutError where an `even` shard does not divide.
        """
        return _box(self, config, coord) if self.owned(config, coord) else None

    def owned(self, config: ParallelConfig, coord: Mapping[str, int]) -> bool:
        if self.stage is not None and coord["pp"] != self.stage.owner(config.pp):
            return False
        return all(coord[axis] == index for axis, index in self.coordinate)

    def to_json(self) -> Record:
        record: Record = {"fqn": self.fqn, "shape": list(self.shape), "dtype": self.dtype}
        if self.ops:
            record["ops"] = [op.to_json() for op in self.ops]
        if self.stage is not None:
            record["stage"] = self.stage.to_json()
        if self.at is not None:
            record["at"] = dict(self.at)
        return record

    @classmethod
    def from_json(cls, record: object) -> TensorSpec:
        known = records.fields(record, "a tensor of a layout", ("fqn", "shape", "dtype"), ("ops", "stage", "at"))
        at = known.get("at")
        if at is not None:
            records.fields(at, "the coordinate of a tensor", (), AXES)
        return cls(
            known["fqn"],
            tuple(records.items(known["shape"], "the shape of a tensor")),
            known["dtype"],
            tuple(Shard.from_json(op) for op in records.items(known.get("ops", ()), "the operations of a tensor")),
            Stage.from_json(known["stage"]) if known.get("stage") is not None else None,
            at,
        )

    def _check(self, at: Mapping[str, int]) -> None:
        for length in self.shape:
            records.whole(length, "a length of a shape")
        item_bytes(self.dtype)
        axes = [op.axis for op in self.ops]
        if self.stage is not None:
            axes.append("pp")
        for axis, index in at.items():
            records.whole(index, f"the coordinate on axis {axis}")
            axes.append(axis)
        for axis in axes:
            if axis not in AXES or axes.count(axis) > 1:
                raise LayoutError(f"axis {axis!r} is unknown or used twice; each of {', '.join(AXES)} at most once")
        for op in self.ops:
            if op.dim >= len(self.shape):
                raise LayoutError(f"dim {op.dim} is sharded, but the shape {self.shape} has {len(self.shape)} dims")


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a job's state, sorted by name. Raises LayoutError when a name comes twice."""

    tensors: tuple[TensorSpec, ...]
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tensors, key=lambda spec: spec.fqn))
        for spec, following in pairwise(ordered):
            if spec.fqn == following.fqn:
                raise LayoutError(f"two tensors are called {spec.fqn}; give names that are unique over all stages")
        object.__setattr__(self, "tensors", ordered)
        self._memo["specs"] = {spec.fqn: spec for spec in ordered}

    @classmethod
    def merge(cls, layouts: Iterable[Layout]) -> Layout:
        """The union. Raises LayoutError when two describe one name differently."""
        specs: dict[str, TensorSpec] = {}
        for layout in layouts:
            for spec in layout.tensors:
                known = specs.setdefault(spec.fqn, spec)
                if known != spec:
                    raise LayoutError(
                        f"tensor {spec.fqn} is declared in two ways: {known.to_json()} and {spec.to_json()}; "
                        "use global names (a stage's own layer numbers collide) and equal rules on all ranks"
                    )
        return cls(tuple(specs.values()))

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
        """Raises LayoutError for a name that is not in the layout."""
        found: TensorSpec | None = self._memo["specs"].get(fqn)
        if found is None:
            raise LayoutError(f"the layout {self.digest} has no tensor {fqn}")
        return found

    def region(self, fqn: str, config: ParallelConfig, coord: Mapping[str, int]) -> Region | None:
        """What the rank at `coord` holds of a tensor; see `TensorSpec.region`."""
        return self.spec(fqn).region(config, coord)

    def regions_of(self, config: ParallelConfig, rank: int) -> Mapping[str, Region]:
        """The non-empty region that `rank` holds of each tensor that it owns, by name. Do not change the result.

        Raises LayoutError where `check` would, ValueError for a rank outside the world.
        """
        key = (config, rank)
        if key not in self._memo:
            self._memo[key] = self._evaluate(config, config.coord(rank))
        found: Mapping[str, Region] = self._memo[key]
        return found

    def check(self, config: ParallelConfig) -> None:
        """Raises LayoutError, one line, when this state cannot be laid out under `config`."""
        if config.ep > 1:
            raise LayoutError(f"ep={config.ep}: expert parallelism is not supported yet; use ep=1")
        origin = dict.fromkeys(AXES, 0)
        for spec in self.tensors:
            if spec.stage is not None and config.pp > spec.stage.of:
                raise LayoutError(
                    f"pp={config.pp} stages cannot share {spec.stage.of} items ({spec.fqn}); use pp <= {spec.stage.of}"
                )
            try:
                _box(spec, config, origin)
            except LayoutError as error:
                raise LayoutError(f"tensor {spec.fqn} {spec.shape}: {error}; choose other sizes") from None

    def to_json(self) -> Record:
        return {"schema": SCHEMA, "tensors": [spec.to_json() for spec in self.tensors]}

    @classmethod
    def from_json(cls, record: object) -> Layout:
        """Raises LayoutError for other schema versions and for anything unknown."""
        known = records.fields(record, "a layout", ("schema", "tensors"))
        if known["schema"] != SCHEMA:
            raise LayoutError(f"layout schema {known['schema']!r}, want {SCHEMA}; run one version on all nodes")
        return cls(tuple(TensorSpec.from_json(spec) for spec in records.items(known["tensors"], "a layout's tensors")))

    def _evaluate(self, config: ParallelConfig, coord: Mapping[str, int]) -> dict[str, Region]:
        """One box for each distinct (shape, ops): a model has few of them."""
        boxes: dict[Any, Region] = {}
        found = {}
        for spec in self.tensors:
            if not spec.owned(config, coord):
                continue
            signature = (spec.shape, spec.ops)
            box = boxes.get(signature)
            if box is None:
                box = boxes[signature] = _box(spec, config, coord)
            if not box.is_empty:
                found[spec.fqn] = box
        return found


def _box(spec: TensorSpec, config: ParallelConfig, coord: Mapping[str, int]) -> Region:
    """The operations of `spec` applied one after the other, whoever owns it."""
    offsets, lengths = [0] * len(spec.shape), list(spec.shape)
    for op in spec.ops:
        offsets[op.dim], lengths[op.dim] = op.part(
            offsets[op.dim], lengths[op.dim], config.size(op.axis), coord[op.axis]
        )
    return Region(tuple(offsets), tuple(lengths))
