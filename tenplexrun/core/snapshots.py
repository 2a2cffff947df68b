"""Snapshots: what a node holds of one step's state, where it lies in a slot file, and which one a recovery takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tenplexrun.core import records
from tenplexrun.core.arena import ALIGNMENT, ArenaMap, Entry, arena_map
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.replicas import first_only
from tenplexrun.core.shared import Boxes, parted
from tenplexrun.errors import LayoutError

__all__ = [
    "ALIGNMENT", "ArenaMap", "Claim", "Entry", "Holding", "SnapshotId", "arena_map", "choose", "gaps", "holders_of",
    "regions_of_holdings",
]  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """State after `step` completed steps, made in `round`, of the layout with this digest. Newer is greater."""

    round: int
    step: int
    digest: str

    def to_json(self) -> Record:
        return {"round": self.round, "step": self.step, "digest": self.digest}

    @classmethod
    def from_json(cls, record: object) -> SnapshotId:
        known = records.fields(record, "a snapshot's id", ("round", "step", "digest"))
        return cls(
            records.whole(known["round"], "a snapshot's round"),
            records.whole(known["step"], "a snapshot's step"),
            records.text(known["digest"], "a snapshot's layout digest"),
        )

    def __str__(self) -> str:
        return f"round {self.round} step {self.step}"


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds all regions that these ranks have of the layout under `config`."""

    config: ParallelConfig
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = tuple(sorted(set(self.ranks)))
        if not all(0 <= rank < self.config.world_size for rank in ranks):
            raise LayoutError(f"ranks {list(ranks)} are not all in a world of {self.config.world_size}")
        object.__setattr__(self, "ranks", ranks)

    def to_json(self) -> Record:
        return {"config": self.config.to_json(), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, record: object) -> Claim:
        known = records.fields(record, "a claim", ("config", "ranks"))
        ranks = (records.whole(rank, "a rank") for rank in records.items(known["ranks"], "the ranks of a claim"))
        return cls(records.config(known["config"]), tuple(ranks))


@dataclass(frozen=True, slots=True)
class Holding:
    """What one node holds of one snapshot: all that `claims` say, without the tensors `except_`.

    `except_` are names of which a copy here is missing or failed its checksum. `consumed`: samples, global.
    """

    snapshot: SnapshotId
    claims: tuple[Claim, ...]
    committed: bool = False
    except_: tuple[str, ...] = ()
    consumed: int = 0

    def to_json(self) -> Record:
        return {
            "snapshot": self.snapshot.to_json(),
            "claims": [claim.to_json() for claim in self.claims],
            "committed": self.committed,
            "except": list(self.except_),
            "consumed": self.consumed,
        }

    @classmethod
    def from_json(cls, record: object) -> Holding:
        known = records.fields(record, "a holding", ("snapshot", "claims", "committed", "except", "consumed"))
        return cls(
            SnapshotId.from_json(known["snapshot"]),
            tuple(Claim.from_json(claim) for claim in records.items(known["claims"], "the claims of a holding")),
            records.flag(known["committed"], "`committed` of a holding"),
            tuple(records.text(fqn, "a name") for fqn in records.items(known["except"], "`except` of a holding")),
            records.whole(known["consumed"], "`consumed` of a holding"),
        )


Regions = Boxes
"""Of a node or a group: for each tensor's name the distinct regions, sorted."""


def regions_of_holdings(holdings: Iterable[Holding], layout: Layout) -> Regions:
    """All that a node's holdings of one snapshot add up to. Raises LayoutError when the layout is another one's."""
    found: dict[str, set[Region]] = {}
    whole: list[tuple[ParallelConfig, int]] = []
    for holding in holdings:
        if holding.snapshot.digest != layout.digest:
            raise LayoutError(
                f"snapshot {holding.snapshot} is of layout {holding.snapshot.digest}, not {layout.digest}"
            )
        ranks = [(claim.config, rank) for claim in holding.claims for rank in claim.ranks]
        if not holding.except_:
            whole.extend(ranks)
            continue
        for fqn, boxes in layout.regions_at(ranks).items():
            if fqn not in holding.except_:
                found.setdefault(fqn, set()).update(boxes)
    held = layout.regions_at(whole)
    if not found:
        return held
    for fqn, boxes in held.items():
        found.setdefault(fqn, set()).update(boxes)
    return {fqn: tuple(sorted(found[fqn])) for fqn in sorted(found)}


def holders_of(snapshot: SnapshotId, holdings: Mapping[str, Iterable[Holding]], layout: Layout) -> dict[str, Regions]:
    """For each node (sorted) that holds anything of `snapshot`: its regions, as the planner wants them.

    What differs between replicas (`first`) is held by one node only: see `replicas.first_only`.
    """
    holders, ranks = {}, {}
    for node in sorted(holdings):
        own = [one for one in holdings[node] if one.snapshot == snapshot]
        regions = regions_of_holdings(own, layout)
        if regions:
            holders[node] = regions
            ranks[node] = [(claim.config, rank) for one in own for claim in one.claims for rank in claim.ranks]
    return first_only(layout, holders, ranks)


def gaps(layout: Layout, holders: Mapping[str, Regions]) -> list[tuple[str, Region]]:
    """The regions of `layout` that no holder has, as (fqn, region). The state of one coordinate (`at`) is no gap."""
    missing: list[tuple[str, Region]] = []
    distinct = list({id(shared): shared for shared, _ in map(parted, holders.values())}.values())
    for spec in layout.tensors:
        if not spec.at:
            held = sorted({region for regions in distinct for region in regions.get(spec.fqn, ())})
            missing.extend((spec.fqn, region) for region in subtract(spec.whole, held))
    return missing


def choose(holdings: Mapping[str, Iterable[Holding]], layouts: Layout | Mapping[str, Layout]) -> SnapshotId | None:
    """The newest snapshot of which the living nodes together hold every region of every tensor; None if there is none.

    `holdings`: by living node. `layouts`: the layout, or all known ones by digest; a snapshot whose layout is
    not among them cannot be read, and is passed over. A candidate that no commit confirmed will do: it is complete.
    """
    known = {layouts.digest: layouts} if isinstance(layouts, Layout) else layouts
    by_node = {node: list(held) for node, held in holdings.items()}
    candidates = sorted({holding.snapshot for held in by_node.values() for holding in held}, reverse=True)
    for snapshot in candidates:
        layout = known.get(snapshot.digest)
        if layout is not None and not gaps(layout, holders_of(snapshot, by_node, layout)):
            return snapshot
    return None
