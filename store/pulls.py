"""One pull of the agent's plan: what is to come, where it goes, and how it becomes part of a snapshot here."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tenplexrun.core import records
from tenplexrun.core.arena import ALIGNMENT
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Claim, SnapshotId
from tenplexrun.errors import PeerLostError, StoreError
from tenplexrun.store import wire
from tenplexrun.store.arena import Arena
from tenplexrun.store.transfer import AGAIN_S, Part, Peers, Pull


@dataclass(frozen=True, slots=True)
class Order:
    """With `parts` fetched into a file of `num_bytes`, this node holds `claim` of `snapshot`."""

    snapshot: SnapshotId
    layout: Layout
    claim: Claim
    parts: tuple[Part, ...]
    num_bytes: int

    @classmethod
    def from_json(cls, record: Record) -> Order:
        """From {"snapshot", "layout", "claim", "fetches"}. Raises LayoutError, StoreError.

        Fetches are records of `core.planner.Fetch` plus "address", the HOST:PORT of the source's store, and
        optionally "alternatives", those of other holders.
        """
        snapshot, layout = SnapshotId.from_json(record["snapshot"]), Layout.from_json(record["layout"])
        if layout.digest != snapshot.digest:
            raise StoreError(f"the pull of {snapshot} came with layout {layout.digest}, not its own {snapshot.digest}")
        parts: list[Part] = []
        offset = 0
        for fetch in records.items(record["fetches"], "fetches"):
            parts.append(_part(fetch, layout, offset))
            offset += -(-parts[-1].num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(snapshot, layout, Claim.from_json(record["claim"]), tuple(parts), offset)


class PullJob:
    """Carries out an order. `run` blocks; `cancel` from another thread ends it with a WireError.

    `patience_s`: see `Pull`.
    """

    def __init__(self, arena: Arena, peers: Peers, order: Order, patience_s: float = 0.0) -> None:
        self._arena, self._peers, self._order = arena, peers, order
        self._patience_s = patience_s
        self._pull = Pull(peers, order.snapshot, order.parts, patience_s=patience_s)
        self.progress = self._pull.progress

    def cancel(self) -> None:
        self._pull.cancel()

    def run(self) -> Record:
        """All or nothing. Raises ArenaFullError, WireError (regions that no holder delivered), StoreError."""
        started = time.monotonic()
        order = self._order
        described = self._described()
        pieces = self._fetch() if order.parts else []
        self._arena.adopt(order.layout, described, order.claim, pieces)
        num_bytes = sum(part.num_bytes for part in order.parts)
        return {"num_bytes": num_bytes, "seconds": time.monotonic() - started, "num_fetches": len(order.parts)}

    def _described(self) -> Index:
        """What the snapshot is besides tensors: from here, else from one of those who hold it."""
        snapshot = self._order.snapshot
        if self._arena.has(snapshot):
            return self._arena.get(snapshot)
        addresses = [address for part in self._order.parts for address in part.addresses]
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return self._peers.ask(addresses, wire.Describe(snapshot), _index_of)
            except PeerLostError:
                if self.progress.cancelled.wait(AGAIN_S) or time.monotonic() >= until:
                    raise

    def _fetch(self) -> list[Piece]:
        order = self._order
        file = self._arena.stage(order.snapshot, order.num_bytes)
        try:
            checksums = self._pull.run(self._arena.file(file))
        except BaseException:
            self._arena.discard(file)
            raise
        return [
            Piece(part.fqn, part.region, part.dtype, file, part.offset, part.num_bytes, checksum)
            for part, checksum in zip(order.parts, checksums, strict=True)
        ]


def _index_of(answer: Record) -> Index:
    return Index.from_json(answer.get("index"))


def _part(record: object, layout: Layout, offset: int) -> Part:
    known = records.fields(record, "a fetch", ("fqn", "source", "region", "num_bytes", "address"), ("alternatives",))
    spec, region = layout.spec(known["fqn"]), Region.from_json(known["region"])
    num_bytes = region.num_elements * item_bytes(spec.dtype)
    if not spec.whole.contains(region) or num_bytes != known["num_bytes"] or not num_bytes:
        raise StoreError(f"the fetch of {spec.fqn} {region}, {known['num_bytes']} bytes, does not fit {spec.shape}")
    addresses = [known["address"], *records.items(known.get("alternatives", ()), "alternatives")]
    texts = (records.text(address, "an address") for address in addresses)
    return Part(spec.fqn, region, spec.dtype, num_bytes, offset, tuple(dict.fromkeys(texts)))
