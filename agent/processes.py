"""Starts and ends the processes of a node through the guardian, so that none outlives the agent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenplexrun.agent import guardian
from tenplexrun.agent.guardian import Record
from tenplexrun.agent.packets import Packets, packet_pair
from tenplexrun.errors import ProcessError

GUARDIAN = "guardian"
NODE_DIR_VARIABLE = "TENPLEX_NODE_DIR"  # in the environment of every process of a node: the sweep knows them by it
END_TIMEOUT_S = guardian.KILL_DEADLINE_S + 5

# Without the working directory on sys.path, where a folder of the user's could shadow the package (what `python -P`
# does from 3.11 on), and with nothing left to restore when a forked worker unwinds through it (as `runpy` would).
_RUN_MAIN = """\
import sys
if sys.path and sys.path[0] == "": del sys.path[0]
import importlib
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """A process of the node has ended. `code` as in `subprocess`: -N is death by signal N."""

    pid: int
    name: str
    code: int


def module_command(module: str, *args: str, unbuffered: bool = False) -> list[str]:
    """argv that calls `main()` of a module of this interpreter's environment, whatever lies in the working directory.

    `args` are its sys.argv[1:]. PYTHONPATH, site and the interpreter's own flags (-X, -W, ...) stay as they are.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *(["-u"] if unbuffered else []), "-c", _RUN_MAIN, module, *args]


class Processes:
    """The agent's view of its guardian. Exits are put on `exits`, the guardian's own one (name "guardian") too;
    after that everything is dead and nothing can be started any more."""

    def __init__(
        self, sock: socket.socket, process: subprocess.Popen[bytes], node_dir: Path, spare: frozenset[int]
    ) -> None:
        self.exits: asyncio.Queue[ProcessExit] = asyncio.Queue()
        self._process, self._node_dir, self._spare = process, node_dir, spare
        self._packets = Packets(sock, "the guardian", self._on_notice, lambda: None)
        self._pidfd = os.pidfd_open(process.pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._guardian_ended)

    @classmethod
    async def start(cls, node_dir: Path) -> Processes:
        """Start the guardian of `node_dir`, which it removes at the end. This process becomes a subreaper."""
        spare = frozenset(guardian.own_children())
        guardian.become_subreaper()
        here, there = packet_pair()
        own_pidfd = os.pidfd_open(os.getpid())
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(there.fileno()), str(own_pidfd), str(node_dir)],
                pass_fds=(there.fileno(), own_pidfd),
                start_new_session=True,  # out of reach of what is sent to the agent's process group
                env={**os.environ, NODE_DIR_VARIABLE: str(node_dir)},
                cwd="/",
            )
        except OSError as error:
            raise ProcessError(f"cannot start the guardian with {sys.executable}: {error}") from error
        finally:
            os.close(own_pidfd)
            there.close()
        return cls(here, process, node_dir, spare)

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        fds: Mapping[int, int] | None = None,
        env: Mapping[str, str | None] | None = None,
        cwd: str | None = None,
    ) -> int:
        """Start a process and return its pid. `fds`: number there -> descriptor here (0-2 are ours if not given).
        `env`: what differs from our environment, None removes. Raises ProcessError if it can't be started."""
        fds = fds or {}
        reply = await self._packets.request(
            "spawn",
            fds=list(fds.values()),
            name=name,
            argv=list(argv),
            env=dict(env or {}),
            cwd=cwd or _here(),
            targets=list(fds),
        )
        return int(reply["pid"])

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal; nothing happens if the process has ended (a reused pid is never hit)."""
        self._packets.notify("kill", pid=pid, signum=int(signum))

    def set_cleanup(self, removals: Sequence[Record], mounts: Sequence[str] = ()) -> None:
        """What the guardian does at the end beside killing all and removing the node directory with what is mounted
        below it: removing the member key (see `guardian.remove_key`), mounts elsewhere to detach."""
        self._packets.notify("cleanup", removals=list(removals), mounts=list(mounts))

    async def close(self) -> None:
        """Have everything killed and cleaned up. Returns when it is done."""
        self._packets.notify("end")
        try:
            await asyncio.wait_for(self._ended.wait(), END_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._process.kill()  # it hangs in the kernel; then we are the reaper
            await self._ended.wait()
        guardian.remove_node_dir(str(self._node_dir))  # the guardian's task, unless it was killed

    def _on_notice(self, record: Record) -> None:
        if record["op"] == "exit":
            self.exits.put_nowait(ProcessExit(record["pid"], record["name"], record["code"]))

    def _guardian_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._packets.drain()
        self._packets.close()
        guardian.kill_children(self._spare)
        self.exits.put_nowait(ProcessExit(self._process.pid, GUARDIAN, code))
        self._ended.set()


def _here() -> str:
    """The directory that paths on the command line are relative to; it may have been deleted meanwhile."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
