"""The planner: the least set of moves that gives every node what its ranks need under the target.

A node needs the distinct regions of its ranks; what it holds already stays; each missing element is fetched once,
from another node, however many of its ranks need it. So the bytes moved are the lower bound: needed minus held.
Every node plans its own part from the same inputs. The result depends on them alone: no dict order, no hash seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenplexrun.core import records
from tenplexrun.core.balance import Line, quotas
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.ptc import PTC
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.shared import Boxes, parted
from tenplexrun.core.sources import Copies, Geometry
from tenplexrun.errors import LayoutError, StateLostError

ALGORITHM = 3
"""Of this planner; nodes that plan parts of one round need the same."""

SPLIT_BYTES = 1 << 18
"""Least size of a part of a region that replicas share in sending: below, a request of its own costs more than it
saves."""

Holders = Mapping[str, Boxes]
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

    def batches(self) -> tuple[tuple[str, tuple[Fetch, ...]], ...]:
        """(source, fetches): one batch a source, in the order to run them.

        The first is the next one after `node` in the circle of ids, so that not all nodes begin at the same source.
        """
        found: dict[str, list[Fetch]] = {}
        for fetch in self.fetches:
            found.setdefault(fetch.source, []).append(fetch)
        order = sorted(found, key=lambda source: (source < self.node, source))
        return tuple((source, tuple(found[source])) for source in order)

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


def plan(
    target: PTC, holders: Holders, racks: Mapping[str, str] | None = None, split_bytes: int = SPLIT_BYTES
) -> ReconfigurationPlan:
    """The whole plan: the parts of all nodes of the target. See `Planner`.

    Raises StateLostError that names every needed region without a living copy.
    """
    planner = Planner(target, holders, racks, split_bytes)
    planner.check()
    return ReconfigurationPlan({node: planner.part(node) for node in planner.nodes})


def plan_node(
    node: str,
    target: PTC,
    holders: Holders,
    racks: Mapping[str, str] | None = None,
    split_bytes: int = SPLIT_BYTES,
) -> NodePlan:
    """What one node must fetch, the same on whichever node it is computed.

    Raises StateLostError that names the regions without a living copy.
    """
    return Planner(target, holders, racks, split_bytes).part(node)


class Planner:
    """Plans any node's part from inputs that are the same everywhere: who needs what, who holds what.

    A node takes from its own memory what it has, else from sources in its rack (`racks`: label by node), else from
    any. Among these the load of the busiest source is the least possible; regions are split over replicas where that
    needs it, into parts of at least `split_bytes`. Nodes that hold or need the same are known as equal by the identity
    of `SharedRegions.shared`, and are worked out once.
    """

    def __init__(
        self,
        target: PTC,
        holders: Holders,
        racks: Mapping[str, str] | None = None,
        split_bytes: int = SPLIT_BYTES,
    ) -> None:
        self._target, self._holders = target, holders
        self._racks, self._split_bytes = racks or {}, max(1, split_bytes)
        self.nodes = tuple(sorted(set(target.nodes)))
        self._copies = Copies(holders)
        self._classes: dict[_ClassKey, _Class] = {}
        self._class_of: dict[str, tuple[_Class, int]] = {}
        for node in self.nodes:
            shared = parted(target.regions_on(node))[0]
            held = parted(holders.get(node, {}))[0]
            key = (id(shared), id(held) if held else 0, self._racks.get(node))
            if key not in self._classes:
                self._classes[key] = _Class(self._draft(shared, held), [])
            members = self._classes[key].nodes
            self._class_of[node] = (self._classes[key], len(members))
            members.append(node)
        self._lines, self._starts = self._balance()

    def check(self) -> None:
        """Raises StateLostError that names every needed region without a living copy."""
        _refuse_gaps([gap for one in self._classes.values() for gap in one.draft.gaps])

    def part(self, node: str) -> NodePlan:
        """One node's plan; an empty one for a node without ranks. Raises StateLostError for its gaps."""
        if node not in self._class_of:
            return NodePlan(node, (), 0, 0)
        own_class, number = self._class_of[node]
        draft = own_class.draft
        _refuse_gaps(draft.gaps)
        rack = self._racks.get(node)
        lines: dict[tuple[int, ...], Line] = {}
        places: dict[tuple[int, ...], int] = {}
        fetches: list[Fetch] = []
        for fqn, item, way in draft.tensors:
            for region, classes in way.tiles:
                num_bytes = region.num_elements * item
                line = lines.get(classes)
                if line is None:
                    wanted = self._set(classes, rack)
                    line = lines[classes] = self._lines[wanted]
                    places[classes] = self._starts[wanted][id(own_class)] + number * draft.demands[classes]
                if len(line.sources) == 1:
                    fetches.append(Fetch(fqn, line.sources[0], region, num_bytes))
                    continue
                for source, part, size in line.serve(places[classes], region, num_bytes, self._split_bytes):
                    fetches.append(Fetch(fqn, source, part, size))
                places[classes] += num_bytes
        own, absent, needed_bytes, held_bytes = self._own(node)
        fetches.extend(own)
        fetches.sort(key=lambda fetch: (fetch.source, fetch.fqn, fetch.region.offsets))
        return NodePlan(
            node,
            tuple(fetches),
            draft.needed_bytes + needed_bytes,
            draft.needed_bytes - draft.missing_bytes + held_bytes,
            tuple(absent),
        )

    def _own(self, node: str) -> tuple[list[Fetch], list[str], int, int]:
        """The state of single coordinates: (fetches, absent names, needed bytes, held bytes). Small, so from anyone."""
        fetches, absent = [], []
        needed_bytes = held_bytes = 0
        for fqn, needed in parted(self._target.regions_on(node))[1].items():
            item = item_bytes(self._target.layout.spec(fqn).dtype)
            way = self._copies.way(fqn, needed, tuple(self._holders.get(node, {}).get(fqn, ())))
            if way.lost:
                absent.append(fqn)
                continue
            needed_bytes += way.needed_elements * item
            held_bytes += (way.needed_elements - way.missing_elements) * item
            for region, classes in way.tiles:
                fetches.append(Fetch(fqn, self._copies.nodes[classes[0]][0], region, region.num_elements * item))
        return fetches, absent, needed_bytes, held_bytes

    def _draft(self, needed: Boxes, held: Boxes) -> _Draft:
        tensors: list[tuple[str, int, Geometry]] = []
        gaps: list[tuple[str, Region]] = []
        demands: dict[tuple[int, ...], int] = {}
        needed_bytes = missing_bytes = 0
        for fqn in sorted(needed):
            item = item_bytes(self._target.layout.spec(fqn).dtype)
            way = self._copies.way(fqn, needed[fqn], held.get(fqn, ()))
            needed_bytes += way.needed_elements * item
            missing_bytes += way.missing_elements * item
            gaps.extend((fqn, region) for region in way.lost)
            if way.tiles:
                tensors.append((fqn, item, way))
            for region, classes in way.tiles:
                demands[classes] = demands.get(classes, 0) + region.num_elements * item
        return _Draft(tuple(tensors), tuple(gaps), demands, needed_bytes, missing_bytes)

    def _set(self, classes: tuple[int, ...], rack: str | None) -> _Set:
        """The sources that have a tile: those in the rack, where there are any."""
        if rack is not None and any(where == rack for _, where in self._copies.groups(classes, self._racks)):
            return classes, rack
        return classes, None

    def _balance(self) -> tuple[dict[_Set, Line], dict[_Set, dict[int, int]]]:
        """The line of each set of sources, and where on it each class of nodes begins."""
        totals: dict[_Set, int] = {}
        starts: dict[_Set, dict[int, int]] = {}
        for (_, _, rack), one in self._classes.items():
            for classes, num_bytes in one.draft.demands.items():
                wanted = self._set(classes, rack)
                total = totals.get(wanted, 0)
                starts.setdefault(wanted, {})[id(one)] = total
                totals[wanted] = total + num_bytes * len(one.nodes)
        members = {wanted: self._members(wanted) for wanted in totals}
        demands = [(tuple(members[wanted]), total) for wanted, total in totals.items()]
        sizes = {group: len(nodes) for groups in members.values() for group, nodes in groups.items()}
        lines = {}
        for wanted, given in zip(totals, quotas(demands, sizes), strict=True):
            shares = [(members[wanted][group], amount) for group, amount in given.items()]
            lines[wanted] = Line.cut(totals[wanted], shares)
        return lines, starts

    def _members(self, wanted: _Set) -> dict[_Group, tuple[str, ...]]:
        classes, rack = wanted
        groups = self._copies.groups(classes, self._racks)
        return {group: nodes for group, nodes in groups.items() if rack is None or group[1] == rack}


_Group = tuple[int, str | None]
"""Equal holders in one rack: (class, rack)."""
_Set = tuple[tuple[int, ...], str | None]
"""Sources of a tile: (classes of holders, the rack they must be in)."""
_ClassKey = tuple[int, int, str | None]


@dataclass(frozen=True, slots=True)
class _Draft:
    """What the nodes of a class get, before sources are picked. `demands`: bytes by the classes that can give them."""

    tensors: tuple[tuple[str, int, Geometry], ...]
    gaps: tuple[tuple[str, Region], ...]
    demands: dict[tuple[int, ...], int]
    needed_bytes: int
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class _Class:
    draft: _Draft
    nodes: list[str]


def _refuse_gaps(gaps: Sequence[tuple[str, Region]]) -> None:
    unique = sorted(set(gaps))
    if unique:
        named = ", ".join(f"{fqn} {region}" for fqn, region in unique[:5])
        more = f" and {len(unique) - 5} more" if len(unique) > 5 else ""
        raise StateLostError(
            f"no living node holds these regions of the state: {named}{more}; "
            "bring back a node that does, or start again from a durable checkpoint"
        )
