"""The ranks of a round agree on the union of their layouts, through the process group's own key-value store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.errors import LayoutError, TenplexError, from_wire, to_wire


class KeyValueStore(Protocol):
    """torch's `Store`: `get` waits until the key is there."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def agree(store: KeyValueStore, config: ParallelConfig, rank: int, own: Layout, values: dict[str, Any]) -> Layout:
    """The union of all ranks' layouts, the same on all. Rank 0 makes it; JSON, no pickle.

    Raises LayoutError, on every rank, when two ranks contradict each other or one lacks a tensor: in the layout,
    or in `values`, of which a snapshot keeps one copy for all.
    """
    store.set(f"layout/{rank}", json.dumps({"layout": own.to_json(), "values": values}))
    if rank == 0:
        try:
            verdict: dict[str, Any] = {"layout": _union(store, config).to_json()}
        except TenplexError as error:
            verdict = {"error": to_wire(error)}
        store.set("layout/union", json.dumps(verdict))
    verdict = json.loads(store.get("layout/union"))
    if "error" in verdict:
        raise from_wire(verdict["error"])
    return Layout.from_json(verdict["layout"])


def merged(store: KeyValueStore, config: ParallelConfig, rank: int, own: Mapping[str, int]) -> dict[str, int]:
    """The union of what all ranks give, the same on all: the optimizer's group of each parameter by name."""
    store.set(f"groups/{rank}", json.dumps(dict(own)))
    if rank == 0:
        union: dict[str, int] = {}
        for other in range(config.world_size):
            union.update(json.loads(store.get(f"groups/{other}")))
        store.set("groups/union", json.dumps(union))
    return dict(json.loads(store.get("groups/union")))


def _union(store: KeyValueStore, config: ParallelConfig) -> Layout:
    declared = [json.loads(store.get(f"layout/{rank}")) for rank in range(config.world_size)]
    first = declared[0]["values"]
    for rank, one in enumerate(declared):
        different = sorted(key for key in {*first, *one["values"]} if first.get(key) != one["values"].get(key))
        if different:
            raise LayoutError(
                f"rank {rank} and rank 0 differ in {', '.join(different)}: a snapshot keeps one copy for all ranks; "
                "give the optimizers of all stages the same param groups and hyper-parameters"
            )
    return Layout.union(config, {rank: Layout.from_json(one["layout"]) for rank, one in enumerate(declared)})
