"""What every node plans its part of a round from, frozen in the round document, and the proof that it is the same.

The inputs are the snapshot, who holds what of it (the inventory), ranks on nodes, labels, the way of moves, and the
planner's version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

from tenplexrun.core.planner import ALGORITHM
from tenplexrun.core.rounds import Member, Round
from tenplexrun.errors import LayoutError


def frozen(round_: Round, members: Mapping[str, Member]) -> Round:
    """`round_`, formed by now, with the labels of its nodes, this planner's version, and the digest of all inputs."""
    nodes = sorted({*round_.nodes, *(round_.sources or ())} & members.keys())
    racks = {node: rack for node in nodes if (rack := members[node].rack) is not None}
    labelled = replace(round_, racks=racks, algorithm=ALGORITHM)
    return replace(labelled, inputs=digest(labelled))


def check(round_: Round) -> None:
    """Before a byte moves. Raises LayoutError where this node would plan something else than the others."""
    if round_.algorithm != ALGORITHM:
        raise LayoutError(
            f"round {round_.number} was planned by version {round_.algorithm} of the planner, this node has "
            f"{ALGORITHM}; run one version of tenplexrun on all nodes"
        )
    if round_.inputs != digest(round_):
        raise LayoutError(
            f"the inputs of round {round_.number}'s plan have digest {digest(round_)} here, {round_.inputs} where they "
            "were frozen; run one version of tenplexrun on all nodes"
        )


def digest(round_: Round) -> str:
    """blake2b of the canonical JSON of a round's inputs, 32 hex digits."""
    sources = round_.sources or {}
    record = {
        "algorithm": round_.algorithm,
        "snapshot": round_.snapshot and round_.snapshot.to_json(),
        "inventory": {node: [holding.to_json() for holding in source.holdings] for node, source in sources.items()},
        "config": round_.parallel.to_json(),
        "placement": [[part.node, part.first_rank, part.num_workers] for part in round_.participants],
        "racks": dict(round_.racks),
        "way": round_.way,
    }
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8"), digest_size=16).hexdigest()
