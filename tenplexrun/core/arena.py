"""Where a node's regions lie in a slot file of its arena. Agent, store and workers compute the same map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tenplexrun.core import records
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region

ALIGNMENT = 64
"""Bytes; every entry starts at a multiple: a cache line, and more than any element."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A region in a slot, row-major and dense: `num_bytes` bytes from `offset` on. `writer` is a global rank."""

    fqn: str
    region: Region
    dtype: str
    offset: int
    num_bytes: int
    writer: int

    def to_json(self) -> Record:
        return {
            "fqn": self.fqn,
            "region": self.region.to_json(),
            "dtype": self.dtype,
            "offset": self.offset,
            "num_bytes": self.num_bytes,
            "writer": self.writer,
        }

    @classmethod
    def from_json(cls, record: object) -> Entry:
        known = records.fields(record, "an arena entry", ("fqn", "region", "dtype", "offset", "num_bytes", "writer"))
        return cls(
            records.text(known["fqn"], "the name of an arena entry"),
            Region.from_json(known["region"]),
            records.text(known["dtype"], "the element type of an arena entry"),
            *(records.whole(known[name], f"`{name}` of an arena entry") for name in ("offset", "num_bytes", "writer")),
        )


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """Entries by ascending offset, sorted by (fqn, region); `num_bytes` is the size of a slot."""

    entries: tuple[Entry, ...]
    num_bytes: int

    def to_json(self) -> Record:
        return {"entries": [entry.to_json() for entry in self.entries], "num_bytes": self.num_bytes}

    @classmethod
    def from_json(cls, record: object) -> ArenaMap:
        known = records.fields(record, "an arena map", ("entries", "num_bytes"))
        entries = records.items(known["entries"], "the entries of an arena map")
        return cls(tuple(map(Entry.from_json, entries)), records.whole(known["num_bytes"], "the size of an arena map"))


def arena_map(layout: Layout, config: ParallelConfig, ranks: Iterable[int]) -> ArenaMap:
    """The slot of a node with these global ranks: each distinct region once, however many of its ranks hold it.

    A region that several ranks hold is written by the one with the fewest bytes so far (the lowest of equals),
    after the regions that only one rank holds have been counted. Where replicas may differ (`first`) it is the lowest.
    """
    owners: dict[tuple[str, Region], list[int]] = {}
    for rank in sorted(set(ranks)):
        for fqn, regions in layout.regions_of(config, rank).items():
            for region in regions:
                owners.setdefault((fqn, region), []).append(rank)
    for fqn, region in owners:
        if layout.spec(fqn).replicas == "first":
            owners[fqn, region] = owners[fqn, region][:1]
    sizes = {key: key[1].num_elements * item_bytes(layout.spec(key[0]).dtype) for key in owners}
    writers = spread(owners, sizes)
    entries, offset = [], 0
    for fqn, region in sorted(owners):
        size = sizes[fqn, region]
        entries.append(Entry(fqn, region, layout.spec(fqn).dtype, offset, size, writers[fqn, region]))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return ArenaMap(tuple(entries), offset)


def spread(
    owners: Mapping[tuple[str, Region], Sequence[int]], sizes: Mapping[tuple[str, Region], int]
) -> dict[tuple[str, Region], int]:
    """One owner (a rank, or a node's number) for each (name, region): those with one owner first, then each to the one
    with the fewest bytes so far, the lowest of equals."""
    load = {rank: 0 for ranks in owners.values() for rank in ranks}
    writers = {}
    for key in sorted(owners, key=lambda key: (len(owners[key]) > 1, key)):
        writer = min(owners[key], key=lambda rank: (load[rank], rank))
        writers[key] = writer
        load[writer] += sizes[key]
    return writers
