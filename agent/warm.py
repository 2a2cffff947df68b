"""The warm pool: a process that has torch imported and forks workers from that state, in milliseconds.

It speaks packets (see `guardian`) with the agent's `pool.Pool` over the socket whose number is its first argument; the
second one is JSON: {"preload": modules to import beside its own, "learn": whether to find more of them (see
`learning`), "cold": import nothing, and have every worker start a fresh interpreter}.

    agent -> pool  {"id", "op": "spawn", "kind", "argv", "cwd", "env"} + stdout, stderr    -> {"pid"}
                   {"id", "op": "host", "host", "port"} + listening socket                 -> {"pid": pid | null}
                   {"id", "op": "sweep"}                                                   -> {}
                   {"op": "signal", "pid", "signum"}
    pool -> agent  {"op": "ready", "seconds", "failed": {module: message}}
                   {"op": "exit", "pid", "code", "at"}
                   {"op": "learnt", "modules", "refused": {module: reason}}       (all so far)

One thread only, and no parallel operation before a fork: a child would inherit its locks and not its threads.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import importlib.util
import json
import multiprocessing.process
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence

from tenplexrun.agent import probe
from tenplexrun.agent.gloo import idle_before_destroying
from tenplexrun.agent.guardian import (
    Record,
    become_subreaper,
    cleans_up,
    die_with_parent,
    own_children,
    receive_packet,
    send_packet,
)
from tenplexrun.agent.learning import (
    Learner,
    Notes,
    NotingFinder,
    aspects,
    changed,
    unwatch_environment,
    watch_environment,
)
from tenplexrun.agent.script import Command, fresh_interpreter, run

# What every training script imports sooner or later: its first optimizer, or DDP, brings in torch._dynamo, which takes
# as long as torch itself. Anything else is learnt.
MODULES = ("numpy", "torch", "torch.distributed", "torch._dynamo")
SWEEP_DEADLINE_S = 10.0
POLL_MS = 1000

Job = Callable[[], None]


class WarmPool:
    """The pool process. A forked child leaves `serve` with its job, and so does it on an almost empty stack."""

    def __init__(self, control: socket.socket, learner: Learner, cold: bool) -> None:
        self._control, self._learner, self._cold = control, learner, cold
        self._pid = os.getpid()
        self._pidfds: dict[int, int] = {}  # by pid: workers and the TCPStore's host
        self._host: int | None = None
        self._sweeping = False
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> Job | None:
        """Obey until the agent's end is closed (None)."""
        while True:
            ready = [fd for fd, _ in self._poll.poll(0 if self._learner.accepted else POLL_MS)]
            self._harvest()
            if self._control.fileno() in ready:
                packet = receive_packet(self._control)
                if packet is None:
                    return None
                job = self._obey(*packet)
                if job is not None:
                    return job
            elif self._learner.accepted:
                if self._learner.import_one():
                    gc.freeze()
                    self.say({"op": "learnt", "modules": self._learner.learnt, "refused": self._learner.refused})
            elif self._pidfds:
                job = self._learner.step(time.monotonic(), self._fork)
                if job is not None:
                    return job

    def say(self, record: Record) -> None:
        with contextlib.suppress(OSError):  # an agent that is gone is seen at the next read
            send_packet(self._control, record)

    def _obey(self, record: Record, fds: list[int]) -> Job | None:
        op = record["op"]
        reply: Record = {}
        try:
            if op == "signal":
                if record["pid"] in self._pidfds:  # not reaped: the number is still its own
                    _send_signal(record["pid"], record["signum"])
                return None
            if op == "sweep":
                self._sweep()
            elif op == "spawn":
                notes = self._learner.new_notes()
                pid = self._fork()
                if pid == 0:
                    return lambda: work(record, fds, self._cold, notes)
                reply = {"pid": pid}
            elif "torch" in sys.modules or (self._cold and importlib.util.find_spec("torch")):
                pid = self._fork()
                if pid == 0:
                    return lambda: host_store(record, fds)
                reply = {"pid": pid}
                self._host = pid
            else:
                reply = {"pid": None}  # without torch nobody asks for its store
        except OSError as error:
            message = f"the warm pool cannot {op}: {error.strerror or error}"
            self.say({"re": record["id"], "error": {"kind": "ProcessError", "message": message}})
            return None
        finally:
            if os.getpid() == self._pid:
                for fd in fds:
                    os.close(fd)
        self.say({"re": record["id"], "ok": reply})
        return None

    def _fork(self) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of the threads that libraries started
            pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            die_with_parent(self._pid)
            os.close(self._control.detach())
            for fd in self._pidfds.values():
                os.close(fd)
            return 0
        self._pidfds[pid] = os.pidfd_open(pid)
        self._poll.register(self._pidfds[pid], select.POLLIN)
        return pid

    def _harvest(self) -> bool:
        """Reap and report all that have ended. Returns whether no child at all is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid not in self._pidfds:
                continue  # an orphan of a worker's
            self._poll.unregister(self._pidfds[pid])
            os.close(self._pidfds.pop(pid))
            code = os.waitstatus_to_exitcode(status)
            if self._learner.ended(pid, code):
                continue
            if pid != self._host:
                self.say({"op": "exit", "pid": pid, "code": code, "at": time.time()})
            elif not self._sweeping:
                print(f"tenplexrun: the round's TCPStore host ended with {code}: its workers too", file=sys.stderr)
                _kill(self._pidfds)

    def _sweep(self) -> None:
        """Kill and reap all; those that clean up after the killed are let go on, and end by themselves."""
        begin, pause = time.monotonic(), 0.0005
        self._sweeping = True
        self._learner.forget()
        try:
            _kill(self._pidfds)
            while not self._harvest():
                if time.monotonic() > begin + SWEEP_DEADLINE_S:
                    stuck = ", ".join(map(str, sorted(own_children())))
                    raise TimeoutError(f"{stuck} outlived SIGKILL by {SWEEP_DEADLINE_S:.0f} s (uninterruptible sleep?)")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
                # Orphans come to us when their parents have gone.
                left = self._pidfds or [pid for pid in own_children() if not cleans_up(pid)]
                if not left:
                    return
                _kill(left)
        finally:
            self._sweeping = False


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        _send_signal(pid, signal.SIGKILL)


def _send_signal(pid: int, signum: int) -> None:
    with contextlib.suppress(OSError):  # gone, or a program that has changed its user
        os.kill(pid, signum)


def work(record: Record, fds: Sequence[int], cold: bool, notes: Notes | None) -> None:
    """In a forked worker: become what a fresh interpreter would be, and run the script."""
    for target, fd in enumerate(fds, start=1):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(record["env"])
    command = Command(record["kind"], tuple(record["argv"]), record["cwd"])
    if cold:
        command = fresh_interpreter(command)
    try:
        os.chdir(command.cwd)
    except OSError as error:
        sys.exit(f"tenplexrun: cannot change to the directory {command.cwd!r}: {error.strerror}")
    if command.kind != "program" and "TENPLEX_CONTROL" in os.environ:
        probe.prepare(os.environ["TENPLEX_CONTROL"], os.getpid())
    multiprocessing.process.ORIGINAL_DIR = command.cwd  # type: ignore[attr-defined]
    # Global generators would be the same in every fork; fresh ones never are. (`random` sees to itself.)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
        sys.modules["torch"].set_num_threads(_num_threads(record["env"].get("OMP_NUM_THREADS", "")))
    if "torch.distributed.distributed_c10d" in sys.modules:
        idle_before_destroying(sys.modules["torch.distributed.distributed_c10d"], sys.modules["torch.distributed"])
    if notes is not None:
        sys.meta_path.insert(0, NotingFinder(notes))
    run(command)


def _num_threads(wanted: str) -> int:
    """OpenMP reads OMP_NUM_THREADS (nesting levels separated by commas) once, long before the fork."""
    first = wanted.partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else len(os.sched_getaffinity(0))


def host_store(record: Record, fds: Sequence[int]) -> None:
    """In a forked process: serve a round's TCPStore on the socket that listens already, until killed."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        record["host"],
        record["port"],
        is_master=True,
        timeout=datetime.timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=fds[0],
    )
    while store is not None:
        signal.pause()


def main() -> None:
    start = time.monotonic()
    become_subreaper()
    control = socket.socket(fileno=int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    failed = {} if options["cold"] else import_all(options["preload"], options)
    control.set_inheritable(False)
    learner = Learner(options["learn"] and not options["cold"], refused=options.get("refused", {}))
    pool = WarmPool(control, learner, options["cold"])
    pool.say({"op": "ready", "seconds": time.monotonic() - start, "failed": failed, "refused": learner.refused})
    job = pool.serve()
    del pool
    if job is None:
        os._exit(0)  # the guardian sees to what is left
    job()


def import_all(preload: Sequence[str], options: Record) -> dict[str, str]:
    """Import our modules, then the given ones. Returns what could not be imported, with the reasons.

    One that leaves behind what a fork must not inherit is refused, and everything begun anew without it.
    """
    gc.disable()  # a sixth of the time, and nothing to be found
    failed = _import(MODULES)
    if preload:
        watch_environment()
        before = aspects()
        for name in preload:
            failed.update(_import([name]))
            reason = changed(before, aspects())
            if reason is not None:
                rest = [other for other in preload if other != name]
                options = {**options, "preload": rest, "refused": {**options.get("refused", {}), name: reason}}
                os.execv(sys.executable, [*sys.orig_argv[:-1], json.dumps(options)])
        unwatch_environment()
    gc.enable()
    gc.freeze()  # children then don't copy these pages when they collect; to collect first would take 0.3 s
    return failed


def _import(names: Iterable[str]) -> dict[str, str]:
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # the script itself may do without, or will show it properly
            failed[name] = f"{type(error).__name__}: {error}"
    return failed
