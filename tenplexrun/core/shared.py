"""Regions by tensor name, in two parts: what equal ranks or nodes share, as one object, and what is one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tenplexrun.core.regions import Region

Boxes = Mapping[str, tuple[Region, ...]]
"""For each tensor's name its distinct regions, sorted."""


class SharedRegions(Mapping[str, tuple[Region, ...]]):
    """`Boxes` of which `shared` is the same object wherever it is equal, so that a thousand nodes cost as one.

    `own` holds the state of single mesh coordinates; no name is in both.
    """

    __slots__ = ("own", "shared")

    def __init__(self, shared: Boxes, own: Boxes) -> None:
        self.shared, self.own = shared, own

    def __getitem__(self, fqn: str) -> tuple[Region, ...]:
        found = self.own.get(fqn)
        return self.shared[fqn] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({**self.shared, **self.own}))

    def __len__(self) -> int:
        return len(self.shared) + len(self.own)


def parted(boxes: Boxes) -> tuple[Boxes, Boxes]:
    """(shared, own) of any mapping; a plain one is all shared."""
    return (boxes.shared, boxes.own) if isinstance(boxes, SharedRegions) else (boxes, {})
