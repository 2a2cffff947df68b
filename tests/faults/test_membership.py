"""Nodes come and go: who is in a round, what its ranks are told, and when the job waits, ends or goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, descendants
from gpt import GPT

ONE = ["--nproc-per-node=1", "--max-restarts=5", "--rdzv-conf=last_call_timeout=0"]
SUMS = """\
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = "TENPLEX_ROUND WORLD_SIZE MASTER_ADDR MASTER_PORT RANK".split()
print("SUM", int(total), *[os.environ[name] for name in names], flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""
WAITS = "import os, time\nprint('UP', os.environ['TENPLEX_ROUND'], flush=True)\ntime.sleep(1000)\n"


def script(folder: Path, text: str) -> list[str]:
    path = folder / "train.py"
    path.write_text(text)
    return [str(path)]


def end(cluster: Cluster, node: str) -> None:
    cluster.agents[node].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in cluster.agents} == {130}


def running(cluster: Cluster, number: int) -> list[str]:
    """Nodes of a round, once all of them have started their workers."""

    def started() -> list[str] | None:
        rounds = [e for e in cluster.events(kind="round") if (e["number"], e["phase"]) == (number, "running")]
        spawned = {e["node"] for e in cluster.events(kind="spawned") if e["round"] == number}
        return list(rounds[0]["nodes"]) if rounds and spawned >= set(rounds[0]["nodes"]) else None

    return list(cluster.wait(started, f"round {number}"))


# --- L2, L3, L4: nodes are lost and found -------------------------------------------------------------------------


def test_all_ranks_of_a_round_are_told_one_address_from_1_to_2_to_3_to_2_nodes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The node that is lost hosts rank 0, and so the address: another one takes over."""
    command = script(tmp_path, SUMS)

    def sums(number: int, world: int) -> set[str]:
        """Where all ranks of the round have met."""

        def found() -> set[str] | None:
            lines = [line.split("SUM ")[1].split() for name in "abc" for line in _log(cluster, name) if "SUM " in line]
            of_round = [line for line in lines if line[1] == str(number)]
            ranks = {line[5] for line in of_round if line[0] == line[2] == str(world)}
            return {" ".join(line[3:5]) for line in of_round} if len(ranks) == world else None

        return set(cluster.wait(found, f"the sum of {world} ranks in round {number}"))

    cluster.start("a", "127.0.0.1", ["--nnodes=1:3", "--node-rank=2", *ONE], command)
    met = [sums(0, 1)]
    cluster.start("b", "127.0.0.2", ["--nnodes=1:3", "--node-rank=1", *ONE], command)
    met.append(sums(1, 2))
    cluster.start("c", "127.0.0.3", ["--nnodes=1:3", "--node-rank=0", *ONE], command)
    met.append(sums(2, 3))
    cluster.kill_node("c")
    met.append(sums(3, 2))
    assert [len(places) for places in met] == [1, 1, 1, 1]
    assert [place.split()[0] for places in met for place in places] == [f"127.0.0.{n}" for n in (1, 2, 3, 2)]
    assert len(set.union(*met)) == 4, "each round has a port of its own"
    end(cluster, "a")


def _log(cluster: Cluster, name: str) -> list[str]:
    path = cluster.out / f"{name}.log"
    return cluster.log(name).splitlines() if path.exists() else []


@pytest.mark.slow
def test_too_few_nodes_wait_with_a_printed_deadline_and_end_with_72(cluster: Cluster, tmp_path: Path) -> None:
    command = script(tmp_path, WAITS)
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-conf=join_timeout=40"]
    cluster.start("a", "127.0.0.1", flags, command)
    cluster.start("b", "127.0.0.2", flags, command)
    running(cluster, 0)
    cluster.kill_node("b")
    assert cluster.exit_code("a") == 72
    assert "1 node with 1 workers here, too few" in cluster.log("a")
    assert " s left" in cluster.log("a")


# --- L5: a node leaves and comes back -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [1.0, 60.0])
def test_a_node_that_was_told_to_leave_may_come_back(cluster: Cluster, tmp_path: Path, away_s: float) -> None:
    command = script(tmp_path, WAITS)
    flags = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-conf=last_call_timeout=20"]
    cluster.start("a", "127.0.0.1", flags, command)
    cluster.start("b", "127.0.0.2", flags, command)
    assert len(running(cluster, 0)) == 2
    cluster.agents["b"].send_signal(signal.SIGTERM)
    assert cluster.agents.pop("b").wait(cluster.patience_s) == 128 + signal.SIGTERM
    assert len(running(cluster, 1)) == 1
    time.sleep(away_s)
    cluster.start("b", "127.0.0.2", flags, command)
    assert len(running(cluster, 2)) == 2
    end(cluster, "a")


# --- L19, L23: one node too many ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_spare_is_parked_anew_in_each_of_five_rounds_and_steps_in_after_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    command = script(tmp_path, WAITS)
    cluster.start("a", "127.0.0.1", ["--nnodes=2:2", *ONE], command)
    cluster.start("b", "127.0.0.2", ["--nnodes=2:2", *ONE], command)
    members = running(cluster, 0)
    cluster.start("c", "127.0.0.3", ["--nnodes=2:2", *ONE], command)
    spare = cluster.event("c", "joined")["node"]
    for number in range(1, 6):
        cluster.kill_worker("ab"[number % 2], 0)
        assert sorted(running(cluster, number)) == sorted(members)
        assert cluster.agents["c"].poll() is None
    cluster.kill_node("b")
    assert spare in running(cluster, 6)
    end(cluster, "a")


# --- L26: a worker that even SIGKILL does not end -----------------------------------------------------------------

FROZEN = """\
import os, stat, sys
import pyfuse3, trio
class Frozen(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_size = inode, 4096
        entry.st_mode = stat.S_IFDIR | 0o755 if inode == pyfuse3.ROOT_INODE else stat.S_IFREG | 0o644
        return entry
    async def lookup(self, parent, name, ctx=None):
        return await self.getattr(pyfuse3.ROOT_INODE + 1)
    async def open(self, inode, flags, ctx):
        return pyfuse3.FileInfo(fh=inode, direct_io=True)
    async def read(self, fh, offset, size):
        await trio.sleep_forever()
pyfuse3.init(Frozen(), sys.argv[1], pyfuse3.default_options)
print("serving", flush=True)
trio.run(pyfuse3.main)
"""


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A file whose readers wait for ever: in uninterruptible sleep once they have been killed."""
    pytest.importorskip("pyfuse3")
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("no FUSE here")
    mount = tmp_path / "mount"
    mount.mkdir()
    server = subprocess.Popen([sys.executable, "-c", FROZEN, str(mount)], stdout=subprocess.PIPE, cwd="/")
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"serving\n"
        yield mount / "file"
    finally:
        server.kill()  # which lets its readers go
        server.communicate()
        subprocess.run(["umount", "-l", str(mount)], check=False)


@pytest.mark.slow
def test_a_node_with_a_worker_that_does_not_die_leaves_and_the_others_go_on(
    cluster: Cluster, tmp_path: Path, frozen: Path
) -> None:
    text = (
        f"import os\nif os.environ['RANK'] == '1':\n    print('READS', flush=True)\n    open({str(frozen)!r}).read()\n"
    )
    flags = ["--nnodes=1:2", "--nproc-per-node=1", "--shutdown-timeout=1", "--max-restarts=1"]
    flags.append("--rdzv-conf=last_call_timeout=20")
    command = script(tmp_path, text + WAITS)
    cluster.start("a", "127.0.0.1", [*flags, "--node-rank=0"], command)
    cluster.start("b", "127.0.0.2", [*flags, "--node-rank=1"], command)
    cluster.wait(lambda: "READS" in cluster.log("b"), "a reader")
    assert len(running(cluster, 0)) == 2
    leaver = cluster.agents.pop("b")
    cluster.kill_worker("a", 0)
    assert running(cluster, 1) == [cluster.event("a", "joined")["node"]]
    assert leaver.wait(cluster.patience_s) == 73
    assert "this node is bad and leaves the job" in cluster.log("b")
    end(cluster, "a")


# --- liveness -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_whose_guardian_was_killed_leaves_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Its workers have died with the guardian: a loss of the node, which costs no restart."""
    command = script(tmp_path, WAITS)
    flags = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-conf=last_call_timeout=20"]
    cluster.start("a", "127.0.0.1", flags, command)
    cluster.start("b", "127.0.0.2", flags, command)
    running(cluster, 0)
    leaver = cluster.agents.pop("b")
    [guardian] = [pid for pid in descendants(leaver.pid) if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(guardian, signal.SIGKILL)
    assert leaver.wait(cluster.patience_s) == 73
    assert len(running(cluster, 1)) == 1
    end(cluster, "a")


SOAK_MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))


@pytest.mark.slow
@pytest.mark.timeout(60 * SOAK_MINUTES + 600)
def test_no_false_alarm_under_full_load(cluster: Cluster) -> None:
    """Two busy loops a core beside two nodes that train, for SOAK_MINUTES (10)."""
    flags = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=0"]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        cluster.start("a", "127.0.0.1", flags, GPT)
        cluster.start("b", "127.0.0.2", flags, GPT)
        cluster.wait_round(0, 2)
        until = time.monotonic() + 60 * SOAK_MINUTES
        while time.monotonic() < until:
            cluster.progress(1)
            time.sleep(1)
        alarms = ("fenced", "lease_lost", "agent_gone", "worker_failed", "worker_hung", "process_ended", "store_away")
        assert [event for event in cluster.events() if event["event"] in alarms] == []
        assert {event["number"] for event in cluster.events(kind="round")} == {0}, "no node was lost"
    finally:
        for process in busy:
            process.kill()
            process.wait()
    end(cluster, "a")


def test_a_node_with_other_flags_is_refused_in_one_line_and_the_job_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(300)")
    (tmp_path / "other.py").write_text("import time; time.sleep(301)")
    flags = ["--nnodes=1:3", "--nproc-per-node=2", "--tp=2", "--cold-start"]
    cluster.start("a", "127.0.0.1", flags, [str(tmp_path / "train.py")])
    cluster.workers("a")
    wrong = ["--nnodes=1:3", "--nproc-per-node=2", "--state-files=1M", "--cold-start"]
    cluster.start("b", "127.0.0.2", wrong, [str(tmp_path / "train.py")])
    assert cluster.agents.pop("b").wait(cluster.patience_s) == 2
    line = cluster.log("b").splitlines()[-1]
    assert "this node [127.0.0.2] and on 127.0.0.1" in line
    assert "--state-files is 1048576 here, 0 there, --tp is 1 here, 2 there; give all nodes the same" in line
    cluster.start("c", "127.0.0.3", flags, [str(tmp_path / "other.py")])
    cluster.wait(lambda: any(e["round"] == 1 for e in cluster.events("c", "spawned")), "workers on c")
    assert re.search(r"not the same on this node .*: the script is \S+/other.py here, \S+/train.py", cluster.log("c"))
    assert not any(event["round"] == 2 for event in cluster.events("a", "spawned"))
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in cluster.agents} == {130}
