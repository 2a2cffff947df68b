"""Snapshots: what a node holds of one step's state, where it lies in a slot file, and which one a recovery takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from tenplexrun.core import records
from tenplexrun.core.arena import ALIGNMENT, ArenaMap, Entry, arena_map
from tenplexrun.core.buddies import Owed, buddies, regions_owed
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.replicas import first_only
from tenplexrun.core.shared import Boxes, parted
from tenplexrun.errors import LayoutError

__all__ = [
    "ALIGNMENT", "AnyClaim", "ArenaMap", "BuddyClaim", "Claim", "Entry", "Holding", "SnapshotId", "arena_map", "choose",
    "claim_from_json", "gaps", "holders_of", "lacking", "regions_of_holdings",
]  # fmt: skip

Regions = Boxes
"""Of a node or a group: for each tensor's name the distinct regions, sorted."""


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

    def regions(self, layout: Layout) -> Regions:
        return layout.regions_at((self.config, rank) for rank in self.ranks)

    def to_json(self) -> Record:
        return {"config": self.config.to_json(), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, record: object) -> Claim:
        known = records.fields(record, "a claim", ("config", "ranks"))
        ranks = (records.whole(rank, "a rank") for rank in records.items(known["ranks"], "the ranks of a claim"))
        return cls(records.config(known["config"]), tuple(ranks))


@dataclass(frozen=True, slots=True)
class BuddyClaim:
    """Holds what the node at `place` owes the others of a round: see `buddies`, which says what that is.

    `workers`: how many ranks each node had, rank 0's node first. As JSON in runs of [nodes, workers]: it is short.
    """

    config: ParallelConfig
    workers: tuple[int, ...]
    replicas: int
    place: int

    def __post_init__(self) -> None:
        if sum(self.workers) != self.config.world_size or not 0 <= self.place < len(self.workers):
            raise LayoutError(f"{len(self.workers)} nodes of {sum(self.workers)} ranks are no world of {self.config}")

    def owed(self, layout: Layout) -> tuple[Owed, ...]:
        return buddies(layout, self.config, self.workers, self.replicas)[self.place]

    def regions(self, layout: Layout) -> Regions:
        key = ("owed", self.config, self.workers, self.replicas, self.place)
        return layout.remember(key, lambda: regions_owed(layout, self.owed(layout)))

    def to_json(self) -> Record:
        runs = [[len(list(run)), count] for count, run in groupby(self.workers)]
        return {"config": self.config.to_json(), "workers": runs, "replicas": self.replicas, "place": self.place}

    @classmethod
    def from_json(cls, record: object) -> BuddyClaim:
        known = records.fields(record, "a buddy's claim", ("config", "workers", "replicas", "place"))
        workers: list[int] = []
        for item in records.items(known["workers"], "the nodes of a buddy's claim"):
            run = [records.whole(number, "nodes or workers", 1) for number in records.items(item, "a run of nodes")]
            if len(run) != 2:
                raise LayoutError(f"a run of nodes is [nodes, workers], got {run}")
            workers += [run[1]] * run[0]
        replicas = records.whole(known["replicas"], "replicas", 1)
        place = records.whole(known["place"], "the place of a node")
        return cls(records.config(known["config"]), tuple(workers), replicas, place)


AnyClaim = Claim | BuddyClaim


def claim_from_json(record: object) -> AnyClaim:
    buddy = isinstance(record, Mapping) and "workers" in record
    return BuddyClaim.from_json(record) if buddy else Claim.from_json(record)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one node holds of one snapshot: all that `claims` say, without the tensors `except_`.

    `except_` are names of which a copy here is missing or failed its checksum. `consumed`: samples, global.
    """

    snapshot: SnapshotId
    claims: tuple[AnyClaim, ...]
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
            tuple(map(claim_from_json, records.items(known["claims"], "the claims of a holding"))),
            records.flag(known["committed"], "`committed` of a holding"),
            tuple(records.text(fqn, "a name") for fqn in records.items(known["except"], "`except` of a holding")),
            records.whole(known["consumed"], "`consumed` of a holding"),
        )


def regions_of_holdings(holdings: Iterable[Holding], layout: Layout) -> Regions:
    """All that a node's holdings of one snapshot add up to. Raises LayoutError when the layout is another one's."""
    whole: list[tuple[ParallelConfig, int]] = []
    parts: list[Regions] = []
    for holding in holdings:
        if holding.snapshot.digest != layout.digest:
            raise LayoutError(
                f"snapshot {holding.snapshot} is of layout {holding.snapshot.digest}, not {layout.digest}"
            )
        if not holding.except_:
            whole += _ranks(holding)
            parts += [claim.regions(layout) for claim in holding.claims if isinstance(claim, BuddyClaim)]
            continue
        for claim in holding.claims:
            boxes = claim.regions(layout)
            parts.append({fqn: boxes[fqn] for fqn in boxes if fqn not in holding.except_})
    held = layout.regions_at(whole)
    return layout.together([held, *parts]) if any(parts) else held


def _ranks(holding: Holding) -> list[tuple[ParallelConfig, int]]:
    return [(claim.config, rank) for claim in holding.claims if isinstance(claim, Claim) for rank in claim.ranks]


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
            ranks[node] = [pair for one in own for pair in _ranks(one)]
    return first_only(layout, holders, ranks)


def gaps(layout: Layout, holders: Mapping[str, Regions]) -> list[tuple[str, Region]]:
    """The regions of `layout` that no holder has, as (fqn, region). The state of one coordinate (`at`) is no gap."""
    missing: list[tuple[str, Region]] = []
    distinct = list({id(shared): shared for shared, _ in map(parted, holders.values())}.values())
    known: dict[tuple[object, ...], list[Region]] = {}  # tensors that lie in the same way have the same gaps
    for spec in layout.tensors:
        if not spec.at:
            found = [regions.get(spec.fqn, ()) for regions in distinct]
            alike = (spec.shape, *map(id, found))
            if alike not in known:
                known[alike] = subtract(spec.whole, sorted({region for regions in found for region in regions}))
            missing.extend((spec.fqn, region) for region in known[alike])
    return missing


def lacking(holdings: Mapping[str, Iterable[Holding]], layouts: Mapping[str, Layout], chosen: SnapshotId | None) -> str:
    """Why `chosen` is not a newer one, in words: what the living nodes no longer have of that. "" where all is usual: a
    snapshot that was just being made when some of its nodes went away is not worth a word if there is another one."""
    by_node = {node: list(held) for node, held in holdings.items()}
    for snapshot in sorted({one.snapshot for held in by_node.values() for one in held}, reverse=True):
        if chosen is not None and snapshot <= chosen:
            break
        own = {node: [one for one in held if one.snapshot == snapshot] for node, held in by_node.items()}
        damaged = {node: {fqn for one in held for fqn in one.except_} for node, held in own.items()}
        layout = layouts.get(snapshot.digest)
        if layout is None or not (chosen is None or any(damaged.values())):
            continue
        missing = gaps(layout, holders_of(snapshot, by_node, layout))
        if missing:
            fqn, region = missing[0]
            more = f" and {len(missing) - 1} more regions" if len(missing) > 1 else ""
            bad = [node for node, names in damaged.items() if fqn in names]
            where = f" (lost or damaged on node {', '.join(bad)})" if bad else ""
            return f"of {snapshot} no living node has a good copy of {fqn} {region}{where}{more}"
    return ""


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
