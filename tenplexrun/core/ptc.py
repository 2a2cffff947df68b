"""The parallelizable tensor collection: a layout (slicing, partitioning), a config, and ranks on nodes (allocation)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenplexrun.core import records
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region, disjoint, subtract
from tenplexrun.core.shared import Boxes, SharedRegions
from tenplexrun.errors import LayoutError


@dataclass(frozen=True, slots=True)
class PTC:
    """A job's whole state under `config`; `nodes[rank]` is the id of the node where `rank` runs.

    Raises LayoutError when the layout cannot be had under the config, or a rank has no node.
    """

    layout: Layout
    config: ParallelConfig
    nodes: tuple[str, ...]
    _memo: dict[str, SharedRegions] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ranks: dict[str, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if len(self.nodes) != self.config.world_size:
            raise LayoutError(f"{self.config} has {self.config.world_size} ranks, but {len(self.nodes)} were placed")
        self.layout.check(self.config)
        for rank, node in enumerate(self.nodes):
            self._ranks.setdefault(node, []).append(rank)

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Ranks of a node, ascending; none for an unknown node."""
        return tuple(self._ranks.get(node, ()))

    def regions_of(self, rank: int) -> Boxes:
        """The non-empty regions that `rank` holds of each of its tensors, by fqn."""
        return self.layout.regions_of(self.config, rank)

    def regions_on(self, node: str) -> SharedRegions:
        """The distinct regions that a node's ranks hold, sorted, by fqn.

        Those of one tensor are disjoint, but for replicas that a flat buffer cuts at different places.
        """
        if node not in self._memo:
            self._memo[node] = self.layout.regions_at((self.config, rank) for rank in self.ranks_on(node))
        return self._memo[node]

    def ranks_of(self, fqn: str, region: Region) -> tuple[int, ...]:
        """The ranks that hold all of `region`, ascending. Raises LayoutError for an unknown name."""
        self.layout.spec(fqn)
        return tuple(
            rank
            for rank in range(self.config.world_size)
            if fqn in self.regions_of(rank) and not subtract(region, self.regions_of(rank)[fqn])
        )

    @property
    def num_bytes(self) -> int:
        """Of the whole state, each element once."""
        return self.layout.num_bytes

    def bytes_of(self, rank: int) -> int:
        return sum(self._bytes(fqn, one) for fqn, regions in self.regions_of(rank).items() for one in regions)

    def bytes_on(self, node: str) -> int:
        """Of the node's distinct regions: what its ranks share counts once."""
        found = self.regions_on(node).items()
        return sum(self._bytes(fqn, one) for fqn, regions in found for one in disjoint(regions))

    def to_json(self) -> Record:
        return {"layout": self.layout.to_json(), "config": self.config.to_json(), "nodes": list(self.nodes)}

    @classmethod
    def from_json(cls, record: object) -> PTC:
        known = records.fields(record, "a PTC", ("layout", "config", "nodes"))
        nodes = (records.text(node, "a node id") for node in records.items(known["nodes"], "the nodes of a PTC"))
        return cls(Layout.from_json(known["layout"]), records.config(known["config"]), tuple(nodes))

    def _bytes(self, fqn: str, region: Region) -> int:
        return region.num_elements * item_bytes(self.layout.spec(fqn).dtype)
