"""Parallel configurations: the sizes of the mesh axes and the order of ranks on the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the dense mesh, outermost first: rank = ((pp · DP + dp) · CP + cp) · TP + tp."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes (pp, dp, cp, ep, tp) of the mesh axes. `ep` divides the dense mesh, it does not multiply the world.

    Raises ValueError when a size is below one, or ep does not divide dp · cp · tp.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "cp", "ep", "tp"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis}={size!r}: the size of an axis is a whole number of at least 1")
        if (self.dp * self.cp * self.tp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp*cp*tp={self.dp * self.cp * self.tp}")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: str) -> int:
        """Size of `axis`, one of `AXES`."""
        return int(getattr(self, axis))

    def coord(self, rank: int) -> dict[str, int]:
        """Mesh coordinate of `rank`, one entry an axis of `AXES`. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        coord = {}
        for axis in reversed(AXES):
            rank, coord[axis] = divmod(rank, self.size(axis))
        return {axis: coord[axis] for axis in AXES}

    def rank(self, coord: Mapping[str, int]) -> int:
        """Rank at a mesh coordinate; an axis that `coord` does not mention counts as 0."""
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + coord.get(axis, 0)
        return rank

    def to_json(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "tp": self.tp}

    @classmethod
    def from_json(cls, record: Mapping[str, int]) -> ParallelConfig:
        return cls(**{axis: int(record.get(axis, 1)) for axis in ("pp", "dp", "cp", "ep", "tp")})

    def __str__(self) -> str:
        sizes = self.to_json()
        return "·".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "dp1"
