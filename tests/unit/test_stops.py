"""How workers are stopped: what the decider and the node's machine say, and the probe that tells who still hears."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tenplexrun.agent import error_file, probe
from tenplexrun.agent.workers import End, victims
from tenplexrun.core.lifecycle import (
    Action,
    Exit,
    Gather,
    Lifecycle,
    RoundSeen,
    StandBy,
    StartRound,
    Stopped,
    StopWorkers,
    WorkersEnded,
)
from tenplexrun.core.membership import Settings, View, decide
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Ack, Cause, Failure, Member, Participant, Request, Round, Stop, Verdict
from tenplexrun.ports import WorkerExit

SIZES = ParallelConfig()
PLACES = (Participant("a", "h", 0, 1, "a:2"), Participant("b", "h", 1, 1, "b:2"))
RUNNING = Round(3, "running", Cause("start", "", 0.0), "a:1", SIZES, PLACES, ParallelConfig(dp=2))
FAILURE = Failure("b", "h", 1, 0, 77, -11, 5.0)


def view(round_: Round, acks: dict[str, Ack], *requests: Request) -> View:
    members = {name: Member(name, "h", f"{name}:1", f"{name}:2", 1) for name in "ab"}
    seen = dict.fromkeys(members, 10.0)
    return View("a:1", members, seen, round_, acks, requests, {}, since=10.0, wall=0.0)


def follow(*rounds: Round) -> list[Action]:
    """What node a does that has started the first of these rounds."""
    machine = Lifecycle("a")
    assert isinstance(machine.on(RoundSeen(rounds[0]))[0], StartRound)
    return [action for round_ in rounds[1:] for action in machine.on(RoundSeen(round_))]


def test_of_failures_reported_together_the_oldest_is_the_first_whatever_the_clocks_say() -> None:
    """The node with the earlier time of day has its clock ahead or behind: nobody knows."""
    early = replace(FAILURE, node="a", rank=0, at=1.0, age_s=0.010)
    late = replace(FAILURE, at=9.0, age_s=0.200)
    acks = {"a": Ack("a", "failed", failure=early), "b": Ack("b", "failed", failure=late)}
    decided = decide(view(RUNNING, acks), Settings(1, 2, 0, SIZES), 20.0).round
    assert decided is not None
    assert decided.first_failure == late
    assert decided.cause.detail == late.describe()


def test_the_signal_of_a_person_reaches_the_workers() -> None:
    end = Request("x", "end", code=130, detail="ended by SIGINT", signum=signal.SIGINT)
    ended = decide(view(replace(RUNNING, first_failure=FAILURE), {}, end), Settings(1, 2, 0, SIZES), 20.0).round
    assert ended is not None
    assert follow(RUNNING, ended) == [StopWorkers(3, "terminate", signal.SIGINT)], "no failure of old: a planned stop"
    drain = Request("b", "drain", node="b", code=138, detail="SIGUSR1", signum=signal.SIGUSR1)
    leaving = decide(view(RUNNING, {}, drain), Settings(1, 2, 0, SIZES), 20.0).round
    assert leaving is not None
    assert (leaving.stop.mode, leaving.stop.signum) == ("boundary", signal.SIGUSR1)
    assert leaving.stop.now() == Stop("now", signum=signal.SIGUSR1)


def test_a_boundary_that_is_not_reached_is_a_suspected_hang() -> None:
    waiting = replace(RUNNING, number=4, phase="gathering", stop=Stop("boundary", hold=5, committed=True))
    late = decide(view(waiting, {}), Settings(1, 2, 0, SIZES, park_timeout_s=31.0), 41.0).round
    assert late is not None
    assert late.stop.hung
    assert follow(RUNNING, late) == [StopWorkers(3, "rescue", signal.SIGTERM, hung=True)]


def test_a_stop_is_said_once_and_only_ever_gets_harder() -> None:
    failed = replace(RUNNING, number=4, phase="gathering", cause=Cause("worker_failed", "", 0.0), stop=Stop("now"))
    again = replace(failed, decider="b:1")
    assert follow(RUNNING, failed, again) == [StopWorkers(3, "rescue")]
    planned = replace(failed, cause=Cause("resize", "", 0.0))
    assert follow(RUNNING, planned, failed) == [StopWorkers(3, "terminate"), StopWorkers(3, "rescue")]
    machine = Lifecycle("a")
    ended = replace(RUNNING, phase="ended", verdict=Verdict(1, "", FAILURE))
    machine.on(RoundSeen(RUNNING))
    assert machine.on(RoundSeen(ended)) == [StopWorkers(3, "rescue")]
    assert machine.on(RoundSeen(replace(ended, decider="b:1"))) == [], "not before the workers have gone"
    assert isinstance(machine.on(Stopped(3))[0], Exit)


def test_a_node_that_a_round_runs_without_says_so_once_a_round() -> None:
    machine, saved, later = Lifecycle("c"), replace(RUNNING, saved=9), replace(RUNNING, number=4)
    assert machine.on(RoundSeen(RUNNING)) == [StandBy(RUNNING)]
    assert machine.on(RoundSeen(saved)) == []
    assert machine.on(RoundSeen(later)) == [StandBy(later)]


def test_workers_that_finish_as_they_are_told_to_stop() -> None:
    """Their last word may come before the stop has begun; nothing is left of it, here or for a later round."""
    ended = replace(RUNNING, phase="ended", verdict=Verdict(143, ""))
    machine = Lifecycle("a")
    machine.on(RoundSeen(RUNNING))
    assert machine.on(RoundSeen(ended)) == [StopWorkers(3, "terminate")]
    assert machine.on(WorkersEnded(3, None, None)) == [Exit(ended)]
    assert machine.on(Stopped(3)) == []
    planned = replace(RUNNING, number=4, phase="gathering", cause=Cause("resize", "", 0.0))
    machine = Lifecycle("a")
    machine.on(RoundSeen(RUNNING))
    assert machine.on(RoundSeen(planned)) == [StopWorkers(3, "terminate")]
    assert machine.on(WorkersEnded(3, None, None)) == [Gather(4)]
    assert machine.on(Stopped(3)) == []
    machine.on(RoundSeen(replace(RUNNING, number=4)))
    again = replace(planned, number=5)
    assert machine.on(RoundSeen(again)) == [StopWorkers(4, "terminate")]


def test_victims_are_grouped_and_the_first_one_is_none() -> None:
    def end(local_rank: int, code: int, told: bool) -> End:
        return End(local_rank, WorkerExit(100 + local_rank, code, 5.0), told)

    ends = [end(1, -11, False), end(0, 1, False), end(2, -15, True), end(3, -15, True), end(4, 0, True)]
    text = victims(ends, 8, replace(FAILURE, node="a", rank=9), "a")
    assert text == "rank 8 (exit code 1, of its own, after it); rank 10, 11 (signal 15 (SIGTERM), stopped by us)"
    assert victims([end(0, -11, False)], 1, FAILURE, "b") == ""


PREPARED = """\
import os, signal, sys, time
from pathlib import Path
from tenplexrun.agent import probe
probe.prepare(sys.argv[1], os.getpid())
if "catch" in sys.argv: signal.signal(signal.SIGTERM, lambda *_: None)
if "native" in sys.argv:
    import ctypes
    print("up", flush=True)
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    native.pthread_mutex_lock(mutex), native.pthread_mutex_lock(mutex)  # no signal interrupts it
print("up", flush=True)
def waits(): time.sleep(100)
waits()
"""


def test_who_answers_and_where_the_others_stand(tmp_path: Path) -> None:
    """One that runs its handlers, one that is held in native code, one that has none, one that is no Python of ours."""
    control = tmp_path / "control"
    argv = [sys.executable, "-c", PREPARED, str(control)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": "/"}
    commands = [[*argv, "catch"], [*argv, "catch", "native"], argv, ["sh", "-c", "trap : TERM; echo up; read line"]]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, **pipes) for command in commands]  # type: ignore[call-overload]
    try:
        for process in processes:
            assert process.stdout.readline() == "up\n"
        free, held, plain, shell = (process.pid for process in processes)
        while "futex" not in Path(f"/proc/{held}/wchan").read_text():
            time.sleep(0.01)  # it has said "up" and is not yet held
        for _ in range(100):  # on a busy machine a good worker may miss its 200 ms; a bad one never answers
            found = asyncio.run(probe.responsive([free, held, plain, shell], control, os.kill))
            assert not found & {held, plain}
            if found == {free, shell}:
                break
        assert found == {free, shell}
        assert list(tmp_path.iterdir()) == []
        told = asyncio.run(probe.dump_stacks([free, held, shell], os.kill))
        assert str(shell) in told or told == ""
        for process, words in zip(processes, ("in waits", "most recent call first"), strict=False):
            assert any(words in line for line in iter(process.stderr.readline, ""))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert probe.catches(free, signal.SIGTERM) is False, "it has ended"


def test_py_spy_shows_interpreters_that_are_not_ours(capfd: pytest.CaptureFixture[str]) -> None:
    """A cold worker, and one below a shell; and it is said of whom there is nothing to show."""
    text = "import time\ndef deep(): print('up', flush=True); time.sleep(100)\ndeep()"
    commands = [[sys.executable, "-c", text], ["sh", "-c", f'{sys.executable} -c "$0"; true', text], ["sleep", "100"]]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for command in commands]
    try:
        for process in processes[:2]:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        told = asyncio.run(probe.dump_stacks([process.pid for process in processes], os.kill))
        assert told.startswith(f"no stacks of {processes[2].pid}: py-spy: ")
        assert "\n" not in told
        assert capfd.readouterr().err.count("deep (<string>:2)") == 2
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_a_traceback_is_told_once_also_where_torch_has_put_the_rank_in_front() -> None:
    record = {
        "message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback:\n  f()\nValueError: bad"}}
    }
    failure = replace(FAILURE, stderr=("[rank1]:   f()", "[rank1]: ValueError: bad"), error=record)
    assert "\n".join(error_file.describe(failure)).count("f()") == 1
    assert "\n".join(error_file.describe(replace(failure, stderr=("other",)))).count("f()") == 1


def test_error_files_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "error.json"
    assert error_file.make(path) == str(path)
    assert error_file.read(path) is None
    for text in ("", "[1]", "{"):
        path.write_text(text)
        assert error_file.read(path) is None
    path.write_text('{"message": "plain words"}')
    failure = replace(FAILURE, error=error_file.read(path), stderr=("last", "words"))
    lines = error_file.describe(failure)
    assert "its error file: plain words" in lines
    assert lines[-2:] == ["  last", "  words"]
    out = tmp_path / "out.json"
    error_file.hand_on(failure, {"TORCHELASTIC_ERROR_FILE": str(out)})
    assert '"plain words"' in out.read_text()
    error_file.hand_on(failure, {"TORCHELASTIC_ERROR_FILE": str(tmp_path)})
    path.write_text('{"message": {"message": "' + "x" * 100_000 + '"}}')
    found = error_file.read(path)
    assert found is not None
    assert len(found["message"]) <= error_file.MAX_BYTES
    error_file.make(path)
    assert not path.exists()
