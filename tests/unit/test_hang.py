"""When a worker counts as hanging, and whose fault it is: looks at a node's workers in made-up time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from tenplexrun.agent import probe
from tenplexrun.core.control import DONE, NONE
from tenplexrun.core.hang import Bounds, Hang, Sight, Watch
from tenplexrun.core.membership import Settings, View, decide
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Ack, Cause, Failure, Member, Participant, Round, ack_from_json, to_json

AUTO = Bounds.of(None, 10.0)


@dataclass
class Node:
    """Two workers, looked at every half second."""

    bounds: Bounds = AUTO
    now: float = 1000.0
    ranks: dict[int, Sight] = field(default_factory=lambda: dict.fromkeys((0, 1), Sight(NONE, NONE, NONE, "S")))
    committed: int = NONE
    held: bool = False

    def __post_init__(self) -> None:
        self.watch = Watch(self.bounds, 0)

    def put(self, *ranks: int, **words: object) -> None:
        for rank in ranks or (0, 1):
            self.ranks[rank] = replace(self.ranks[rank], **words)  # type: ignore[arg-type]

    def look(self) -> Hang | None:
        return self.watch.look(self.now, self.ranks, self.committed, self.held)

    def wait(self, seconds: float) -> tuple[float, Hang] | None:
        """Look until one is suspected or the time is over. How long that took, and the suspicion."""
        began = self.now
        while self.now < began + seconds:
            self.now += 0.5
            if (found := self.look()) is not None:
                return self.now - began, found
        return None

    def train(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            started = self.ranks[0].started + 1
            self.put(started=started, sealed=started)
            assert self.wait(seconds) is None
            self.committed = started


@pytest.fixture
def node() -> Node:
    node = Node()
    node.train(4, 1.0)
    return node


def test_a_stopped_worker_is_certain_within_ten_seconds_or_steps(node: Node) -> None:
    node.put(1, state="T")
    took, hang = node.wait(100) or (0.0, None)
    assert took == 10.5  # it was first seen half a second later
    assert hang == Hang((1,), 3, 10.0, 1.0, certain=True)
    assert hang.blame(()) is hang
    assert str(hang) == "hangs at step 3: stopped by a signal for 10 s, where steps took 1 s at most"

    slow = Node()
    slow.train(3, 4.0)
    slow.put(1, state="T")
    assert slow.wait(39.5) is None
    assert slow.wait(2) is not None


def test_one_that_goes_on_in_time_starts_anew(node: Node) -> None:
    for _ in range(5):
        node.put(1, state="T")
        assert node.wait(8) is None
        node.put(1, state="S")
        assert node.wait(1) is None


@pytest.mark.parametrize("why", ["parked", "held", "done", "traced"])
def test_who_may_wait_is_left_alone(node: Node, why: str) -> None:
    """Parked and held ranks have a time of their own; a debugger's stop is nobody's hang."""
    if why == "parked":
        node.put(parked=3)
    elif why == "done":
        node.put(started=DONE)
    elif why == "traced":
        node.put(1, state="t")
    node.held = why == "held"
    if why != "traced":
        node.put(1, state="T")
    assert node.wait(3000) is None


def test_before_its_first_step_only_a_stopped_worker_hangs_and_only_after_long() -> None:
    """It may be loading, restoring or compiling; a script without job.steps is before its first step for ever."""
    assert Node().wait(5000) is None
    loading = Node()
    loading.put(1, state="T")
    took, hang = loading.wait(5000) or (0.0, None)
    assert took == 300.5
    assert str(hang) == "hangs before its first step: stopped by a signal for 300 s"
    compiling = Node()
    compiling.put(started=0)
    assert compiling.wait(5000) is None


def test_a_first_step_that_compiles_does_not_count_once_there_is_another() -> None:
    node = Node()
    node.train(1, 100.0)
    node.put(started=1)
    assert node.wait(5) is None
    assert node.watch.longest_s == 100.0
    node.train(2, 2.0)
    assert node.watch.longest_s is not None
    assert node.watch.longest_s <= 5.5


def test_steps_that_are_over_before_the_first_look_are_steps() -> None:
    node = Node()
    node.put(started=7)
    assert node.wait(299) is None
    _, hang = node.wait(2) or (0.0, None)
    assert str(hang).partition(": ")[2].partition(";")[0] == "no progress for 300 s"


def test_a_long_evaluation_is_no_hang_and_slow_steps_get_longer(node: Node) -> None:
    assert node.wait(250) is None
    node.train(3, 1.0)
    assert node.watch.longest_s == 251.0
    assert node.wait(5000) is None, "20 steps"
    assert node.wait(50) is not None
    slow = Node()
    slow.train(3, 60.0)
    assert slow.wait(1139) is None


def test_who_is_in_its_own_code_is_blamed_at_once_and_who_is_in_a_collective_later(node: Node) -> None:
    took, hang = node.wait(1000) or (0.0, None)
    assert took == 300.5
    assert hang is not None
    assert hang.ranks == (0, 1)
    assert hang.blame(()) is None
    blamed = hang.blame({1})
    assert blamed is not None
    assert blamed.ranks == (1,)
    assert "no progress for 300 s" in str(blamed)
    node.now += 0.5
    while not hang.late:
        hang = node.look() or hang
        node.now += 0.5
    assert hang.waited_s == 450.0
    late = hang.blame(())
    assert late is not None
    assert late.ranks == (0, 1), "nobody else has spoken"
    assert "local ranks 1 alike" in str(late)


def test_the_rank_that_is_behind_is_blamed_and_uninterruptible_sleep_is_its_own(node: Node) -> None:
    node.put(0, started=4)
    node.put(1, state="D")
    _, hang = node.wait(1000) or (0.0, None)
    assert hang is not None
    assert hang.ranks == (1,)
    blamed = hang.blame(())
    assert blamed is not None
    assert "no progress, in uninterruptible sleep, for" in str(blamed)


def test_who_waits_for_others_to_complete_a_snapshot_is_not_blamed_for_it(node: Node) -> None:
    """It polls in Python, and so answers; whoever has not sealed is behind, here or elsewhere."""
    node.put(started=4, sealed=4)
    node.committed = 3
    _, hang = node.wait(1000) or (0.0, None)
    assert hang is not None
    assert hang.blame({0, 1}) is None
    behind = Node()
    behind.train(4, 1.0)
    behind.put(0, started=4, sealed=4)
    _, hang = behind.wait(1000) or (0.0, None)
    assert hang is not None
    blamed = hang.blame({0, 1})
    assert blamed is not None
    assert blamed.ranks == (1,)


def test_a_worker_is_not_blamed_for_time_in_which_its_agent_stood_still(node: Node) -> None:
    node.put(1, state="T")
    assert node.wait(2) is None
    node.now += 3600.0
    assert node.look() is None
    assert node.wait(2) is None
    assert node.wait(10) is not None


def test_given_seconds_are_for_both_and_off_is_never() -> None:
    for words in ({"state": "T"}, {}):
        node = Node(Bounds.of(20.0, 10.0))
        node.train(3, 1.0)
        node.put(1, **words)
        assert node.wait(18) is None
        assert node.wait(3) is not None
    never = Node(Bounds.of(float("inf"), 10.0))
    never.train(3, 1.0)
    never.put(1, state="T")
    assert never.wait(5000) is None
    assert AUTO.still_s == 300.0
    assert Bounds.of(None, 1000.0).still_s == 1000.0


# --- what the job makes of it -------------------------------------------------------------------------------------

SIZES = ParallelConfig()
PLACES = (Participant("a", "h", 0, 1, "a:2"), Participant("b", "h", 1, 1, "b:2"))
RUNNING = Round(3, "running", Cause("start", "", 0.0), "a:1", SIZES, PLACES, ParallelConfig(dp=2))
FAILURE = Failure("b", "h", 1, 0, 77, 74, 5.0, hung="hangs at step 3: stopped by a signal for 10 s")


def decided(places: tuple[Participant, ...], max_restarts: int, phase: str = "running") -> Round:
    members = {p.node: Member(p.node, "h", f"{p.node}:1", f"{p.node}:2", 1) for p in places}
    acks = {"b": ack_from_json(to_json(Ack("b", "failed", failure=FAILURE)))}
    round_ = replace(RUNNING, participants=places)
    known = View("a:1", members, dict.fromkeys(members, 1.0), round_, acks, (), {}, since=1.0, wall=0.0)
    found = decide(known, Settings(1, 2, max_restarts, SIZES), 20.0).round
    assert found is not None
    return found


def test_a_hang_counts_as_a_failure_and_all_show_their_stacks() -> None:
    after = decided(PLACES, 1)
    assert (after.phase, after.cause.kind, after.failures, after.stop.hung) == ("gathering", "worker_hung", 1, True)
    assert after.cause.detail == "rank 1 (local rank 0, pid 77) on node b [h]: " + FAILURE.hung
    last = decided(PLACES[1:], 0)
    assert last.verdict is not None
    assert (last.phase, last.verdict.code, last.stop.hung) == ("ended", 74, True)
    gathering = replace(decided(PLACES, 0), number=4)
    members = {name: Member(name, "h", f"{name}:1", f"{name}:2", 1) for name in "ab"}
    acks = {name: Ack(name, "gathered") for name in "ab"}
    known = View("a:1", members, dict.fromkeys(members, 1.0), gathering, acks, (), {}, since=1.0, wall=0.0)
    verdict = decide(known, Settings(1, 2, 0, SIZES), 20.0).round
    assert verdict is not None
    assert verdict.verdict is not None
    assert verdict.verdict.code == 74


# --- real processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_the_state_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    for signum, state in ((signal.SIGCONT, "S"), (signal.SIGSTOP, "T")):
        os.kill(sleeper.pid, signum)
        deadline = time.monotonic() + 60
        while probe.state(sleeper.pid) != state:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    sleeper.kill()
    sleeper.wait()
    assert probe.state(sleeper.pid) == ""
