"""Durable checkpoints: when one is due, and what the decider makes of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from tenplexrun.agent.decider import Decider
from tenplexrun.agent.durable import Collector
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.memory import MemoryCoordination, MemoryStore
from tenplexrun.core import durable
from tenplexrun.core.durable import Cadence, Found
from tenplexrun.core.membership import Settings, View, decide, may_wait
from tenplexrun.core.pace import Interval
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Ack, Cause, Failure, Member, Participant, Request, Round, round_from_json, to_json
from tenplexrun.core.snapshots import SnapshotId
from tenplexrun.errors import CheckpointError, CompareFailedError, LayoutError
from tenplexrun.worker.checkpoint_client import CheckpointClient

CLIENT = CheckpointClient("/nowhere", None, None, 1)  # never asked here


def test_when_a_checkpoint_is_due() -> None:
    steps = Cadence(Interval.parse("10"), 7, 0.0)
    assert [step for step in range(7, 40) if steps.due(step, 1e9, False)][:2] == [10, 11]
    assert not steps.begun(10, 0.0).due(19, 0.0, False)
    assert steps.begun(10, 0.0).due(20, 0.0, False)
    seconds = Cadence(Interval.parse("2.5s"), 7, 100.0)
    assert not seconds.due(8, 102.0, False)
    assert seconds.due(8, 102.5, False)
    assert seconds.due(8, 101.0, last=True)
    assert not seconds.due(7, 1e9, last=True), "what was read need not be written"


def test_names_of_folders() -> None:
    assert durable.step_of(durable.folder_name(12)) == 12
    assert [durable.step_of(name) for name in ("step-5", "step-x", "mystep-5", "step-5.bak")] == [5, None, None, None]
    assert durable.retired([3, 1, 2, 9], keep=2) == [1, 2]
    assert durable.retired([3], keep=2) == []


# --- what the decider makes of it ---------------------------------------------------------------------------------

SETTINGS = Settings(1, 1, 0, ParallelConfig(), durable=True)
MEMBER = Member("a", "h", "h:1", "h:2", 1)
GATHERING = Round(0, "gathering", Cause("start", "", 0.0), "h:1", ParallelConfig())


def view(
    round_: Round, *acks: Ack, found: Found | None = None, writing: bool = False, requests: tuple[Request, ...] = ()
) -> View:
    return View(
        "h:1", {"a": MEMBER}, {"a": 0.0}, round_, {ack.node: ack for ack in acks}, requests, {}, 0.0, 0.0, found=found,
        writing=writing,
    )  # fmt: skip


def test_without_a_snapshot_a_checkpoint_is_looked_for_and_taken() -> None:
    ack = Ack("a", "gathered")
    asked = decide(view(GATHERING, ack), SETTINGS, 1.0)
    assert asked.look_for == Found(0, ())
    formed = decide(view(GATHERING, ack, found=Found(0, (), durable.Checkpoint("u/step-5", 5))), SETTINGS, 1.0).round
    assert formed is not None
    assert (formed.checkpoint, formed.start_step) == (durable.Checkpoint("u/step-5", 5), 5)
    assert round_from_json(json.loads(json.dumps(to_json(formed)))) == formed
    ended = decide(view(GATHERING, ack, found=Found(0, (), error="none can be read")), SETTINGS, 1.0).round
    assert ended is not None
    assert ended.verdict is not None
    assert ended.verdict.code == CheckpointError.exit_code
    stale = decide(view(replace(GATHERING, number=3), ack, found=Found(0, ())), SETTINGS, 1.0)
    assert stale.look_for == Found(3, ()), "there may be a newer one by now"


RUNNING = replace(
    GATHERING,
    phase="running",
    participants=(Participant("a", "h", 0, 1, "h:2"),),
    checkpoint=durable.Checkpoint("u/step-5", 5),
)


def failed(code: int) -> Ack:
    return Ack("a", "failed", failure=Failure("a", "h", 0, 0, 0, code, 0.0, ("load of u/step-5",)))


def test_a_checkpoint_that_cannot_be_loaded_costs_no_restart_and_is_left_out() -> None:
    following = decide(view(RUNNING, failed(CheckpointError.exit_code)), SETTINGS, 1.0).round
    assert following is not None
    assert (following.phase, following.number, following.failures) == ("gathering", 1, 0)
    assert following.refused == ("u/step-5",)
    ended = decide(view(RUNNING, failed(LayoutError.exit_code)), SETTINGS, 1.0).round
    assert ended is not None
    assert ended.phase == "ended", "another model does not get better by trying again"


def test_the_job_ends_after_its_last_checkpoint() -> None:
    waiting = decide(view(RUNNING, Ack("a", "done"), writing=True), SETTINGS, 1.0)
    assert waiting.round is None
    ended = decide(view(RUNNING, Ack("a", "done")), SETTINGS, 1.0).round
    assert ended is not None
    assert ended.phase == "ended"


def test_a_checkpoint_that_the_end_of_a_round_prevented_is_made_up_for() -> None:
    collector = Collector(CLIENT, Interval(steps=10), EventLog("a", None, False), 30.0)
    collector.expect(RUNNING, True)
    assert collector.begin(0, 9, {"a"}) is None
    assert collector.begin(0, 10, {"a"}) is not None
    assert collector.busy
    following = replace(RUNNING, number=1, checkpoint=None, snapshot=SnapshotId(0, 12, "d"))
    collector.expect(replace(following, phase="gathering"), False)
    assert not collector.busy
    collector.expect(following, True)
    assert collector.begin(0, 13, {"a"}) is None, "an older round"
    assert collector.begin(1, 13, {"a"}) is not None
    collector.expect(replace(following, number=2, saved=13), True)
    assert collector.begin(2, 19, {"a"}) is None
    collector.end = (2, 19)
    assert collector.begin(2, 19, {"a"}) is not None, "the job's last step"


def test_a_checkpoint_whose_parts_cannot_all_come_does_not_keep_others_from_being_written() -> None:
    collector = Collector(CLIENT, Interval(steps=10), EventLog("a", None, False), 30.0)
    collector.expect(RUNNING, True)
    assert collector.begin(0, 10, set()) is None, "a node that would not hear of it"
    assert collector.begin(0, 11, {"a", "spare"}) is not None, "it is still due"
    collector.lost("spare")
    assert collector.busy
    collector.lost("a")
    assert not collector.busy
    assert collector.begin(0, 20, {"a"}) is not None


def test_a_job_that_is_told_to_end_writes_a_last_checkpoint_first() -> None:
    end = Request("r", "end", code=143)
    ended = decide(view(RUNNING, requests=(end,)), SETTINGS, 1.0)
    assert ended.round is not None
    assert may_wait(ended, view(RUNNING, requests=(end,)))
    assert not may_wait(ended, view(RUNNING, requests=(replace(end, urgent=True),))), "asked twice"
    assert not may_wait(ended, view(RUNNING, Ack("a", "done"), requests=(end,))), "no snapshot will come"
    assert not may_wait(ended, view(replace(RUNNING, phase="gathering"), requests=(end,)))
    assert not may_wait(decide(view(RUNNING), SETTINGS, 1.0), view(RUNNING))
    collector = Collector(CLIENT, Interval(steps=10), EventLog("a", None, False), 30.0)
    assert not collector.wind_up(100.0), "no round runs here"
    collector = Collector(CLIENT, Interval(steps=10), EventLog("a", None, False), 30.0)
    collector.expect(RUNNING, True)
    assert collector.wind_up(100.0)
    assert not collector.wind_up(130.0), "the grace is over"
    assert collector.wind_up(129.0)
    assert collector.begin(0, 9, {"a"}) is not None
    assert collector.wind_up(129.0)
    collector.lost("a")
    assert not collector.wind_up(129.0), "it has failed"


def test_a_checkpoint_of_a_round_that_has_moved_on_is_not_confirmed() -> None:
    async def play() -> None:
        store = MemoryStore()
        coordination = MemoryCoordination(store)
        events = EventLog("a", None, False)
        decider = Decider(coordination, "f", SETTINGS, None, events, 5.0, set)  # type: ignore[arg-type]
        outlook = decider._outlook
        store.write("f/round", json.dumps(to_json(RUNNING)))
        outlook.observe(store.content("f"))
        await decider.confirm(0, 7)
        confirmed = round_from_json(json.loads(store.content("f")["f/round"].value))
        assert confirmed == replace(RUNNING, saved=7)
        await decider.confirm(0, 9)  # though the watch has not brought the last one yet
        with pytest.raises(CompareFailedError, match="has ended"):
            await decider.confirm(1, 9)
        store.write("f/round", json.dumps(to_json(replace(RUNNING, decider="h:9"))))  # while this one was paused
        with pytest.raises(CompareFailedError):
            await decider.confirm(0, 11)

    asyncio.run(play())
