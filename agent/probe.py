"""Does a worker still run its signal handlers, and where does it stand? Two signals that workers are prepared for.

PROBE is answered by Python code of the main thread, as the script's own handlers are: no answer means that it is held
in native code (a collective whose peer has gone), and would not hear of its end either. DUMP makes faulthandler write
the stacks of all threads to stderr; that works in native code, too. Processes that have exec'ed are not prepared: of
those py-spy shows the stacks, where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

PROBE, DUMP = signal.SIGRTMAX - 2, signal.SIGRTMAX - 1
ANSWER_S = 0.2
DUMP_S = 0.5  # for the output to come through the pipe
PY_SPY_TIMEOUT_S = 10.0
POLL_S = 0.002

Send = Callable[[int, int], None]  # pid, signal


def answer_path(control: str | Path, pid: int) -> Path:
    """The file whose appearance is the answer of the worker `pid`."""
    return Path(f"{control}.answer-{pid}")


def prepare(control: str, pid: int) -> None:
    """In a worker, in its main thread: install both handlers."""
    signal.signal(PROBE, functools.partial(_answer, answer_path(control, pid)))
    faulthandler.register(DUMP, file=2, all_threads=True, chain=False)


def _answer(path: Path, signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # the agent has gone
        path.touch()


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for this signal. False for a process that has ended."""
    return bool(_status(pid, "SigCgt:", 16) >> (signum - 1) & 1)


def state(pid: int) -> str:
    """As in /proc/PID/stat: "T" if a signal has stopped it, "D" in uninterruptible sleep; "t" if it is traced, whatever
    it does; "" if it is gone."""
    if _status(pid, "TracerPid:", 10):
        return "t"
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _status(pid: int, field: str, base: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1], base)
    return 0


async def responsive(pids: Collection[int], control: Path, send: Send) -> set[int]:
    """Those that would act on SIGTERM by a handler: they answer within 200 ms, or cannot be asked (exec'ed)."""
    catching = {pid for pid in pids if catches(pid, signal.SIGTERM)}
    asked = {pid for pid in catching if catches(pid, PROBE)}
    return catching - asked | await answering(asked, control, send)


async def answering(pids: Collection[int], control: Path, send: Send) -> set[int]:
    """Those whose main thread runs Python code, as far as they can be asked: they answer within 200 ms."""
    asked, found = {pid for pid in pids if catches(pid, PROBE)}, set[int]()
    try:
        for pid in asked:
            send(pid, PROBE)
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        while asked - found and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
            found |= {pid for pid in asked if answer_path(control, pid).exists()}
        return found
    finally:
        for pid in asked:
            answer_path(control, pid).unlink(missing_ok=True)


async def dump_stacks(pids: Collection[int], send: Send) -> str:
    """Have every worker's stacks written to its stderr, or to ours where py-spy has to look. Returns what could not be
    done, "" if nothing. Stopped workers go on: they hear of it only so."""
    prepared = {pid for pid in pids if catches(pid, DUMP)}
    for pid in prepared:
        send(pid, DUMP)
        if state(pid) == "T":
            send(pid, signal.SIGCONT)
    silent = sorted(set(pids) - prepared)
    py_spy = shutil.which("py-spy", path=os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)]))
    if py_spy is None:
        told = f"no stacks of {', '.join(map(str, silent))}: no Python of ours; install py-spy to see them"
        told = told if silent else ""
    else:
        reasons = await asyncio.gather(*(_spy(py_spy, pid) for pid in silent))
        told = "; ".join(f"no stacks of {pid}: {why}" for pid, why in zip(silent, reasons, strict=True) if why)
    await asyncio.sleep(DUMP_S)
    return told


async def _spy(py_spy: str, pid: int) -> str:
    """Show where a process stands, or the interpreters that it has started. Returns why not, "" if that went well."""
    argv = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PY_SPY_TIMEOUT_S)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return f"py-spy was not done in {PY_SPY_TIMEOUT_S:g} s"
    if process.returncode == 0:
        sys.stderr.write(out.decode(errors="replace"))
        sys.stderr.flush()
        return ""
    below = await asyncio.gather(*(_spy(py_spy, child) for child in _children(pid)))
    return "" if "" in below else f"py-spy: {err.decode(errors='replace').strip().partition(chr(10))[0]}"


def _children(pid: int) -> list[int]:
    """Of any process. (/proc/*/children is not in every kernel.)"""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _status(int(entry.name), "PPid:", 10) == pid]
