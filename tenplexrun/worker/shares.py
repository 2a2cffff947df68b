"""A node's share of a snapshot, copied into memory of its own. Imports no torch: nobody may wait for that here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.core import durable
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.errors import CheckpointError

Record = dict[str, Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Share:
    """What one node writes of a snapshot, in memory of its own."""

    pieces: tuple[tuple[Piece, Bytes], ...]
    values: Record


def take(index: Path, layout: Layout, config: ParallelConfig, ranks: Sequence[Sequence[int]], me: int) -> Share:
    """Copy the share of node number `me` (of those with these global ranks) of the snapshot that `index` lists.

    Raises CheckpointError when a piece is not there, or changes meanwhile.
    """
    record = Index.from_json(json.loads(index.read_bytes()))
    held = {(piece.fqn, piece.region): piece for piece in record.pieces}
    folder, files, pieces = index.parent, dict[str, Bytes](), []
    for fqn, region in durable.shares(layout, config, ranks)[me]:
        piece = held.get((fqn, region))
        if piece is None:
            if layout.spec(fqn).at is not None:
                continue  # a random stream that could not be restored is nobody's state yet
            raise CheckpointError(f"{fqn} {region} is not in the snapshot of step {record.snapshot.step}")
        if piece.file not in files:
            files[piece.file] = np.asarray(np.memmap(folder / piece.file, dtype=np.uint8, mode="r"))
        data = files[piece.file][piece.offset : piece.offset + piece.num_bytes].copy()
        if xxhash.xxh3_64_intdigest(data.data) != piece.checksum:
            raise CheckpointError(f"{fqn} {region} changed while it was copied")
        pieces.append((piece, data))
    return Share(tuple(pieces), dict(record.values or {}))
