"""The planner: the least set of moves that gives every node what its ranks need under the target.

A node needs the distinct regions of its ranks; what it holds already stays; each missing element is fetched once,
from another node, however many of its ranks need it. So the bytes moved are the lower bound: needed minus held.
Every node plans its own part from the same inputs. The result depends on them alone: no dict order, no hash seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tenplexrun.core import records
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.ptc import PTC
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.snapshots import Regions
from tenplexrun.errors import LayoutError, StateLostError

Holders = Mapping[str, Regions]
"""For each living node the regions that it holds of the snapshot to restore."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One transfer: `region` of a tensor from the node `source`, within one of the regions held there.

    Canonical coordinates serve both ends: each knows where the region lies in its own pieces.
    """

    fqn: str
    source: str
    region: Region
    num_bytes: int

    def to_json(self) -> Record:
        return {"fqn": self.fqn, "source": self.source, "region": self.region.to_json(), "num_bytes": self.num_bytes}

    @classmethod
    def from_json(cls, record: object) -> Fetch:
        known = records.fields(record, "a fetch", ("fqn", "source", "region", "num_bytes"))
        return cls(
            records.text(known["fqn"], "the name of a fetch"),
            records.text(known["source"], "the source of a fetch"),
            Region.from_json(known["region"]),
            records.whole(known["num_bytes"], "the size of a fetch"),
        )


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What `node` fetches, sorted by source, fqn and region: one batch a source.

    `needed_bytes` are what its ranks need, each element once; `held_bytes` of these it has. `absent` names tensors of
    a single mesh coordinate (`TensorSpec.at`) that were lost with their owner: not counted, for the rank to derive.
    """

    node: str
    fetches: tuple[Fetch, ...]
    needed_bytes: int
    held_bytes: int
    absent: tuple[str, ...] = ()

    @property
    def lower_bound_bytes(self) -> int:
        """The least that must come from other nodes."""
        return self.needed_bytes - self.held_bytes

    @property
    def num_bytes(self) -> int:
        """What the fetches move."""
        return sum(fetch.num_bytes for fetch in self.fetches)

    def by_source(self) -> dict[str, tuple[Fetch, ...]]:
        """The batches, by source."""
        batches: dict[str, list[Fetch]] = {}
        for fetch in self.fetches:
            batches.setdefault(fetch.source, []).append(fetch)
        return {source: tuple(batch) for source, batch in batches.items()}

    def to_json(self) -> Record:
        return {
            "node": self.node,
            "fetches": [fetch.to_json() for fetch in self.fetches],
            "needed_bytes": self.needed_bytes,
            "held_bytes": self.held_bytes,
            "absent": list(self.absent),
        }

    @classmethod
    def from_json(cls, record: object) -> NodePlan:
        known = records.fields(record, "a node's plan", ("node", "fetches", "needed_bytes", "held_bytes", "absent"))
        return cls(
            records.text(known["node"], "the node of a plan"),
            tuple(Fetch.from_json(fetch) for fetch in records.items(known["fetches"], "the fetches of a plan")),
            records.whole(known["needed_bytes"], "the needed bytes of a plan"),
            records.whole(known["held_bytes"], "the held bytes of a plan"),
            tuple(records.text(fqn, "a name") for fqn in records.items(known["absent"], "the absent names of a plan")),
        )


@dataclass(frozen=True, slots=True)
class ReconfigurationPlan:
    """The parts of all nodes of the target, by node id, sorted."""

    parts: Mapping[str, NodePlan]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def lower_bound_bytes(self) -> int:
        return sum(part.lower_bound_bytes for part in self.parts.values())

    def egress(self) -> dict[str, int]:
        """Bytes that leave each source."""
        leaving: dict[str, int] = {}
        for part in self.parts.values():
            for fetch in part.fetches:
                leaving[fetch.source] = leaving.get(fetch.source, 0) + fetch.num_bytes
        return {source: leaving[source] for source in sorted(leaving)}

    def to_json(self) -> Record:
        return {"parts": [part.to_json() for part in self.parts.values()]}

    @classmethod
    def from_json(cls, record: object) -> ReconfigurationPlan:
        known = records.fields(record, "a plan", ("parts",))
        parts = [NodePlan.from_json(part) for part in records.items(known["parts"], "the parts of a plan")]
        by_node = {part.node: part for part in parts}
        if len(by_node) != len(parts):
            raise LayoutError("a plan has two parts for one node; it was not made by this version of tenplexrun")
        return cls(by_node)


def plan(target: PTC, holders: Holders) -> ReconfigurationPlan:
    """The whole plan: `plan_node` of every node of the target.

    Raises StateLostError that names every needed region without a living copy.
    """
    sources = _by_tensor(holders)
    drafts = [_draft(node, target, holders.get(node, {}), sources) for node in sorted(set(target.nodes))]
    _refuse_gaps([gap for draft in drafts for gap in draft.gaps])
    return ReconfigurationPlan({draft.node: _settle(draft, sorted({*holders, *target.nodes})) for draft in drafts})


def plan_node(node: str, target: PTC, holders: Holders) -> NodePlan:
    """What one node must fetch, the same on whichever node it is computed.

    Sources are balanced: large regions first, each from the node that serves this one the least so far; of equals
    the next one after `node` in the circle of all node ids, so that not all nodes begin at the same source.
    Raises StateLostError that names the regions without a living copy.
    """
    draft = _draft(node, target, holders.get(node, {}), _by_tensor(holders))
    _refuse_gaps(draft.gaps)
    return _settle(draft, sorted({*holders, *target.nodes}))


_Copies = tuple[tuple[Region, tuple[str, ...]], ...]
"""The distinct non-empty regions of one tensor that are held, sorted, each with its nodes in order."""


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How a node gets one tensor. A model has few distinct ones, so they are remembered."""

    needed_elements: int
    missing_elements: int
    tiles: tuple[tuple[Region, tuple[str, ...]], ...]
    """Missing boxes, each with the nodes that hold all of it."""
    lost: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class _Tile:
    fqn: str
    region: Region
    num_bytes: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a node needs, before sources are picked."""

    node: str
    tiles: list[_Tile]
    gaps: list[tuple[str, Region]]
    absent: tuple[str, ...]
    needed_bytes: int
    held_bytes: int


def _by_tensor(holders: Holders) -> dict[str, _Copies]:
    sources: dict[str, dict[Region, list[str]]] = {}
    for node in sorted(holders):
        for fqn, regions in holders[node].items():
            for region in regions:
                if not region.is_empty:
                    sources.setdefault(fqn, {}).setdefault(region, []).append(node)
    return {fqn: tuple((region, tuple(copies[region])) for region in sorted(copies)) for fqn, copies in sources.items()}


def _draft(node: str, target: PTC, held: Regions, sources: Mapping[str, _Copies]) -> _Draft:
    tiles: list[_Tile] = []
    gaps: list[tuple[str, Region]] = []
    absent = []
    needed_bytes = missing_bytes = 0
    for fqn, needed in target.regions_on(node).items():
        spec = target.layout.spec(fqn)
        way = _geometry(needed, tuple(held.get(fqn, ())), sources.get(fqn, ()))
        if way.lost and spec.at:
            absent.append(fqn)
            continue
        item = item_bytes(spec.dtype)
        needed_bytes += way.needed_elements * item
        missing_bytes += way.missing_elements * item
        gaps.extend((fqn, region) for region in way.lost)
        tiles.extend(_Tile(fqn, region, region.num_elements * item, nodes) for region, nodes in way.tiles)
    return _Draft(node, tiles, gaps, tuple(absent), needed_bytes, needed_bytes - missing_bytes)


@lru_cache(maxsize=1024)
def _geometry(needed: tuple[Region, ...], held: tuple[Region, ...], copies: _Copies) -> _Geometry:
    missing = [box for region in needed for box in subtract(region, held)]
    regions = [region for region, _ in copies]
    return _Geometry(
        sum(region.num_elements for region in needed),
        sum(box.num_elements for box in missing),
        tuple(tile for box in missing for tile in _tiles(box, copies)),
        tuple(gap for box in missing for gap in subtract(box, regions)),
    )


def _tiles(box: Region, copies: _Copies) -> list[tuple[Region, tuple[str, ...]]]:
    """`box`, as far as there are copies, cut along the held regions, the largest parts first: so into few."""
    tiles = []
    left = [box]
    overlaps = [(common.num_elements, region) for region, _ in copies if (common := box.intersect(region))]
    for _, region in sorted(overlaps, key=lambda one: (-one[0], one[1])):
        for tile in [common for rest in left if (common := rest.intersect(region))]:
            nodes = {node for other, holding in copies if other.contains(tile) for node in holding}
            tiles.append((tile, tuple(sorted(nodes))))
        left = [rest for part in left for rest in subtract(part, [region])]
    return tiles


def _settle(draft: _Draft, circle: Sequence[str]) -> NodePlan:
    """Pick sources; see `plan_node` for the rule."""
    own = circle.index(draft.node) if draft.node in circle else 0
    turn = {node: (index - own) % len(circle) for index, node in enumerate(circle)}
    load = dict.fromkeys(circle, 0)
    fetches = []
    for tile in sorted(draft.tiles, key=lambda tile: (-tile.num_bytes, tile.fqn, tile.region)):
        source = min(tile.sources, key=lambda node: (load[node], turn[node]))
        load[source] += tile.num_bytes
        fetches.append(Fetch(tile.fqn, source, tile.region, tile.num_bytes))
    fetches.sort(key=lambda fetch: (fetch.source, fetch.fqn, fetch.region))
    return NodePlan(draft.node, tuple(fetches), draft.needed_bytes, draft.held_bytes, tuple(draft.absent))


def _refuse_gaps(gaps: Sequence[tuple[str, Region]]) -> None:
    unique = sorted(set(gaps))
    if unique:
        named = ", ".join(f"{fqn} {region}" for fqn, region in unique[:5])
        more = f" and {len(unique) - 5} more" if len(unique) > 5 else ""
        raise StateLostError(
            f"no living node holds these regions of the state: {named}{more}; "
            "bring back a node that does, or start again from a durable checkpoint"
        )
