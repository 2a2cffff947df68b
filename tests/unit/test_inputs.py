"""The inputs of a plan are frozen in the round document; who would plan from others moves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenplexrun.core import inputs, rounds
from tenplexrun.core.layout import Layout, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Cause, Member, Participant, Round, Source
from tenplexrun.core.snapshots import Claim, Holding, SnapshotId
from tenplexrun.errors import LayoutError

CONFIG = ParallelConfig(dp=2)
LAYOUT = Layout((TensorSpec("w", (8,), "float32"),))
SNAPSHOT = SnapshotId(1, 5, LAYOUT.digest)
MEMBERS = {name: Member(name, "h", "l", "s", 1, rack=rack) for name, rack in (("a", "r1"), ("b", "r2"), ("c", None))}
FORMED = Round(
    2, "running", Cause("start", "", 0.0), "a:1", ParallelConfig(),
    (Participant("a", "h", 0, 1, "s"), Participant("b", "h", 1, 1, "s")), CONFIG, snapshot=SNAPSHOT,
    sources={"a": Source("s", (Holding(SNAPSHOT, (Claim(CONFIG, (0,)),)),)), "gone": Source("s", ())},
)  # fmt: skip
FROZEN = inputs.frozen(FORMED, MEMBERS)


def test_inputs_are_frozen_with_labels_and_survive_the_document() -> None:
    assert FROZEN.racks == {"a": "r1", "b": "r2"}
    read = rounds.round_from_json(rounds.to_json(FROZEN))
    assert read == FROZEN
    inputs.check(read)
    inputs.check(replace(FROZEN, decider="b:1", spares=("c",)))  # no inputs


def test_whatever_differs_is_refused() -> None:
    other = Holding(SNAPSHOT, (Claim(CONFIG, (0,)),), except_=("w",))
    for changed in (
        replace(FROZEN, racks={"a": "r1"}),
        replace(FROZEN, snapshot=replace(SNAPSHOT, step=6)),
        replace(FROZEN, sources={"a": Source("s", (other,)), "gone": Source("s", ())}),
        replace(FROZEN, participants=FROZEN.participants[::-1]),
        replace(FROZEN, parallel=ParallelConfig(tp=2)),
    ):
        with pytest.raises(LayoutError, match="one version"):
            inputs.check(changed)
    with pytest.raises(LayoutError, match="version 1 of the planner"):
        inputs.check(replace(FROZEN, algorithm=1))
