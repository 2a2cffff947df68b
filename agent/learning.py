"""Learning what a script imports late, so that the next fork has it already.

A worker notes what it imports in memory that it shares with the pool. Once that is quiet, a *trial* (a fork of the
pool that is thrown away) imports it first: a module that starts threads, opens sockets or devices, reads the variables
of a rank, prints, or changes what a script can see is refused, and workers go on importing it themselves. Only what
lies in site-packages is learnt (and our own), never the user's tree.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import mmap
import os
import re
import signal
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NOTES_BYTES = 512 << 10
QUIET_S = 1.5  # a script that has imported nothing for that long is past its imports
TRIAL_TIMEOUT_S = 120.0
MAX_REFUSALS = 16  # then whoever wrote these modules does not want to be preloaded
RANK_VARIABLE = re.compile(r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TENPLEX_.*")
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # wherever it is installed
_LENGTH = struct.Struct("q")


class Notes:
    """Lines that one process writes and others read, in anonymous shared memory: no descriptor, and kept when the
    writer is killed. What does not fit is left out."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NOTES_BYTES)
        self._lock = threading.Lock()

    def write(self, *words: str) -> None:
        line = "\t".join(words).encode(errors="replace") + b"\n"
        with self._lock:
            end = self.num_bytes + len(line)
            if _LENGTH.size + end <= NOTES_BYTES:
                self._memory[_LENGTH.size + end - len(line) : _LENGTH.size + end] = line
                _LENGTH.pack_into(self._memory, 0, end)

    @property
    def num_bytes(self) -> int:
        return int(_LENGTH.unpack_from(self._memory)[0])

    def read(self) -> list[list[str]]:
        text = self._memory[_LENGTH.size : _LENGTH.size + self.num_bytes].decode(errors="replace")
        return [line.split("\t") for line in text.splitlines()]


class NotingFinder:
    """First on `sys.meta_path` of a worker: notes what the others find, and where. Children of the worker note
    nothing."""

    def __init__(self, notes: Notes) -> None:
        self._notes, self._pid = notes, os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # `importlib.util.find_spec` only asks whether a module is there
        if os.getpid() != self._pid or sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.origin is not None and "\t" not in name + spec.origin:
                    self._notes.write(name, spec.origin)
                return spec
        return None


def folders(*names: str) -> tuple[str, ...]:
    """Of this interpreter's installation, as they are named and as they really are."""
    paths = [sysconfig.get_paths()[name] for name in names]
    return tuple(sorted({path + os.sep for path in (*paths, *map(os.path.realpath, paths))}))


def wanted(noted: Sequence[Sequence[str]], refused: Mapping[str, str]) -> list[str]:
    """Names noted, in order, that this process lacks and would find at the very place where the worker found them."""
    site, names = (*folders("purelib", "platlib"), OURS), dict[str, None]()
    for name, origin in noted:
        parent = name.rpartition(".")[0]
        if name in sys.modules or name in names or not origin.startswith(site):
            continue
        if any(name == no or name.startswith(no + ".") for no in refused):
            continue
        if parent in names:
            names[name] = None  # found when its parent has been imported
        elif not parent or parent in sys.modules:
            try:
                spec = importlib.util.find_spec(name)
            except Exception:
                continue
            if spec is not None and spec.origin == origin:
                names[name] = None
    return list(names)


# --- what an import may not change --------------------------------------------------------------------------------


class _Watched(type(os.environ)):  # type: ignore[misc]
    """`os.environ` of a trial: remembers whether variables of a rank were asked for."""

    asked: set[str] = set()  # noqa: RUF012 (one environment a process)

    def __getitem__(self, name: str) -> str:
        self._ask(name)
        return str(super().__getitem__(name))

    def __contains__(self, name: object) -> bool:
        self._ask(str(name))
        return name in self.keys()

    def keys(self) -> Any:
        return {self.decodekey(key): None for key in self._data}.keys()

    def _ask(self, name: str) -> None:
        if RANK_VARIABLE.fullmatch(name):
            self.asked.add(name)


def aspects() -> dict[str, object]:
    """What of this process must be the same after an import, by what to say when it is not."""
    links = [_link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    known = (*folders("purelib", "platlib", "stdlib", "platstdlib"), OURS)
    files = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    foreign = {name for name, file in files if isinstance(file, str) and os.path.isabs(file)}
    foreign -= {name for name, file in files if isinstance(file, str) and file.startswith(known)}
    return {
        "starts threads": len(os.listdir("/proc/self/task")),
        "opens sockets": sum(link.startswith("socket:") for link in links),
        "opens devices": sorted(link for link in links if link.startswith("/dev/nvidia")),
        "reads the variables of a rank": sorted(_Watched.asked),
        "changes the environment": dict(os.environ._data),  # type: ignore[attr-defined]
        "prints": [os.fstat(fd).st_size for fd in (1, 2)],
        "handles signals": [str(signal.getsignal(signum)) for signum in sorted(signal.valid_signals())],
        "sets a hook of sys": [sys.excepthook, sys.displayhook, sys.unraisablehook],
        "sets up logging": list(logging.getLogger().handlers),
        "changes the directory": os.getcwd(),
        "imports modules of a user": foreign - {"__main__", "__mp_main__"},
    }


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    return next((what for what in before if before[what] != after[what]), None)


_Plain = type(os.environ)


def watch_environment() -> None:
    os.environ.__class__ = _Watched


def unwatch_environment() -> None:
    os.environ.__class__ = _Plain


def trial(names: Sequence[str], notes: Notes) -> None:
    """In a fork that is thrown away: import them, up to the first that is refused."""
    os.nice(10)
    output = os.memfd_create("output")
    for fd in (1, 2):
        os.dup2(output, fd)
    watch_environment()
    before = aspects()
    for name in names:
        if name in sys.modules:  # by another one
            continue
        notes.write("try", name)
        try:
            importlib.import_module(name)
            reason = changed(before, aspects())
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".replace("\n", " ").replace("\t", " ")
        notes.write(*(("ok", name) if reason is None else ("no", name, reason)))
        if reason is not None:
            break
    os._exit(0)


# --- the pool's side ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Learner:
    """Decides what to try and what to import. `step` is called by the pool when it has nothing else to do."""

    enabled: bool = True
    learnt: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)
    """Tried, and to be imported by the pool itself."""
    _notes: list[Notes] = field(default_factory=list)
    _seen: tuple[int, float] = (0, 0.0)  # bytes noted, since when
    _done: int = 0  # bytes noted of which nothing is left to learn
    _trial: tuple[int, Notes, float] | None = None  # pid, what it says, until when

    def new_notes(self) -> Notes | None:
        """For a worker that is to be forked."""
        if not self.enabled:
            return None
        self._notes.append(Notes())
        return self._notes[-1]

    def step(self, now: float, fork: Callable[[], int]) -> Callable[[], None] | None:
        """Start a trial if there is something to try. Returns what a forked trial has to do, in that child."""
        if self._trial is not None:
            pid, notes, deadline = self._trial
            if now > deadline:
                self._conclude(notes, "takes too long")
                self._trial = (pid, Notes(), math.inf)
                os.kill(pid, signal.SIGKILL)
            return None
        num_bytes = sum(notes.num_bytes for notes in self._notes)
        if num_bytes != self._seen[0]:
            self._seen = (num_bytes, now)
        if num_bytes == self._done or now < self._seen[1] + QUIET_S or self.accepted:
            return None
        names = wanted([line for notes in self._notes for line in notes.read()], self.refused)
        if not names or len(self.refused) >= MAX_REFUSALS:
            self._done = num_bytes
            return None
        notes = Notes()
        pid = fork()
        if pid == 0:
            return lambda: trial(names, notes)
        self._trial = (pid, notes, now + TRIAL_TIMEOUT_S)
        return None

    def forget(self) -> None:
        """The workers of a round have gone. What they noted is kept until it has been learnt."""
        if self._done == sum(notes.num_bytes for notes in self._notes):
            self._notes, self._done = [], 0

    def ended(self, pid: int, code: int) -> bool:
        """A child has ended. Returns whether it was the trial. One that was swept away is made again."""
        if self._trial is None or self._trial[0] != pid:
            return False
        notes, self._trial = self._trial[1], None
        if code != -signal.SIGKILL:
            self._conclude(notes, "ends the process")
        return True

    def import_one(self) -> bool:
        """Import the next accepted module. Returns whether that was the last one."""
        name = self.accepted.pop(0)
        try:
            importlib.import_module(name)
            self.learnt.append(name)
        except Exception as error:
            self.refused[name] = f"{type(error).__name__}: {error}"
        return not self.accepted

    def _conclude(self, notes: Notes, otherwise: str) -> None:
        for name, (verdict, *reason) in {name: (verdict, *rest) for verdict, name, *rest in notes.read()}.items():
            if verdict == "ok":
                self.accepted.append(name)
            else:
                self.refused[name] = reason[0] if reason else otherwise
