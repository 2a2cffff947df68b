"""A round on one node: its two slots, and what lies where in them."""

from __future__ import annotations

from dataclasses import dataclass

from tenplexrun.core.arena import ALIGNMENT, Entry, arena_map
from tenplexrun.core.buddies import Owed
from tenplexrun.core.layout import Layout
from tenplexrun.core.records import Record
from tenplexrun.core.snapshots import BuddyClaim, Claim
from tenplexrun.store.files import TENSORS

NUM_SLOTS = 2
ARRIVALS = 1
"""The slot that takes what a round starts with: its first snapshot goes into the other one."""


@dataclass(frozen=True, slots=True)
class Round:
    """The open round of this node: the state of `claim` under the layout goes into its slots, as `entries` say.

    `owed`: what `buddy` says that it holds for others, each with its offset in a slot. `own_bytes` of `num_bytes` are
    the node's own.
    """

    number: int
    digest: str
    claim: Claim
    buddy: BuddyClaim | None
    entries: tuple[Entry, ...]
    owed: tuple[tuple[Owed, int], ...]
    own_bytes: int
    num_bytes: int

    @classmethod
    def of(cls, number: int, layout: Layout, claim: Claim, buddy: BuddyClaim | None) -> Round:
        slots = arena_map(layout, claim.config, claim.ranks)
        owed, offset = [], slots.num_bytes
        for one in buddy.owed(layout) if buddy is not None else ():
            owed.append((one, offset))
            offset += -(-one.num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(number, layout.digest, claim, buddy, slots.entries, tuple(owed), slots.num_bytes, offset)

    @property
    def slots(self) -> list[str]:
        return [f"slot-{self.number}-{slot}{TENSORS}" for slot in range(NUM_SLOTS)]

    def to_json(self) -> Record:
        buddy = self.buddy and self.buddy.to_json()
        return {"v": 2, "round": self.number, "digest": self.digest, "claim": self.claim.to_json(), "buddy": buddy}
