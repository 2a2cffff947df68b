"""One tensor of the state: its canonical form, the operations that part it, and who owns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tenplexrun.core import local, records
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.ops import Flat, Op, Order, Pad, Run, Shard, flat_index, op_from_json
from tenplexrun.core.parallel import ALL_AXES, AXES, ParallelConfig
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.stages import Stage
from tenplexrun.errors import LayoutError

At = tuple[tuple[str, int], ...]
Replicas = Literal["agree", "first"]

_DENSE = frozenset({"dp", "cp", "tp", "dp_replicate", "dp_shard"})
_EXPERT = frozenset({"edp", "ep", "etp"})
_DP_PARTS = frozenset({"dp_replicate", "dp_shard"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Global name, global (unpadded) shape, element type, partitioning and owners.

    `ops` apply in order; several on one dim nest, the first outermost; `Flat` is the last. `stage`: owned by one pp
    coordinate, and by those of `copies` (embeddings tied over the first and the last stage). `expert`: likewise by one
    coordinate of ep (item `index` of `of` experts). An axis that nothing
    mentions holds replicas: `replicas` says whether they agree to the bit, or the first one counts (BatchNorm's means
    under DDP). `aliases`: other names that scripts have for it.
    `at`: the state of one mesh coordinate alone (a random generator's), as (axis, coordinate) pairs or a mapping;
    where a config has no such coordinate nobody needs it, and when its owner is lost, it is lost.
    Raises LayoutError when these contradict one another.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    ops: tuple[Op, ...] = ()
    stage: Stage | None = None
    at: At | Mapping[str, int] | None = None
    copies: tuple[Stage, ...] = ()
    aliases: tuple[str, ...] = ()
    replicas: Replicas = "agree"
    expert: Stage | None = None

    def __post_init__(self) -> None:
        records.text(self.fqn, "the name of a tensor")
        for name in ("shape", "ops", "copies", "aliases"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
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

    @property
    def flat(self) -> Flat | None:
        """The last operation, where it is `Flat`."""
        last = self.ops[-1] if self.ops else None
        return last if isinstance(last, Flat) else None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that this tensor mentions, each once, in the order of `ALL_AXES`."""
        named = {*self.parting_axes, *(axis for axis, _ in self.coordinate)}
        if self.stage is not None:
            named.add("pp")
        if self.expert is not None:
            named.add("ep")
        return tuple(axis for axis in ALL_AXES if axis in named)

    @property
    def parting_axes(self) -> tuple[str, ...]:
        """The axes of its operations, each once: on these its regions depend."""
        named = {axis for op in self.ops if not isinstance(op, Pad) for axis in getattr(op, "axes", ())}
        return tuple(axis for axis in ALL_AXES if axis in named)

    def owners(self, pp: int) -> frozenset[int] | None:
        """The pp coordinates that own it; None: all."""
        if self.stage is None:
            return None
        return frozenset(stage.owner(pp) for stage in (self.stage, *self.copies))

    def owned(self, config: ParallelConfig, coord: Mapping[str, int]) -> bool:
        """Whether the rank at the full coordinate `coord` (`ParallelConfig.expand`) has this tensor."""
        owners = self.owners(config.pp)
        if owners is not None and coord["pp"] not in owners:
            return False
        if self.expert is not None and coord["ep"] != self.expert.owner(config.ep):
            return False
        return all(coord[axis] == index for axis, index in self.coordinate)

    def ops_on(self, dim: int) -> tuple[Order | Pad | Shard, ...]:
        """The operations on one dim, in order. Dims are independent of one another."""
        return tuple(op for op in self.ops if not isinstance(op, Flat) and op.dim == dim)

    def runs(self, config: ParallelConfig, coord: Mapping[str, int]) -> list[list[Run]]:
        """What all operations but `Flat` leave, a dim, at a full coordinate. Raises LayoutError as they do."""
        return [
            local.stored(length, self.ops_on(dim), config.size, coord.__getitem__)
            for dim, length in enumerate(self.shape)
        ]

    def range(self, config: ParallelConfig, coord: Mapping[str, int], size: int) -> tuple[int, int, int]:
        """(low, high, padded length) of this rank's range, of `size` elements, by a `Flat` without a buffer."""
        flat = self.flat
        assert flat is not None
        parts, index = flat_index(flat.axes, config.size, coord.__getitem__)
        length = flat.part_length(size, parts)
        low = min(index * length, size)
        return low, min(low + length, size), length

    def region(self, config: ParallelConfig, coord: Mapping[str, int]) -> Region | None:
        """The box (it may be empty) that the rank at mesh coordinate `coord` holds; None where it is no owner.

        For tensors whose local array is one box. Raises LayoutError for others, whose parts `Layout.local` gives.
        """
        full = config.expand(coord)
        if not self.owned(config, full):
            return None
        runs = self.runs(config, full)
        if self.flat is None and all(len(one) <= 1 for one in runs):
            ends = [one[0] if one else (0, 0) for one in runs]
            return Region(tuple(start for start, _ in ends), tuple(length for _, length in ends))
        raise LayoutError(f"tensor {self.fqn} is not one box of the global tensor here; ask for its parts")

    def to_json(self) -> Record:
        record: Record = {"fqn": self.fqn, "shape": list(self.shape), "dtype": self.dtype}
        if self.ops:
            record["ops"] = [op.to_json() for op in self.ops]
        if self.stage is not None:
            record["stage"] = self.stage.to_json()
        if self.at is not None:
            record["at"] = dict(self.at)
        if self.copies:
            record["copies"] = [stage.to_json() for stage in self.copies]
        if self.aliases:
            record["aliases"] = list(self.aliases)
        if self.replicas != "agree":
            record["replicas"] = self.replicas
        if self.expert is not None:
            record["expert"] = self.expert.to_json()
        return record

    @classmethod
    def from_json(cls, record: object) -> TensorSpec:
        optional = ("ops", "stage", "at", "copies", "aliases", "replicas", "expert")
        known = records.fields(record, "a tensor of a layout", ("fqn", "shape", "dtype"), optional)
        at = known.get("at")
        if at is not None:
            records.fields(at, "the coordinate of a tensor", (), ALL_AXES)
        return cls(
            known["fqn"],
            tuple(records.items(known["shape"], "the shape of a tensor")),
            known["dtype"],
            tuple(map(op_from_json, records.items(known.get("ops", ()), "the operations of a tensor"))),
            Stage.from_json(known["stage"]) if known.get("stage") is not None else None,
            at,
            tuple(map(Stage.from_json, records.items(known.get("copies", ()), "the copies of a tensor"))),
            tuple(records.items(known.get("aliases", ()), "the aliases of a tensor")),
            known.get("replicas", "agree"),
            Stage.from_json(known["expert"]) if known.get("expert") is not None else None,
        )

    def _check(self, at: Mapping[str, int]) -> None:
        for length in self.shape:
            records.whole(length, "a length of a shape")
        item_bytes(self.dtype)
        for alias in self.aliases:
            records.text(alias, "an alias")
        if self.replicas not in ("agree", "first"):
            raise LayoutError(f"replicas {self.replicas!r} are unknown; they `agree`, or the `first` counts")
        if self.copies and self.stage is None:
            raise LayoutError("copies on other stages need a stage of its own")
        for index in at.values():
            records.whole(index, "a coordinate")
        _check_axes([*self._sharded_axes(), *(["pp"] if self.stage is not None else []), *at])
        if self.expert is not None:
            _check_axes([*self._sharded_axes(), *at, "ep"])
        for op in self.ops:
            if isinstance(op, Flat):
                if op is not self.ops[-1]:
                    raise LayoutError("Flat is the last operation of a tensor; nothing can follow it")
            elif op.dim >= len(self.shape):
                raise LayoutError(f"dim {op.dim} is sharded, but the shape {self.shape} has {len(self.shape)} dims")

    def _sharded_axes(self) -> list[str]:
        return [axis for op in self.ops if isinstance(op, Shard | Flat) for axis in op.axes]


def _check_axes(axes: Sequence[str]) -> None:
    for axis in axes:
        if axis not in ALL_AXES or axes.count(axis) > 1:
            raise LayoutError(f"axis {axis!r} is unknown or used twice; each of {', '.join(ALL_AXES)} at most once")
    named = set(axes)
    if "dp" in named and named & _DP_PARTS:
        raise LayoutError("dp is used twice: as a whole, and as dp_replicate or dp_shard")
    if named & _EXPERT and named & _DENSE:
        raise LayoutError(
            f"the expert mesh (edp, ep, etp) and the dense one ({', '.join(AXES[1:])}) count the same ranks: "
            "one tensor can be on one of them only"
        )
