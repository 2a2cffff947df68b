"""One pull of the agent's plan: what is to come, where it goes, and how it becomes part of a snapshot here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tenplexrun.core import records
from tenplexrun.core.arena import ALIGNMENT
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import AnyClaim, BuddyClaim, Claim, SnapshotId, claim_from_json
from tenplexrun.errors import PeerLostError, StoreError, WireError
from tenplexrun.store import wire
from tenplexrun.store.arena import Arena
from tenplexrun.store.slots import Round
from tenplexrun.store.transfer import AGAIN_S, Part, Peers, Pull


@dataclass(frozen=True, slots=True)
class Order:
    """With `parts` fetched into a file of `num_bytes`, this node holds `claim` of `snapshot`, as `round` starts, where
    it will also keep what `buddy` says. `after`: what the sources must claim first."""

    round: int
    snapshot: SnapshotId
    layout: Layout
    claim: Claim
    buddy: BuddyClaim | None
    parts: tuple[Part, ...]
    num_bytes: int
    after: AnyClaim | None = None

    @classmethod
    def from_json(cls, record: Record, known: Callable[[str], Layout | None] = lambda _: None) -> Order:
        """From {"round", "snapshot", "layout", "claim", "fetches"}, optionally "buddy", "after". Raises LayoutError,
        StoreError.

        Fetches are records of `core.planner.Fetch` plus "address", the HOST:PORT of the source's store, and
        optionally "alternatives", those of other holders. `known`: layouts by digest, which need not be read again.
        """
        snapshot = SnapshotId.from_json(record["snapshot"])
        layout = known(snapshot.digest) or Layout.from_json(record["layout"])
        if layout.digest != snapshot.digest:
            raise StoreError(f"the pull of {snapshot} came with layout {layout.digest}, not its own {snapshot.digest}")
        parts: list[Part] = []
        offset = 0
        for fetch in records.items(record["fetches"], "fetches"):
            parts.append(_part(fetch, layout, offset))
            offset += -(-parts[-1].num_bytes // ALIGNMENT) * ALIGNMENT
        number, claim = records.whole(record["round"], "a round"), Claim.from_json(record["claim"])
        buddy = None if record.get("buddy") is None else BuddyClaim.from_json(record["buddy"])
        after = None if record.get("after") is None else claim_from_json(record["after"])
        return cls(number, snapshot, layout, claim, buddy, tuple(parts), offset, after)


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
        snapshot, after = self._order.snapshot, self._order.after
        if self._arena.has(snapshot) and after is None:
            return self._arena.get(snapshot)
        addresses = [address for part in self._order.parts for address in part.addresses]
        until = time.monotonic() + self._patience_s
        while True:
            try:
                found = self._peers.ask(addresses, wire.Describe(snapshot), _index_of)
                if after is None or after in found.claims:
                    return found
            except PeerLostError:
                if time.monotonic() >= until:
                    raise
            except WireError:
                if after is None:  # else it has nothing of it yet
                    raise
            if self.progress.cancelled.wait(AGAIN_S):
                raise WireError("the pull was cancelled")

    def _fetch(self) -> list[Piece]:
        order = self._order
        file = self._arena.stage(Round.of(order.round, order.layout, order.claim, order.buddy), order.num_bytes)
        try:
            checksums = self._pull.run(self._arena.file(file))
        except BaseException:
            self._arena.give_back(file)
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
