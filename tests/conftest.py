"""What all tests share: several nodes on this machine, and the proof that a test leaves nothing behind."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from hypothesis import settings
from properties import examples
from scratch import PREFIX

from tenplexrun.agent.sweep import sweep

settings.register_profile("tenplexrun", examples())
settings.load_profile("tenplexrun")
MARK = "TENPLEXRUN_TEST_MARK"  # inherited by whatever a test starts
SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 20.0


def _started_here() -> set[str]:
    """Living processes, other than this one, that were started by this test run."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                zombie = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
                if not zombie and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(f"process {entry.name}: {(entry / 'cmdline').read_bytes()[:100]!r}")
            except OSError:
                continue
    return found


def _node_dirs() -> set[str]:
    """Node directories of dead agents, what is mounted there, and folders of this run's tests."""
    found = {f"directory {folder}" for folder in SHARED_MEMORY.glob(f"{PREFIX}*")}
    for folder in SHARED_MEMORY.glob("tenplexrun-*/agent.json"):
        try:
            pid = json.loads(folder.read_bytes())["pid"]
        except (OSError, ValueError):
            continue
        if not Path(f"/proc/{pid}").exists():
            found.add(f"directory {folder.parent}")
    mounts = Path("/proc/mounts").read_text().splitlines()
    return found | {f"mount {line}" for line in mounts for folder in found if folder.split()[1] in line}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test after which a process, node directory (shared memory) or mount is there that was not before.
    A listening port belongs to a process, and so is covered."""
    os.environ[MARK] = str(os.getpid())
    before = _started_here() | _node_dirs()
    yield
    deadline = time.monotonic() + SETTLE_S
    while left := (_started_here() | _node_dirs()) - before:
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(sorted(left)))
        time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A job's nodes on loopback addresses; what still runs at the end is killed."""
    with Cluster(tmp_path / "cluster", patience_s=150.0) as nodes:
        yield nodes
    sweep()  # what the next start would do after a node that was killed as a whole
