"""The agent's client of the warm pool process. Implements `tenplexrun.ports.WorkerPool`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from tenplexrun.agent.guardian import Record
from tenplexrun.agent.packets import Packets, packet_pair
from tenplexrun.agent.processes import Processes, module_command
from tenplexrun.agent.script import Command, substitute_local_rank
from tenplexrun.errors import ProcessError
from tenplexrun.ports import WorkerExit, WorkerSpec

NAME = "warm pool"
SWEEP_TIMEOUT_S = 20.0  # the pool itself gives up after 10
# One thread while it imports, or the pool would have several and its forks none of them; workers set their own number.
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
BACKLOG = 4096


class Pool:
    """Forks workers that run `command` (what it is at the time of the fork). A pool process that dies takes its workers
    along and is started again.

    Requests before its imports are done wait for them by themselves.
    """

    def __init__(
        self,
        processes: Processes,
        command: Command,
        preload: Sequence[str] = (),
        cold: bool = False,
        on_learnt: Callable[[Sequence[str], Mapping[str, str]], None] | None = None,
    ) -> None:
        """`preload`: modules to import beside torch; `cold`: import none, workers are fresh interpreters.

        `on_learnt(modules, refused)` is told what scripts import late and the pool has imported since, or refuses to,
        with the reason; None: don't learn.
        """
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._ready = False
        self._settled = asyncio.Event()  # ready, or dead
        self.failed_imports: dict[str, str] = {}
        self._processes, self.command = processes, command
        self._preload, self._cold, self._on_learnt = list(preload), cold, on_learnt
        self._packets: Packets | None = None
        self._pid = 0
        self._listener: socket.socket | None = None
        self._pids: set[int] = set()  # forked and not yet reported as ended
        self._spawning = 0
        self._held_back: list[WorkerExit] = []  # exits while `spawn` runs: its caller does not know the pids yet
        self._restart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process; it imports while we go on. Raises ProcessError."""
        here, there = packet_pair()
        packets = Packets(here, "the warm pool", self._on_notice, self._on_end)
        try:
            options = {"preload": self._preload, "cold": self._cold, "learn": self._on_learnt is not None}
            argv = module_command("tenplexrun.agent.warm", "3", json.dumps(options), unbuffered=True)
            self._pid = await self._processes.spawn(
                NAME, argv, {3: there.fileno()}, env=SINGLE_THREADED, cwd=self.command.cwd
            )
        except BaseException:
            packets.close()
            raise
        finally:
            there.close()
        self._packets = packets

    async def ready(self) -> None:
        """Return when the process has all its imports done. Raises ProcessError if it dies over them."""
        await self._settled.wait()
        await self._alive()

    async def listen(self, host: str) -> int:
        """Bind and listen on a port of the system's choice, for the next round's TCPStore. Returns the port."""
        self._drop_listener()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ProcessError(f"cannot listen on {host or 'any address'} for the round's TCPStore: {error}") from error
        return int(self._listener.getsockname()[1])

    async def spawn(self, workers: Sequence[WorkerSpec], host_store: bool) -> list[int]:
        """Fork one process each, in order, and return pids. Their exits come on `exits` after the caller has them.

        Raises ProcessError when the pool can't fork or has died; what was forked is then the sweep's.
        """
        packets = await self._alive()
        self._spawning += 1
        try:
            if host_store:
                await self._host_store(packets)
            replies = await asyncio.gather(*(self._fork(packets, worker) for worker in workers))
            pids = [int(reply["pid"]) for reply in replies]
            self._pids.update(pids)
            return pids
        finally:
            self._spawning -= 1
            asyncio.get_running_loop().call_soon(self._release_exits)

    def signal(self, pid: int, signum: int) -> None:
        """Signal a worker; nothing happens if it has ended (a reused pid is never hit)."""
        if self._packets is not None:
            self._packets.notify("signal", pid=pid, signum=int(signum))

    async def sweep(self) -> None:
        """Kill and reap everything that an ended round left: workers, the TCPStore's host, orphans.

        Raises ProcessError naming the pids that do not even die of SIGKILL. A pool that does not answer is killed, and
        its workers with it; another one is started. The socket of a `listen` for the next round stays.
        """
        if self._packets is not None and not self._packets.closed:
            try:
                limit_s = SWEEP_TIMEOUT_S if self._ready else None  # imports take what they take
                await asyncio.wait_for(self._packets.request("sweep"), limit_s)
            except asyncio.TimeoutError:
                self._processes.kill(self._pid)

    async def close(self) -> None:
        """End the pool process and all its workers."""
        self._drop_listener()
        if self._restart is not None:
            self._restart.cancel()
        if self._packets is not None and not self._packets.closed:
            if self._ready:
                with contextlib.suppress(ProcessError):
                    await self.sweep()
            else:  # it has no workers yet
                self._processes.kill(self._pid)
            self._packets.close()

    async def _alive(self) -> Packets:
        if self._restart is not None:
            await self._restart
        if self._packets is None or self._packets.closed:
            raise ProcessError("the warm pool has died and could not be started again; see its output above")
        return self._packets

    async def _host_store(self, packets: Packets) -> None:
        if self._listener is None:
            raise ProcessError("no socket for the round's TCPStore: listen() comes first")
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        await packets.request("host", fds=[self._listener.fileno()], host=host, port=port)
        self._drop_listener()

    async def _fork(self, packets: Packets, worker: WorkerSpec) -> Record:
        return await packets.request(
            "spawn",
            fds=[worker.stdout_fd, worker.stderr_fd],
            kind=self.command.kind,
            argv=substitute_local_rank(self.command.argv, worker.local_rank),
            cwd=self.command.cwd,
            env=dict(worker.env),
        )

    def _drop_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _on_notice(self, record: Record) -> None:
        if record["op"] == "ready":
            self.failed_imports = {**record["failed"], **record["refused"]}
            self._ready = True
            self._settled.set()
        elif record["op"] == "learnt" and self._on_learnt is not None:
            self._preload += [name for name in record["modules"] if name not in self._preload]  # if it has to restart
            self._on_learnt(record["modules"], record["refused"])
        elif record["op"] == "exit":
            self._held_back.append(WorkerExit(record["pid"], record["code"], record["at"]))
            self._release_exits()

    def _release_exits(self) -> None:
        if self._spawning == 0:
            for exit_ in self._held_back:
                self._pids.discard(exit_.pid)
                self.exits.put_nowait(exit_)
            self._held_back.clear()

    def _on_end(self) -> None:
        told = {exit_.pid for exit_ in self._held_back}
        died = sorted(self._pids - told)  # with it (PDEATHSIG), unseen
        self._held_back += [WorkerExit(pid, -signal.SIGKILL, time.time()) for pid in died]
        self._release_exits()
        if not self._ready:  # nor would it the next time
            self._settled.set()
        else:
            self._ready = False
            self._settled.clear()
            self._restart = asyncio.ensure_future(self._start_again())

    async def _start_again(self) -> None:
        try:
            await self.start()
        except ProcessError:  # whoever waits for it tells
            self._settled.set()
