"""The decider's single decisions; whole lives are in tests/sim."""

from __future__ import annotations

from dataclasses import replace

from tenplexrun.core import rounds
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.lifecycle import Lifecycle, RoundSeen, StopWorkers
from tenplexrun.core.membership import Decision, Settings, View, decide
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Ack, Cause, Failure, Member, Participant, Request, Round, Stop
from tenplexrun.core.snapshots import Claim, Holding, SnapshotId
from tenplexrun.errors import DataChangedError, to_wire

LAYOUT = Layout((TensorSpec("w", (8,), "float32", (Shard(0, "tp"),)),))
SETTINGS = Settings(1, 2, 1, ParallelConfig(tp=2), join_window_s=3.0, rendezvous_timeout_s=100.0)
A, B = (Member(name, "h", f"{name}:1", f"{name}:2", 2) for name in "ab")
PLACES = (Participant("a", "h", 0, 2, "a:2"), Participant("b", "h", 2, 2, "b:2"))
RUNNING = Round(3, "running", Cause("start", "", 0.0), "a:1", SETTINGS.sizes, PLACES, ParallelConfig(dp=2, tp=2))
FAILURE = Failure("b", "h", 3, 1, 77, -9, 5.0)


def view(*members: Member, round_: Round | None = None, acks: dict[str, Ack] | None = None, **other: object) -> View:
    known: dict[str, object] = {
        "decider": "a:1",
        "members": {member.node: member for member in members},
        "seen": {member.node: 10.0 for member in members},
        "round": round_,
        "acks": acks or {},
        "requests": (),
        "layouts": {LAYOUT.digest: LAYOUT},
        "since": 10.0,
        "wall": 0.0,
    }
    return View(**{**known, **other})  # type: ignore[arg-type]


def written(decision: Decision) -> Round:
    assert decision.round is not None, decision.reason
    return decision.round


def test_a_full_job_starts_at_once_and_one_with_room_waits_its_window() -> None:
    assert written(decide(view(A, B), SETTINGS, 10.0)).phase == "gathering"
    alone = decide(view(A), SETTINGS, 10.0)
    assert alone.round is None
    assert alone.wake_at == 13.0
    assert written(decide(view(A), SETTINGS, 13.0)).number == 0


def test_some_of_the_window_is_over_when_a_node_comes_with_room_left_for_those_who_get_ready_more_slowly() -> None:
    ends = {ready_s: decide(view(replace(A, ready_s=ready_s)), SETTINGS, 10.0).wake_at for ready_s in (1, 2, 4, 60)}
    assert ends == {1: 12.0, 2: 11.0, 4: 11.0, 60: 13.0}
    asked_for = replace(SETTINGS, join_window_s=20.0)
    assert decide(view(replace(A, ready_s=15.0)), asked_for, 10.0).wake_at == 28.0


def test_too_few_nodes_end_the_job_when_their_time_is_over() -> None:
    strict = replace(SETTINGS, min_nodes=2)
    waits, later = decide(view(A), strict, 50.0), decide(view(A), strict, 59.0)
    assert waits.wake_at == 110.0
    assert waits.tell
    assert later.reason == waits.reason  # a line each second helps nobody
    assert decide(view(A), strict, 80.0).reason.endswith("at most 30 s left")
    verdict = written(decide(view(A), strict, 110.0)).verdict
    assert verdict is not None
    assert verdict.code == 71


def test_a_job_that_lost_a_node_says_that_it_waits_for_another() -> None:
    strict = replace(SETTINGS, min_nodes=2)
    lost = written(decide(view(A, round_=RUNNING), strict, 20.0))
    waits = decide(view(A, round_=lost, acks={"a": gathered("a", ranks=(0, 1))}), strict, 20.1)
    assert waits.tell
    assert "1 node with 2 workers here, too few" in waits.reason


def test_a_failure_stops_all_now_and_counts() -> None:
    after = written(decide(view(A, B, round_=RUNNING, acks={"b": Ack("b", "failed", failure=FAILURE)}), SETTINGS, 20.0))
    assert (after.number, after.phase, after.stop.mode, after.failures) == (4, "gathering", "now", 1)


def stopped_for_failure() -> Round:
    spent = replace(RUNNING, failures=1)
    acks = {"b": Ack("b", "failed", failure=FAILURE)}
    return written(decide(view(A, B, round_=spent, acks=acks), SETTINGS, 20.0))


def test_without_restarts_left_the_verdict_is_the_workers_own_code() -> None:
    acks = {"a": gathered("a", ranks=(0, 1)), "b": gathered("b", ranks=(2, 3))}
    after = written(decide(view(A, B, round_=stopped_for_failure(), acks=acks), SETTINGS, 10.1))
    assert after.verdict is not None
    assert after.verdict.code == 137
    assert "rank 3" in after.verdict.message


def test_the_verdict_waits_a_moment_for_nodes_that_do_not_stop_and_no_longer() -> None:
    round_ = stopped_for_failure()
    waiting = decide(view(A, B, round_=round_), SETTINGS, 10.1)
    assert waiting.round is None
    assert waiting.wake_at == 12.0
    assert written(decide(view(A, B, round_=round_), SETTINGS, 12.0)).phase == "ended"


def lives(failures: list[Failure], committed: int | None = None) -> Round:
    """Rounds that go on from a snapshot of round 0 and end with these failures, with restarts enough."""
    settings, round_ = replace(SETTINGS, max_restarts=100), replace(RUNNING, number=1)
    holdings = {"a": gathered("a", ranks=(0, 1)), "b": gathered("b", ranks=(2, 3))}
    for failure in failures:
        round_ = replace(round_, phase="running", snapshot=SnapshotId(0, 9, LAYOUT.digest))
        acks = {"b": Ack("b", "failed", failure=failure, committed=committed)}
        round_ = written(decide(view(A, B, round_=round_, acks=acks), settings, 20.0))
        round_ = written(decide(view(A, B, round_=round_, acks=holdings), settings, 20.1))
    return round_


def test_rounds_that_fail_alike_without_a_newer_snapshot_end_the_job() -> None:
    nan = replace(FAILURE, code=1, stderr=("step 12", "loss is NaN"))
    ended = lives([nan] * 3)
    assert ended.verdict is not None
    assert (ended.verdict.code, ended.number) == (1, 4)
    assert "3 rounds in a row ended so" in ended.verdict.message
    assert lives([nan] * 2).phase == "running"
    for other in (replace(nan, rank=2), replace(nan, code=3), replace(nan, stderr=("loss is NaN ",))):
        assert lives([nan, nan, other, nan, nan]).phase == "running"
    assert lives([nan] * 9, committed=10).phase == "running"


def test_a_failure_that_no_restart_would_mend_ends_the_job_at_once() -> None:
    error = to_wire(DataChangedError("x.npy has shrunk"))
    failed = {"b": Ack("b", "failed", failure=replace(FAILURE, code=69, error=error))}
    round_ = written(decide(view(A, B, round_=RUNNING, acks=failed), SETTINGS, 20.0))
    assert round_.phase == "ended"
    assert round_.verdict is not None
    assert (round_.verdict.code, round_.failures) == (69, 0)
    assert "no restart would mend" in round_.verdict.message


def test_a_failure_whose_peer_was_lost_is_a_loss_and_costs_no_restart() -> None:
    """The survivor's all-reduce broke before the news of the dead node came."""
    after = written(decide(view(B, round_=stopped_for_failure()), SETTINGS, 10.1))
    assert (after.cause.kind, after.failures, after.phase) == ("node_lost", 1, "gathering")


def test_the_failure_that_was_first_is_blamed() -> None:
    first = replace(FAILURE, node="a", rank=0, at=4.9)
    acks = {"a": Ack("a", "failed", failure=first), "b": Ack("b", "failed", failure=FAILURE)}
    assert "rank 0" in written(decide(view(A, B, round_=RUNNING, acks=acks), SETTINGS, 20.0)).cause.detail


def test_a_lost_node_costs_no_restart() -> None:
    after = written(decide(view(A, round_=RUNNING), SETTINGS, 20.0))
    assert (after.cause.kind, after.failures, after.stop.mode) == ("node_lost", 0, "now")


def test_all_done_ends_the_job_well() -> None:
    acks = {"a": Ack("a", "done"), "b": Ack("b", "done")}
    verdict = written(decide(view(A, B, round_=RUNNING, acks=acks), SETTINGS, 20.0)).verdict
    assert verdict is not None
    assert verdict.code == 0


def test_a_hold_is_proposed_raised_and_committed() -> None:
    gathering = replace(RUNNING, number=4, phase="gathering", stop=Stop("boundary"))

    def after(stop: Stop, started: int) -> Round:
        acks = {node: Ack(node, "holding", hold=stop.hold, started=started) for node in "ab"}
        return written(decide(view(A, B, round_=replace(gathering, stop=stop), acks=acks), SETTINGS, 20.0))

    proposed = after(Stop("boundary"), 7).stop
    assert (proposed.hold, proposed.committed) == (8, False)
    raised = after(proposed, 8).stop
    assert (raised.hold, raised.committed) == (10, False)
    agreed = after(raised, 9).stop
    assert (agreed.hold, agreed.committed) == (10, True)


def test_workers_that_count_no_steps_are_stopped_now() -> None:
    gathering = replace(RUNNING, number=4, phase="gathering", stop=Stop("boundary"))
    acks = {node: Ack(node, "holding") for node in "ab"}
    assert written(decide(view(A, B, round_=gathering, acks=acks), SETTINGS, 20.0)).stop == Stop("now")


def gathered(node: str, *steps: int, ranks: tuple[int, ...]) -> Ack:
    claim = Claim(RUNNING.parallel, ranks)
    holdings = tuple(Holding(SnapshotId(3, step, LAYOUT.digest), (claim,)) for step in steps)
    return Ack(node, "gathered", holdings=holdings, master_port=4000)


def test_a_round_is_formed_from_the_newest_snapshot_that_the_living_can_complete() -> None:
    gathering = replace(RUNNING, number=4, phase="gathering")
    acks = {"a": gathered("a", 5, 6, ranks=(0, 1)), "b": gathered("b", 5, ranks=(2, 3))}
    both = written(decide(view(A, B, round_=gathering, acks=acks), SETTINGS, 20.0))
    assert both.snapshot == SnapshotId(3, 6, LAYOUT.digest)
    assert both.parallel == ParallelConfig(dp=2, tp=2)
    assert both.master == ("h", 4000)
    assert list(both.sources or {}) == ["a"]
    alone = written(decide(view(B, round_=gathering, acks={"b": acks["b"]}), SETTINGS, 20.0))
    assert alone.snapshot == SnapshotId(3, 5, LAYOUT.digest)
    assert alone.parallel == ParallelConfig(tp=2)


def test_layouts_are_asked_for_before_a_snapshot_is_chosen() -> None:
    gathering = replace(RUNNING, number=4, phase="gathering")
    acks = {"a": gathered("a", 5, ranks=(0, 1))}
    decision = decide(view(A, round_=gathering, acks=acks, layouts={}), SETTINGS, 20.0)
    assert decision.need_layouts == (LAYOUT.digest,)


def test_a_node_that_does_not_stop_is_evicted_by_the_round_document() -> None:
    gathering = replace(RUNNING, number=4, phase="gathering")
    known = view(A, B, round_=gathering, acks={"a": gathered("a", ranks=(0, 1))})
    evicting = written(decide(known, SETTINGS, 1000.0))
    assert evicting.evicted == ("b",)
    after = written(decide(replace(known, round=evicting), SETTINGS, 1000.0))
    assert (after.nodes, after.evicted) == (("a",), ("b",))


def test_wishes_are_refused_with_a_reason_or_lead_to_a_boundary() -> None:
    def ask(**sizes: int) -> Decision:
        return decide(view(A, B, round_=RUNNING, requests=(Request("r", "resize", sizes),)), SETTINGS, 20.0)

    for impossible in ({"tp": 3}, {"pp": 8}, {"pp": 0}):
        assert (ask(**impossible).answers or {})["r"].startswith("refused:")
    assert "make --nproc-per-node a multiple of --tp" in (ask(tp=3).answers or {})["r"]
    assert "a world of 2 to 4 workers is not divisible by pp=8" in (ask(pp=8).answers or {})["r"]
    assert ask(tp=2).round is None
    after = written(ask(pp=2))
    assert (after.sizes, after.fallback, after.stop.mode) == (ParallelConfig(pp=2, tp=2), SETTINGS.sizes, "boundary")


def test_a_layout_that_never_got_as_far_as_a_snapshot_is_taken_back() -> None:
    wished = replace(RUNNING, sizes=ParallelConfig(tp=1), fallback=SETTINGS.sizes)
    never = decide(view(A, B, round_=wished, acks={"b": Ack("b", "failed", failure=FAILURE)}), SETTINGS, 20.0)
    assert written(never).sizes == SETTINGS.sizes
    proved = Ack("b", "failed", failure=FAILURE, committed=9)
    assert written(decide(view(A, B, round_=wished, acks={"b": proved}), SETTINGS, 20.0)).sizes == wished.sizes


def test_a_drain_that_leaves_too_few_ends_the_job_with_its_code() -> None:
    strict = replace(SETTINGS, min_nodes=2)
    drain = Request("b", "drain", node="b", code=143, detail="SIGTERM")
    verdict = written(decide(view(A, B, round_=RUNNING, requests=(drain,)), strict, 20.0)).verdict
    assert verdict is not None
    assert verdict.code == 143
    assert written(decide(view(A, B, round_=RUNNING, requests=(drain,)), SETTINGS, 20.0)).stop.mode == "boundary"


def drain(node: str) -> Request:
    return Request(node, "drain", node=node, code=143, detail="SIGTERM")


def test_nodes_that_are_told_to_leave_within_half_a_second_leave_in_one_change() -> None:
    wide = replace(SETTINGS, sizes=ParallelConfig(), max_nodes=3)
    c = replace(A, node="c")
    three = replace(RUNNING, participants=(*PLACES, Participant("c", "h", 4, 2, "c:2")))
    requests, asked = (drain("b"), drain("c")), {"b": 20.0, "c": 20.4}
    first = decide(view(A, B, c, round_=three, requests=requests[:1], asked={"b": 20.0}), wide, 20.1)
    assert (first.round, first.wake_at) == (None, 20.5)
    both = decide(view(A, B, c, round_=three, requests=requests, asked=asked), wide, 20.5)
    assert written(both).cause.detail == "nodes b, c leave: SIGTERM"
    assert (written(both).number, written(both).stop.mode) == (4, "boundary")
    failed = {"b": Ack("b", "failed", failure=FAILURE)}
    at_once = decide(view(A, B, c, round_=three, requests=requests[:1], asked={"b": 20.0}, acks=failed), wide, 20.1)
    assert written(at_once).cause.kind == "worker_failed", "only the leaving waits"


def test_a_node_that_is_told_to_leave_while_others_stop_is_not_in_the_next_round() -> None:
    gathering = replace(RUNNING, number=4, phase="gathering", sizes=ParallelConfig())
    acks = {"a": gathered("a", ranks=(0, 1)), "b": gathered("b", ranks=(2, 3))}
    later = view(A, B, round_=gathering, acks=acks, requests=(drain("b"),), asked={"b": 20.0})
    assert written(decide(later, SETTINGS, 20.0)).nodes == ("a",)
    verdict = written(decide(later, replace(SETTINGS, min_nodes=2), 20.0)).verdict
    assert verdict is not None
    assert verdict.code == 143


def test_who_asks_twice_ends_the_job_without_grace() -> None:
    asked = Request("1", "end", code=130, signum=2)
    ended = written(decide(view(A, B, round_=RUNNING, requests=(asked,)), SETTINGS, 20.0))
    assert (ended.phase, ended.stop) == ("ended", Stop("now", signum=2))
    assert decide(view(A, B, round_=ended, requests=(asked,)), SETTINGS, 20.0).round is None
    again = view(A, B, round_=ended, requests=(asked, replace(asked, id="2", urgent=True)))
    urgent = written(decide(again, SETTINGS, 20.0))
    assert urgent == replace(ended, stop=Stop("now", signum=2, urgent=True))
    assert decide(replace(again, round=urgent), SETTINGS, 20.0).round is None
    for kind in ("ended", "running"):
        machine = Lifecycle("a")
        machine.on(RoundSeen(RUNNING))
        if kind == "ended":
            assert machine.on(RoundSeen(ended)) == [StopWorkers(3, "terminate", 2)]
        assert machine.on(RoundSeen(urgent)) == [StopWorkers(3, "kill", 2)]


def test_records_come_back_from_json_as_they_were() -> None:
    full = replace(
        RUNNING,
        snapshot=SnapshotId(2, 5, LAYOUT.digest),
        sources={"a": rounds.Source("a:2", gathered("a", 5, ranks=(0,)).holdings)},
        fallback=ParallelConfig(),
        verdict=rounds.Verdict(1, "over", FAILURE),
        first_failure=FAILURE,
        master=("h", 1),
        spares=("c",),
        racks={"a": "r1"},
        algorithm=3,
        inputs="5f",
    )
    assert rounds.round_from_json(rounds.to_json(full)) == full
    ack = replace(gathered("a", 5, ranks=(0,)), failure=FAILURE)
    assert rounds.ack_from_json(rounds.to_json(ack)) == ack
    assert rounds.member_from_json(rounds.to_json(A)) == A


def test_who_is_not_linked_to_the_decider_for_long_is_lost_until_it_is() -> None:
    soon = decide(view(A, B, round_=RUNNING, unlinked={"b": 15.0}), SETTINGS, 20.0)
    assert (soon.round, soon.wake_at) == (None, 25.0)
    after = written(decide(view(A, B, round_=RUNNING, unlinked={"b": 15.0}), SETTINGS, 25.0))
    assert (after.cause.kind, after.stop.mode) == ("node_lost", "now")
    assert "b [h] cannot be reached" in after.cause.detail
    formed = written(
        decide(view(A, B, round_=after, acks={"a": gathered("a", ranks=(0, 1))}, unlinked={"b": 15.0}), SETTINGS, 26.0)
    )
    assert formed.nodes == ("a",)
    again = written(decide(view(A, B, round_=formed), SETTINGS, 40.0))
    assert again.cause.kind == "node_joined"


def test_who_cannot_reach_most_of_the_others_lets_another_one_decide() -> None:
    c = replace(A, node="c", link="c:1")
    cut_off = view(A, B, c, round_=RUNNING, unlinked={"b": 1.0, "c": 1.0})
    assert decide(cut_off, SETTINGS, 20.0).resign
    assert not decide(view(A, B, round_=RUNNING, unlinked={"b": 1.0}), SETTINGS, 20.0).resign


def test_a_host_that_comes_and_goes_waits_longer_each_time() -> None:
    round_ = replace(RUNNING, participants=PLACES[:1], parallel=ParallelConfig(tp=2))
    flapping = {"h": (3, 0.0)}
    new = view(A, B, round_=replace(round_, departures=flapping), seen={"a": 0.0, "b": 10.0})
    assert decide(new, SETTINGS, 60.0).wake_at == 70.0
    assert written(decide(new, SETTINGS, 70.0)).cause.kind == "node_joined"
    worse = replace(new, round=replace(round_, departures={"h": (4, 0.0)}))
    assert decide(worse, SETTINGS, 70.0).wake_at == 130.0
    lost = written(decide(view(A, round_=replace(RUNNING, departures=flapping), wall=59.0), SETTINGS, 20.0))
    assert lost.departures == {"h": (4, 59.0)}
    late = written(decide(view(A, round_=replace(RUNNING, departures=flapping), wall=61.0), SETTINGS, 20.0))
    assert late.departures == {"h": (1, 61.0)}


def test_failures_and_churn_have_budgets_of_their_own() -> None:
    settings = replace(SETTINGS, max_churn=1)
    once = written(decide(view(A, round_=RUNNING), settings, 20.0))
    assert (once.phase, once.churn, once.failures) == ("gathering", 1, 0)
    twice = written(decide(view(A, round_=replace(RUNNING, churn=1)), settings, 20.0))
    assert (twice.phase, twice.verdict and twice.verdict.code) == ("ended", 72)
    failed = {"b": Ack("b", "failed", failure=FAILURE)}
    assert written(decide(view(A, B, round_=replace(RUNNING, churn=1), acks=failed), settings, 20.0)).churn == 1
