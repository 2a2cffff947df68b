"""Where the parts of a snapshot lie on one node, and how to put regions together from them.

A `Piece` is one region of one tensor: row-major bytes of the region's own lengths, native byte order, in a file.
An `Index` is everything a node knows of a snapshot. As JSON (the file that `StoreClient.index` names):

    {"v": 1, "snapshot": {"round", "step", "digest"}, "committed": bool, "consumed": samples,
     "values": {...} or null, "claims": [Claim or BuddyClaim, ...],
     "pieces": [{"fqn", "region", "dtype", "file", "offset", "num_bytes", "checksum"}, ...]}

`file` is relative to the index's own folder, `offset` a multiple of 64 bytes, `checksum` xxh3_64 as 16 hex digits.
Pieces of one tensor may overlap: replicas are equal. The names of an index and of its layout are `index_name`'s and
`layout_name`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tenplexrun.core import records
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region, cover
from tenplexrun.core.snapshots import AnyClaim, SnapshotId, claim_from_json
from tenplexrun.errors import LayoutError

INDEX_VERSION = 1


def index_name(snapshot: SnapshotId) -> str:
    """The file that holds a snapshot's index. It is there as long as the snapshot is: it goes before any of its pieces
    is written over."""
    return f"snapshot-{snapshot.round}-{snapshot.step}-{snapshot.digest}.json"


def layout_name(digest: str) -> str:
    """The file that holds a layout."""
    return f"layout-{digest}.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` bytes at `offset` of `file` hold `region` of the tensor `fqn`."""

    fqn: str
    region: Region
    dtype: str
    file: str
    offset: int
    num_bytes: int
    checksum: int

    def to_json(self) -> Record:
        return {
            "fqn": self.fqn,
            "region": self.region.to_json(),
            "dtype": self.dtype,
            "file": self.file,
            "offset": self.offset,
            "num_bytes": self.num_bytes,
            "checksum": f"{self.checksum:016x}",
        }

    @classmethod
    def from_json(cls, record: object) -> Piece:
        """Raises LayoutError on a malformed record."""
        names = ("fqn", "region", "dtype", "file", "offset", "num_bytes", "checksum")
        known = records.fields(record, "a piece", names)
        try:
            checksum = int(records.text(known["checksum"], "a checksum"), 16)
        except ValueError:
            raise LayoutError(f"a checksum is 16 hex digits, got {known['checksum']!r}") from None
        return cls(
            records.text(known["fqn"], "an fqn"),
            Region.from_json(known["region"]),
            records.text(known["dtype"], "a dtype"),
            records.text(known["file"], "a file"),
            records.whole(known["offset"], "an offset"),
            records.whole(known["num_bytes"], "a number of bytes"),
            checksum,
        )


@dataclass(frozen=True, slots=True)
class Index:
    """A snapshot as one node holds it: which ranks' state it claims, and the pieces that passed their checksums."""

    snapshot: SnapshotId
    committed: bool
    consumed: int
    values: Record | None
    claims: tuple[AnyClaim, ...]
    pieces: tuple[Piece, ...]

    def to_json(self) -> Record:
        return {
            "v": INDEX_VERSION,
            "snapshot": self.snapshot.to_json(),
            "committed": self.committed,
            "consumed": self.consumed,
            "values": self.values,
            "claims": [claim.to_json() for claim in self.claims],
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, record: object) -> Index:
        """Raises LayoutError on a malformed record or another version."""
        names = ("v", "snapshot", "committed", "consumed", "values", "claims", "pieces")
        known = records.fields(record, "an index", names)
        if known["v"] != INDEX_VERSION:
            raise LayoutError(f"an index of version {known['v']!r} cannot be read: this is {INDEX_VERSION}")
        values = known["values"]
        if values is not None and not isinstance(values, dict):
            raise LayoutError("the values of an index are an object or null")
        return cls(
            SnapshotId.from_json(known["snapshot"]),
            records.flag(known["committed"], "committed"),
            records.whole(known["consumed"], "consumed"),
            values,
            tuple(map(claim_from_json, records.items(known["claims"], "claims"))),
            tuple(map(Piece.from_json, records.items(known["pieces"], "pieces"))),
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy box `source`, counted from the piece's corner, to box `dest`, counted from the wanted region's corner."""

    piece: Piece
    source: Region
    dest: Region


def copies(region: Region, pieces: Sequence[Piece]) -> list[Copy]:
    """How to fill `region` of one tensor from `pieces` of it: each element once, earlier pieces preferred.

    Raises LayoutError, naming the gap, when they do not hold all of it.
    """
    tiles = cover(region, [piece.region for piece in pieces])
    return [Copy(pieces[index], box.relative_to(pieces[index].region), box.relative_to(region)) for index, box in tiles]


def run_start(box: Region, shape: Sequence[int]) -> int | None:
    """Where `box` begins in a row-major array of `shape`, in elements, if it is one run there; else None."""
    start, size, run = 0, 1, True
    for offset, length, width in zip(reversed(box.offsets), reversed(box.lengths), reversed(shape), strict=True):
        # once a dim is not full, everything outside it may only be a single row
        if not run and length != 1:
            return None
        run = run and length == width
        start += offset * size
        size *= width
    return start


def row_major_boxes(lengths: Sequence[int], first: int, last: int) -> Iterator[Region]:
    """Boxes that are the elements [first, last) of a row-major array of these lengths, in that order, each one run of
    it; at most two a dim."""
    if first >= last:
        return
    if not lengths:
        yield Region((), ())
        return
    size = math.prod(lengths[1:])
    (row, skip), (end, rest) = divmod(first, size), divmod(last, size)
    if row == end:
        yield from _in_row(row, row_major_boxes(lengths[1:], skip, rest))
        return
    if skip:
        yield from _in_row(row, row_major_boxes(lengths[1:], skip, size))
        row += 1
    if row < end:
        yield Region((row, *(0 for _ in lengths[1:])), (end - row, *lengths[1:]))
    if rest:
        yield from _in_row(end, row_major_boxes(lengths[1:], 0, rest))


def _in_row(row: int, boxes: Iterator[Region]) -> Iterator[Region]:
    for box in boxes:
        yield Region((row, *box.offsets), (1, *box.lengths))


def row_blocks(region: Region, max_elements: int) -> Iterator[Region]:
    """Cut `region` into blocks of at most `max_elements` (at least 1), in row-major order and each one run of it."""
    dim = next((dim for dim, length in enumerate(region.lengths) if length > 1), None)
    if dim is None or region.num_elements <= max_elements:
        yield region
        return
    length = region.lengths[dim]
    rows = max(1, max_elements // (region.num_elements // length))
    for start in range(0, length, rows):
        block = replace(
            region,
            offsets=(*region.offsets[:dim], region.offsets[dim] + start, *region.offsets[dim + 1 :]),
            lengths=(*region.lengths[:dim], min(rows, length - start), *region.lengths[dim + 1 :]),
        )
        yield from row_blocks(block, max_elements)
