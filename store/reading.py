"""Regions out of the pieces that a node holds: as runs of a file, or gathered in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.core.pieces import Piece, copies, row_blocks, run_start
from tenplexrun.core.regions import Region
from tenplexrun.store.files import MappedFile
from tenplexrun.store.sockets import CHUNK_BYTES

ITEMS: dict[int, str] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""numpy types that carry an element's bits, by size: torch has types that numpy lacks."""


def by_name(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.fqn, []).append(piece)
    return found


def holding(region: Region, held: Sequence[Piece]) -> list[Piece]:
    """The pieces of a tensor that make up `region`, one if one will do. Raises LayoutError on a gap."""
    whole = [piece for piece in held if piece.region.contains(region)]
    if whole:
        return [next((piece for piece in whole if piece.region == region), whole[0])]
    return list(dict.fromkeys(copy.piece for copy in copies(region, held)))


def run_of(region: Region, pieces: Sequence[Piece]) -> int | None:
    """Where in its file, in bytes, `region` begins if it is one run of a single piece; else None."""
    if len(pieces) != 1:
        return None
    start = run_start(region.relative_to(pieces[0].region), pieces[0].region.lengths)
    return None if start is None else pieces[0].offset + start * item_bytes(pieces[0])


def blocks(region: Region, pieces: Sequence[Piece], files: Mapping[str, MappedFile]) -> Iterator[memoryview]:
    """The bytes of `region` in row-major order, copied from the pieces that hold its parts."""
    item = item_bytes(pieces[0])
    arrays = {piece: _array(piece, files[piece.file].view) for piece in pieces}
    for block in row_blocks(region, CHUNK_BYTES // item):
        values = np.empty(block.lengths, ITEMS[item])
        for copy in copies(block, pieces):
            values[copy.dest.slices] = arrays[copy.piece][copy.source.slices]
        yield values.reshape(-1).view(np.uint8).data


def item_bytes(piece: Piece) -> int:
    return piece.num_bytes // piece.region.num_elements


def _array(piece: Piece, view: memoryview) -> npt.NDArray[Any]:
    """The elements of a piece in its file, shaped like its region."""
    flat = np.frombuffer(view, ITEMS[item_bytes(piece)], piece.region.num_elements, piece.offset)
    return flat.reshape(piece.region.lengths)
