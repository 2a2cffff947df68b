"""A buddy's part of a snapshot: fetched from the slots of those whose ranks wrote it, into this node's own slot.

It runs while the job trains: by one stream a source, and never more than one snapshot at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tenplexrun.core import records
from tenplexrun.core.pieces import Piece
from tenplexrun.core.records import Record
from tenplexrun.errors import StoreError
from tenplexrun.store.arena import Arena
from tenplexrun.store.transfer import Part, Peers, Pull


class ReplicaJob:
    """`run` blocks; `cancel` from another thread ends it with a WireError. `where`: round, step, slot. `stores`: of all
    nodes of the round, rank 0's first."""

    def __init__(self, arena: Arena, peers: Peers, where: tuple[int, int, int], stores: Sequence[object]) -> None:
        self._arena, self._peers, self._where = arena, peers, where
        self._stores = [records.text(address, "the address of a store") for address in stores]
        self._pull: Pull | None = None
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        if self._pull is not None:
            self._pull.cancel()

    def run(self) -> Record:
        """All or nothing. Raises WireError (regions that no holder delivered), StoreError (the round is over)."""
        began = time.monotonic()
        opened, snapshot, file = self._arena.lend(*self._where)
        try:
            if opened.buddy is None or len(opened.buddy.workers) != len(self._stores):
                raise StoreError(f"round {opened.number} was opened without its {len(self._stores)} nodes")
            specs = self._arena.known_layout(opened.digest)
            parts = [
                Part(
                    one.fqn,
                    one.region,
                    specs.spec(one.fqn).dtype,
                    one.num_bytes,
                    offset,
                    tuple(self._stores[holder] for holder in one.holders),
                )
                for one, offset in opened.owed
            ]
            self._pull = Pull(self._peers, snapshot, parts, streams=1)
            if self._cancelled:
                self._pull.cancel()
            checksums = self._pull.run(self._arena.file(file))
            pieces = [
                Piece(part.fqn, part.region, part.dtype, file, part.offset, part.num_bytes, checksum)
                for part, checksum in zip(parts, checksums, strict=True)
            ]
            self._arena.hold(opened, snapshot, pieces)
        finally:
            self._arena.give_back(file)
        return {"num_bytes": sum(part.num_bytes for part in parts), "seconds": time.monotonic() - began}
