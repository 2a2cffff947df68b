"""How long a node does without its coordination store, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tenplexrun.agent.decider import Decider
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.memory import MemoryCoordination, MemoryStore
from tenplexrun.agent.outage import PERSIST_S, Patience
from tenplexrun.core.membership import Settings
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Cause, Member, Participant, Round, round_from_json, to_json


def test_healthy_workers_train_on_for_ever() -> None:
    said: list[str] = []
    patience = Patience(0.0, 5.0, hosted=False, say=said.append)
    for now in range(10_000):
        assert patience.away(float(now), training=True) is None
    [line] = said
    assert "training goes on" in line
    patience.answered(10_000.0)
    assert said[1:] == ["etcd is back after 10000 s"]
    patience.answered(10_002.0)
    assert len(said) == 2


def test_an_outage_shorter_than_the_lease_is_not_spoken_of() -> None:
    said: list[str] = []
    patience = Patience(0.0, 5.0, hosted=False, say=said.append)
    assert patience.away(4.0, training=True) is None
    patience.answered(5.0)
    assert not said


def test_once_it_is_needed_it_gets_a_minute() -> None:
    patience = Patience(0.0, 5.0, hosted=False, say=lambda text: None)
    assert patience.away(500.0, training=True) is None
    assert patience.away(500.0 + PERSIST_S, training=False) is None
    verdict = patience.away(501.0 + PERSIST_S, training=False)
    assert verdict is not None
    assert verdict.code == 70
    assert "561 s" in verdict.message


def test_one_that_a_node_hosts_does_not_come_back() -> None:
    said: list[str] = []
    patience = Patience(0.0, 5.0, hosted=True, say=said.append)
    assert patience.away(PERSIST_S, training=True) is None
    assert "this node ends" in said[0]
    verdict = patience.away(PERSIST_S + 1, training=True)
    assert verdict is not None
    assert "node that hosts it" in verdict.message


# --- the decider after a break ------------------------------------------------------------------------------------


class Fresh(MemoryCoordination):
    """Connected since just now."""

    connected_s = 0.0


ROUND = Round(
    3,
    "running",
    Cause("start", "", 0.0),
    "d:1",
    ParallelConfig(dp=2),
    participants=(Participant("a", "h", 0, 1, "s"), Participant("b", "h", 1, 1, "s")),
)


def decide(
    coordination: MemoryCoordination, lease_s: float, has_round: bool = True, round_: Round | None = ROUND
) -> Any:
    """Number of the round after a decider has looked for a moment at a job of a and b, of which only a has a key."""

    async def run() -> int | None:
        if round_ is not None:
            await coordination.put("runs/e/round", json.dumps(to_json(round_)))
        await coordination.put("runs/e/members/a", json.dumps(to_json(Member("a", "h", "a:1", "s", 1))))
        settings = Settings(1, 2, 3, ParallelConfig(), join_window_s=0.0)
        decider = Decider(coordination, "runs/e", settings, _no_layouts, EventLog("a", None), lease_s, lambda: {"a"})
        decider.forbearance.has_round = has_round
        task = asyncio.ensure_future(decider.run("a", "d:1"))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        found = await coordination.get("runs/e/round")
        return None if found is None else round_from_json(json.loads(found.value)).number

    return asyncio.run(run())


async def _no_layouts(digest: str, peers: Sequence[str]) -> dict[str, Any]:
    raise AssertionError(digest)


def test_a_node_that_is_missing_after_a_break_gets_one_lease_to_come_back() -> None:
    assert decide(Fresh(MemoryStore()), lease_s=60.0) == 3
    assert decide(Fresh(MemoryStore()), lease_s=0.0) == 4
    assert decide(MemoryCoordination(MemoryStore()), lease_s=60.0) == 4, "no break: it is lost"


def test_a_store_that_came_back_empty_is_not_taken_for_a_new_job() -> None:
    assert decide(MemoryCoordination(MemoryStore()), 60.0, round_=None) is None
    assert decide(MemoryCoordination(MemoryStore()), 60.0, has_round=False, round_=None) == 0
