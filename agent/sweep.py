"""The node directory in shared memory, and the sweep of what dead agents left behind.

A guardian removes its node's directory. Only where it was killed together with its agent is there anything to sweep:
the directory, mounts below it, and processes that had set themselves apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

from tenplexrun.agent.guardian import mounts_below, remove_node_dir, unmount
from tenplexrun.agent.processes import NODE_DIR_VARIABLE
from tenplexrun.errors import ProcessError

SHARED_MEMORY = Path("/dev/shm")
RECORD = "agent.json"
NEW_DIR_GRACE_S = 60.0
_NAME = re.compile(r"tenplexrun-[0-9a-f]{8}")


def make_node_dir(node: str, root: Path = SHARED_MEMORY) -> Path:
    """Make `root`/tenplexrun-<first 8 hex of the node's id>, mode 0700, and record this process as its agent in it.

    Raises ProcessError when shared memory can't be written.
    """
    directory = root / f"tenplexrun-{node[:8]}"
    record = {"pid": os.getpid(), "start": _start_time(os.getpid()), "pid_namespace": _pid_namespace(), "node": node}
    try:
        directory.mkdir(mode=0o700)
        (directory / RECORD).write_text(json.dumps(record))
    except OSError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise ProcessError(
            f"cannot make the node directory {directory}: {error.strerror}; make room or give access there"
        ) from error
    return directory


def sweep(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what dead agents of this user left below `root`. Returns the directories that were removed.

    Never touches what may belong to a living agent, or to one in a container of its own (another PID namespace).
    """
    removed = []
    for directory in sorted(root.glob("tenplexrun-*")):
        if _NAME.fullmatch(directory.name) and _is_left_behind(directory):
            for point in mounts_below(str(directory)):
                unmount(point)
            _kill_leftovers(directory)
            remove_node_dir(str(directory))
            removed.append(directory)
    return removed


def _is_left_behind(directory: Path) -> bool:
    try:
        status = directory.lstat()
        if status.st_uid != os.getuid() or directory.is_symlink():
            return False
        record = json.loads((directory / RECORD).read_bytes())
        if record["pid_namespace"] != _pid_namespace():
            return False
        return bool(_start_time(int(record["pid"])) != record["start"])
    except (OSError, ValueError, KeyError, TypeError):  # being made just now, or killed while it was
        return directory.exists() and time.time() - directory.lstat().st_mtime > NEW_DIR_GRACE_S


def _start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since boot (field 22 of /proc/PID/stat). None for a zombie or no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _kill_leftovers(directory: Path) -> None:
    """SIGKILL what still runs of that node: our own users' processes that were started with its directory in their
    environment and have no terminal (nobody has copied the variables into a shell)."""
    entry = f"{NODE_DIR_VARIABLE}={directory}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        process = Path("/proc") / name
        with contextlib.suppress(OSError):
            if process.stat().st_uid != os.getuid() or entry not in (process / "environ").read_bytes().split(b"\0"):
                continue
            terminal = int((process / "stat").read_bytes().rpartition(b")")[2].split()[4])
            if terminal == 0:
                os.kill(int(name), signal.SIGKILL)
