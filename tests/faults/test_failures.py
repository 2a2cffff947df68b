"""Who failed first, who fell with it, and what the others still got to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster import BIN, Cluster, descendants

from tenplexrun.agent.sweep import sweep

SAVES = """\
import os, signal, sys, time
def save(signum, frame):
    print("SAVING on", signal.Signals(signum).name, flush=True)
    time.sleep(float(os.environ.get("SAVE_S", "1")))
    print("SAVED", flush=True)
    sys.exit(0)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(signum, save)
print("UP", os.environ["RANK"], flush=True)
"""


def script(folder: Path, text: str) -> list[str]:
    path = folder / "train.py"
    path.write_text(text)
    return [str(path)]


def until(cluster: Cluster, node: str, *words: str) -> None:
    """Wait until the node's output has all these words."""
    cluster.wait(lambda: all(word in cluster.log(node) for word in words), f"{words} in the output of {node}")


def end(cluster: Cluster, *nodes: str) -> set[int]:
    return {cluster.exit_code(node) for node in nodes}


# --- L1: nothing of an old round is met in a new one --------------------------------------------------------------

RESTARTS = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
dist.barrier()
print("SUM", int(total), "PORT", os.environ["MASTER_PORT"], "COUNT", os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
"""


def _restart_once(folder: Path) -> None:
    command = [str(BIN / "tenplexrun"), "--nproc-per-node=2", "--max-restarts=1", *script(folder, RESTARTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"SUM 2 PORT \d+ COUNT 1", done.stdout)) == 2
    assert "exit code 3" in done.stderr


def test_each_round_has_a_store_of_its_own(tmp_path: Path) -> None:
    _restart_once(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_each_round_has_a_store_of_its_own_twenty_times(tmp_path: Path) -> None:
    for _ in range(20):
        _restart_once(tmp_path)


# --- L6, L22: one verdict everywhere ------------------------------------------------------------------------------


def test_the_same_verdict_on_all_nodes_and_the_victims_by_name(cluster: Cluster, tmp_path: Path) -> None:
    command = script(
        tmp_path,
        SAVES + "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    if os.environ['RANK'] == '2':\n"
        "        time.sleep(0.5)\n"
        "        raise RuntimeError('the disk is on fire')\n"
        "    if os.environ['RANK'] == '1':\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    time.sleep(300)\n"
        "main()\n",
    )
    error = tmp_path / "error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error)}
    cluster.start("a", "127.0.0.1", ["--nnodes=2", "--nproc-per-node=2", "--node-rank=0"], command, env)
    cluster.start("b", "127.0.0.2", ["--nnodes=2", "--nproc-per-node=1", "--node-rank=1"], command)
    assert end(cluster, "a", "b") == {1}
    for node in ("a", "b"):
        verdict = cluster.log(node).partition("ended with exit code 1: ")[2]
        assert re.search(r"first failure at \d\d:\d\d:\d\d\.\d{3}: rank 2 \(local rank 0, pid \d+\) on node", verdict)
        assert "its error file: RuntimeError: the disk is on fire" in verdict
        assert verdict.count("raise RuntimeError('the disk is on fire')") == 1, "stderr or error file, not both"
    victims = next(line for line in cluster.log("a").splitlines() if "its victims here" in line)
    assert "rank 1 (signal" in victims
    assert "stopped by us" in victims
    assert "SAVED" in cluster.log("a"), "rank 0 runs handlers, so it got its grace"
    record = json.loads(error.read_text())["message"]
    assert (record["message"], record["errorCode"]) == ("RuntimeError: the disk is on fire", 1)


def test_a_crash_in_native_code_is_named_and_who_cannot_hear_is_killed_at_once(tmp_path: Path) -> None:
    """Rank 0 waits for ever in a collective and has a handler, which therefore never runs: no grace is wasted on it."""
    text = SAVES + (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "if os.environ['RANK'] == '2':\n"
        "    time.sleep(300)\n"
        "dist.recv(torch.ones(1), src=2)\n"
    )
    command = [str(BIN / "tenplexrun"), "--nproc-per-node=3", "--shutdown-timeout=100", *script(tmp_path, text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 128 + signal.SIGSEGV
    assert re.search(r"rank 1 .*: signal 11 \(SIGSEGV\)", done.stderr)
    assert "rank 0 (signal 9 (SIGKILL), stopped by us)" in done.stderr
    assert re.findall(r"\[(\d)\]: SAVED", done.stdout) == ["2"]
    assert "Traceback" not in done.stderr


# --- L8: one count for the whole job, on unequal nodes ------------------------------------------------------------


def test_restart_counts_are_equal_on_unequal_nodes(cluster: Cluster, tmp_path: Path) -> None:
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE "
        "TORCHELASTIC_RESTART_COUNT TENPLEX_ROUND MASTER_PORT"
    )
    command = script(
        tmp_path,
        "import os, time\n"
        f"print('ENV', *[os.environ[name] for name in '{names}'.split()], flush=True)\n"
        "if os.environ['RANK'] == '3' and os.environ['TORCHELASTIC_RESTART_COUNT'] < '2':\n"
        "    time.sleep(1)\n"
        "    os._exit(7)\n",
    )
    flags = ["--nnodes=2", "--max-restarts=2", "--rdzv-conf=last_call_timeout=20", "--cold-start"]
    cluster.start("a", "127.0.0.1", [*flags, "--nproc-per-node=1", "--node-rank=0", "--role=chief"], command)
    cluster.start("b", "127.0.0.2", [*flags, "--nproc-per-node=3", "--node-rank=1", "--role=hand"], command)
    assert end(cluster, "a", "b") == {0}
    found = sorted(
        line.split("ENV ")[1].split() for node in "ab" for line in cluster.log(node).splitlines() if "ENV " in line
    )
    expected = []
    for count in ("0", "1", "2"):
        expected.append(["0", "0", "4", "1", "0", "2", "chief", "0", "1", count, count])
        expected += [[str(n + 1), str(n), "4", "3", "1", "2", "hand", str(n), "3", count, count] for n in range(3)]
    assert [line[:-1] for line in found] == sorted(expected)
    ports = {(line[-2], line[-1]) for line in found}
    assert len(ports) == 3, "all ranks of a round were told the same port"


# --- L13, L14: signals and grace ----------------------------------------------------------------------------------


def test_grace_on_a_resize_and_signals_that_are_passed_on(cluster: Cluster, tmp_path: Path) -> None:
    command = script(
        tmp_path,
        SAVES + "signal.signal(signal.SIGUSR1, lambda *_: print('GOT', os.environ['RANK'], flush=True))\n"
        "if os.environ['RANK'] == '1': signal.signal(signal.SIGUSR1, signal.SIG_DFL)\n"
        "print('READY', os.environ['TENPLEX_TP'], os.environ['RANK'], flush=True)\n"
        "while True: time.sleep(0.1)\n",
    )
    cluster.start("a", "127.0.0.1", ["--nproc-per-node=2", "--shutdown-timeout=100"], command)
    until(cluster, "a", "READY 1 0", "READY 1 1")
    cluster.agents["a"].send_signal(signal.SIGUSR1)
    until(cluster, "a", "GOT 0", "passed on to the 1 of 2 workers")
    assert cluster.ctl("resize", "--tp=2").returncode == 0
    until(cluster, "a", "READY 2 0", "READY 2 1")
    assert cluster.log("a").count("SAVED") == 2
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert cluster.exit_code("a") == 130
    assert cluster.log("a").count("SAVING on SIGINT") == cluster.log("a").count("SAVED") - 2 == 2


def test_a_pre_emption_signal_that_is_listed_drains_and_reaches_the_workers(cluster: Cluster, tmp_path: Path) -> None:
    command = script(tmp_path, SAVES + "while True: time.sleep(0.1)\n")
    cluster.start("a", "127.0.0.1", ["--signals-to-handle=SIGTERM,SIGUSR1", "--shutdown-timeout=100"], command)
    until(cluster, "a", "UP 0")
    cluster.agents["a"].send_signal(signal.SIGUSR1)
    assert cluster.exit_code("a") == 128 + signal.SIGUSR1
    assert "SAVING on SIGUSR1" in cluster.log("a")
    assert "SAVED" in cluster.log("a")


def test_a_second_signal_ends_all_nodes_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Also where it came to the node that hosts the store, which leaves after the others have heard of it."""
    command = script(tmp_path, SAVES + "while True: time.sleep(0.1)\n")
    env = {**os.environ, "SAVE_S": "1000"}
    for node, address in (("a", "127.0.0.1"), ("b", "127.0.0.2")):
        cluster.start(node, address, ["--nnodes=2", "--shutdown-timeout=900", "--cold-start"], command, env)
    until(cluster, "a", "UP")
    until(cluster, "b", "UP")
    cluster.agents["a"].send_signal(signal.SIGTERM)
    until(cluster, "a", "SAVING")
    until(cluster, "b", "SAVING")
    cluster.agents["a"].send_signal(signal.SIGTERM)
    assert end(cluster, "a", "b") == {128 + signal.SIGTERM}
    assert "the coordination store" not in cluster.log("b")


@pytest.mark.slow
def test_nodes_that_are_told_to_leave_together_leave_in_one_change(cluster: Cluster, tmp_path: Path) -> None:
    command = script(tmp_path, SAVES + "while True: time.sleep(0.1)\n")
    for number, node in enumerate("abc", 1):
        cluster.start(node, f"127.0.0.{number}", ["--nnodes=1:3", "--rdzv-conf=last_call_timeout=60"], command)
    for node in "abc":
        until(cluster, node, "UP")
    for node in "bc":
        cluster.agents[node].send_signal(signal.SIGTERM)
    assert end(cluster, "b", "c") == {128 + signal.SIGTERM}
    cluster.wait(lambda: cluster.log("a").count("UP") == 2, "the round of the node that stays")
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert cluster.exit_code("a") == 130
    formed = [event for event in cluster.events(kind="round") if event["phase"] == "running"]
    assert [len(event["nodes"]) for event in formed] == [3, 1]


def test_a_signal_before_the_job_has_begun(cluster: Cluster, tmp_path: Path) -> None:
    """Nobody else ever comes: it ends while it waits for them."""
    cluster.start("a", "127.0.0.1", ["--nnodes=2", "--cold-start"], script(tmp_path, ""))
    until(cluster, "a", "etcd at")
    cluster.agents["a"].send_signal(signal.SIGTERM)
    assert cluster.exit_code("a") == 128 + signal.SIGTERM
    assert "Traceback" not in cluster.log("a")


# --- nothing is orphaned ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_workers_have_started_is_found_when_agent_and_guardian_are_killed_at_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A daemon of a worker is nobody's child then, and no forked interpreter: the next start ends it."""
    command = script(
        tmp_path,
        "import subprocess, time\n"
        "daemon = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('DAEMON', daemon.pid, flush=True)\n"
        "time.sleep(1000)\n",
    )
    cluster.start("a", "127.0.0.1", [], command)
    until(cluster, "a", "DAEMON")
    daemon = Path("/proc") / re.findall(r"DAEMON (\d+)", cluster.log("a"))[0]
    agent = cluster.agents.pop("a")
    [guardian] = [pid for pid in descendants(agent.pid) if "guardian.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(agent.pid, signal.SIGSTOP)  # so that neither sees the other's end
    os.kill(guardian, signal.SIGKILL)
    agent.kill()
    agent.wait()
    assert "sleep" in (daemon / "cmdline").read_text()
    sweep()
    deadline = time.monotonic() + 60
    while daemon.exists() and (daemon / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- suspected hangs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [[], pytest.param(["--cold-start"], marks=pytest.mark.slow)], ids=["warm", "cold"])
def test_who_does_not_stop_in_time_is_shown_where_it_stands(how: list[str], cluster: Cluster, tmp_path: Path) -> None:
    command = script(
        tmp_path,
        "import signal, time\n"
        "def stubborn():\n"
        "    print('UP', flush=True)\n"
        "    while True: time.sleep(0.1)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('NO', flush=True))\n"
        "stubborn()\n",
    )
    cluster.start("a", "127.0.0.1", ["--shutdown-timeout=1", *how], command)
    until(cluster, "a", "UP")
    cluster.agents["a"].send_signal(signal.SIGTERM)
    assert cluster.exit_code("a") == 128 + signal.SIGTERM
    log = cluster.log("a")
    assert "still here 1 s after being told to stop: the stacks of local ranks 0 follow" in log
    assert "in stubborn" in log or "stubborn (" in log, "as faulthandler says it, and py-spy"


@pytest.mark.slow
def test_a_rank_that_never_parks_is_shown_and_the_others_go_on(cluster: Cluster, tmp_path: Path) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes(bytes(4096))
    command = script(
        tmp_path,
        "import time, torch, tenplexrun\n"
        "job = tenplexrun.init()\n"
        "def never():\n"
        "    print('STUCK', flush=True)\n"
        "    while job.round == 0: time.sleep(0.1)\n"
        "model = torch.nn.Linear(4, 4)\n"
        "job.state(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))\n"
        f"loader = job.loader('bytes:{data}?sample_bytes=8', global_batch=4, micro_batch=1)\n"
        "for step, batch in job.steps(loader, until=10**6):\n"
        "    if step == 3 and job.rank == 1: never()\n"
        "    time.sleep(0.01)\n",
    )
    cluster.start("a", "127.0.0.1", ["--nproc-per-node=2", "--shutdown-timeout=1"], command)
    until(cluster, "a", "STUCK")
    assert cluster.ctl("resize", "--tp=2").returncode == 0
    cluster.wait_round(1, 1)
    log = cluster.log("a")
    assert "workers did not reach a step boundary within 31 s" in log
    assert "a suspected hang: the stacks of local ranks 0, 1 follow" in log
    assert "in never" in log
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert cluster.exit_code("a") == 130
