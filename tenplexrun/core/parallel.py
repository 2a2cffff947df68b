"""Parallel configurations: the sizes of the mesh axes and the order of ranks on the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from typing import Any

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the dense mesh, outermost first as by default: rank = ((pp · DP + dp) · CP + cp) · TP + tp."""

DERIVED_AXES = ("dp_replicate", "dp_shard", "edp", "ep", "etp")
"""dp = dp_replicate · dp_shard, the first outermost. The expert mesh (pp, edp, ep, etp) counts the same ranks anew."""

ALL_AXES = (*AXES, *DERIVED_AXES)
"""What a layout may name."""

OPTIONAL = ("etp", "dp_shard")
"""Sizes of which 0 stands for a default."""

_SIZES = ("pp", "dp", "cp", "ep", "tp")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes (pp, dp, cp, ep, tp) of the mesh axes. `ep` divides the dense mesh, it does not multiply the world.

    `etp`: tensor parallelism of the experts; 0 is tp where ep · tp divides dp · cp · tp, else 1 (Megatron's default
    is tp too). `dp_shard`: ranks that share one copy of the state in HSDP; 0 is all of dp. `order`: the dense axes,
    outermost first (Megatron's "tp-cp-ep-dp-pp" read backwards).
    Raises ValueError when a size is below one, or the sizes do not divide one another.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    etp: int = 0
    dp_shard: int = 0
    order: tuple[str, ...] = AXES
    _size: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in _SIZES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis}={size!r}: the size of an axis is a whole number of at least 1")
        dense = self.dp * self.cp * self.tp
        if dense % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp*cp*tp={dense}")
        if self.etp < 0 or (self.etp and dense % (self.ep * self.etp)):
            raise ValueError(f"ep*etp={self.ep}*{self.etp} does not divide dp*cp*tp={dense}")
        if self.dp_shard < 0 or (self.dp_shard and self.dp % self.dp_shard):
            raise ValueError(f"dp_shard={self.dp_shard} does not divide dp={self.dp}")
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order={self.order}: name each of {', '.join(AXES)} once, the outermost first")
        etp = self.etp or (self.tp if (self.dp * self.cp) % self.ep == 0 else 1)
        shard = self.dp_shard or self.dp
        self._size.update({axis: getattr(self, axis) for axis in _SIZES})
        self._size.update(etp=etp, edp=dense // (self.ep * etp), dp_shard=shard, dp_replicate=self.dp // shard)

    @classmethod
    def least(cls, record: Mapping[str, Any]) -> ParallelConfig:
        """From JSON, with the least dp that the other sizes allow: what a user fixes, while the nodes give dp.

        Raises ValueError as the class does.
        """
        inner = int(record.get("cp", 1)) * int(record.get("tp", 1))
        experts = int(record.get("ep", 1)) * (int(record.get("etp", 0)) or 1)
        dp = lcm(int(record.get("dp_shard", 0)) or 1, experts // (gcd(experts, inner) or 1) or 1)
        return cls.from_json({**record, "dp": dp})

    def at_world(self, world_size: int) -> ParallelConfig | None:
        """With the dp that makes `world_size` ranks; None where no dp does, or it contradicts the other sizes."""
        dp, rest = divmod(world_size, self.pp * self.cp * self.tp)
        try:
            return None if rest else replace(self, dp=dp)
        except ValueError:
            return None

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: str) -> int:
        """Size of `axis`, one of `ALL_AXES`."""
        return self._size[axis]

    def coord(self, rank: int) -> dict[str, int]:
        """Dense mesh coordinate of `rank`, one entry an axis of `AXES`. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        coord = {}
        for axis in reversed(self.order):
            rank, coord[axis] = divmod(rank, self._size[axis])
        return {axis: coord[axis] for axis in AXES}

    def expand(self, coord: Mapping[str, int]) -> dict[str, int]:
        """A dense coordinate with its entries on `DERIVED_AXES` added.

        Within a pipeline stage the expert mesh counts the ranks in their order: ((edp · EP + ep) · ETP + etp).
        """
        full = {axis: coord.get(axis, 0) for axis in AXES}
        index = 0
        for axis in self.order:
            if axis != "pp":
                index = index * self._size[axis] + full[axis]
        index, full["etp"] = divmod(index, self._size["etp"])
        full["edp"], full["ep"] = divmod(index, self.ep)
        full["dp_replicate"], full["dp_shard"] = divmod(full["dp"], self._size["dp_shard"])
        return full

    def rank(self, coord: Mapping[str, int]) -> int:
        """Rank at a mesh coordinate; an axis that `coord` does not mention counts as 0."""
        rank = 0
        for axis in self.order:
            rank = rank * self.size(axis) + coord.get(axis, 0)
        return rank

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "tp": self.tp}
        if self.etp:
            record["etp"] = self.etp
        if self.dp_shard:
            record["dp_shard"] = self.dp_shard
        if self.order != AXES:
            record["order"] = list(self.order)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ParallelConfig:
        sizes = {axis: int(record.get(axis, 1)) for axis in _SIZES}
        more = {name: int(record.get(name, 0)) for name in OPTIONAL}
        return cls(**sizes, **more, order=tuple(record.get("order", AXES)))

    def __str__(self) -> str:
        shown = [f"{axis}{getattr(self, axis)}" for axis in _SIZES if getattr(self, axis) > 1] or ["dp1"]
        shown += [f"{name}{getattr(self, name)}" for name in ("etp", "dp_shard") if getattr(self, name)]
        return "·".join(shown) + ("" if self.order == AXES else f" ({'-'.join(self.order)})")
