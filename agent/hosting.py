"""This node's part in hosting the run's etcd: the first server, one that it was invited to add, or none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from tenplexrun.agent.embedded import EmbeddedEtcd, Place
from tenplexrun.agent.etcd_members import Members
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.processes import Processes
from tenplexrun.agent.signals import Signals
from tenplexrun.agent.steward import Ask, Steward
from tenplexrun.channel import join_host_port, split_host_port
from tenplexrun.errors import CoordinationError, ProcessError

RETRY_S = 0.3
LEAVE_TIMEOUT_S = 40.0
URGENT_S = 10.0
"""Who was told twice to end waits no longer for the others to hear of it."""
REMOVAL_PAUSE_S = 1.0
REMOVAL_TRIES = 60
ANSWER_S, SILENCES = 2.0, 5
"""A server that is silent so often in a row hangs; a busy machine makes it late, but not that often."""


class Hosting:
    """`host`: this node's address for others. `name`: of its server, the agent's link. `growing`: whether the etcd of
    this run becomes a cluster of three once there are as many nodes. `named`: addresses and ports of --rdzv-endpoint;
    `port`: where servers elsewhere listen if they can."""

    def __init__(self, processes: Processes, node_dir: Path, events: EventLog, host: str, growing: bool) -> None:
        self.host, self.growing, self.name, self.port = host, growing, "", 0
        self.named: Mapping[str, int] = {}
        self.members: Members | None = None  # once the run's etcd is known, if it grows
        self._processes, self._node_dir, self._events = processes, node_dir, events
        self._etcd: EmbeddedEtcd | None = None
        self._voters: set[str] = set()  # names
        self._numbers = itertools.count()
        self._joining: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._silences = 0

    @property
    def active(self) -> bool:
        """A server runs here."""
        return self._etcd is not None

    @property
    def sole(self) -> bool:
        """The run's etcd ends with this node."""
        return self.active and self._voters == {self.name}

    def steward(self, ask: Ask) -> Steward | None:
        """Who looks after the run's etcd where the decider is; None if there is nothing to look after."""
        return None if self.members is None else Steward(self.members, ask, self._events, self.named)

    async def start(self, host: str, port: int) -> str:
        """Start the first server. Returns its endpoint. Raises ProcessError."""
        place = None
        if self.growing:
            port = port or free_port(host)
            place = Place(self.name, self._url(port), self._url(free_port(self.host)))
        self._etcd = await EmbeddedEtcd.start(self._processes, self._node_dir, host, port, place, self._data())
        self._voters = {self.name}
        return join_host_port(self.host, port) if self.growing else self._etcd.endpoint

    def stop(self) -> None:
        """Somebody else hosts."""
        etcd, self._etcd = self._etcd, None
        if etcd is not None:
            etcd.stop()

    async def join(self, learner: bool) -> None:
        """Add a server to the run's etcd. Goes on if whoever asked is gone. Raises ProcessError, CoordinationError."""
        if self._joining is None or self._joining.done():
            self._joining = asyncio.ensure_future(self._join(learner))
        await asyncio.shield(self._joining)

    async def _join(self, learner: bool) -> None:
        if self.members is None or self.active:
            raise ProcessError("this node hosts a server already, or the etcd of this run does not grow")
        if self._cleaning is not None:
            await self._cleaning
        port = free_port(self.host, self.named.get(self.host, self.port))
        peer = self._url(free_port(self.host))
        added = await self.members.add(peer, learner)
        try:
            others = [f"{each.name}={each.peer}" for each in await self.members.list() if each.id != added.id]
            place = Place(self.name, self._url(port), peer, tuple(others))
            data = self._data()
            self._etcd = await EmbeddedEtcd.start(self._processes, self._node_dir, self.host, port, place, data)
        except BaseException:
            with contextlib.suppress(CoordinationError):
                await self.members.remove(added.id)
            raise
        self._events.emit("etcd_hosted", endpoint=join_host_port(self.host, port), learner=learner)

    def ended(self, pid: int, code: int) -> str | None:
        """A server's process has ended. Returns why that is the end of this node, None where it is not."""
        if self._etcd is None or self._etcd.pid != pid:
            return None
        if self.sole or self.members is None:
            return f"the etcd of this node ended with {code}; start the node again"
        self._etcd = None
        self._events.emit("etcd_left", code=code)
        self._cleaning = asyncio.ensure_future(self._withdraw(self.members))
        return None

    async def _withdraw(self, members: Members) -> None:
        """Take the server that has ended off the list, so that another one is added: it never comes back."""
        for _ in range(REMOVAL_TRIES):
            with contextlib.suppress(CoordinationError):
                own = [each.id for each in await members.list() if each.name == self.name]
                for id in own:
                    await members.remove(id)
                break
            await asyncio.sleep(REMOVAL_PAUSE_S)

    async def outlast(self, others: Callable[[], Awaitable[object]], signals: Signals) -> None:
        """This node has left the run: serve until another server has taken over, or no `others` are left. Where several
        nodes host, none may miss that because another one has gone."""
        patient_until = time.monotonic() + LEAVE_TIMEOUT_S
        while self.active and await others() and time.monotonic() < patient_until:
            if signals.urgent:
                patient_until = min(patient_until, time.monotonic() + URGENT_S)
            await asyncio.sleep(RETRY_S)
        if self.active and not self.sole:
            await asyncio.sleep(3 * RETRY_S)

    async def refresh(self) -> bool:
        """Ask where the run's etcd is served now. Returns whether that has changed. Raises CoordinationError."""
        if self.members is None:
            return False
        await self._patrol()
        voters = [each for each in await self.members.list() if each.voter]
        self._voters = {each.name for each in voters}
        endpoints = tuple(sorted(each.endpoint for each in voters if each.endpoint is not None))
        if not endpoints or endpoints == self.members.etcd.endpoints:
            return False
        alone = len(endpoints) == len(self.members.etcd.endpoints) == 1
        self.members.etcd.endpoints = endpoints
        self._events.emit("etcd_served", endpoints=endpoints)
        if not alone:  # else only its name has become an address
            self._events.say(f"etcd is served at {', '.join(endpoints)}")
        return True

    async def _patrol(self) -> None:
        """End this node's server if it hangs: another one takes its place. The only one can but be waited for."""
        etcd = self._etcd
        if etcd is None or self.sole or await _answers(etcd.endpoint):
            self._silences = 0
            return
        self._silences += 1
        if self._silences >= SILENCES:
            self._silences = 0
            self._events.emit("etcd_hangs", endpoint=etcd.endpoint)
            self._processes.kill(etcd.pid)

    def _data(self) -> str:
        """A new folder for each server; those of servers before it are removed."""
        for old in self._node_dir.glob("etcd-*"):
            shutil.rmtree(old, ignore_errors=True)
        return f"etcd-{next(self._numbers)}"

    def _url(self, port: int) -> str:
        return f"http://{join_host_port(self.host, port)}"


async def _answers(endpoint: str) -> bool:
    """Whether the server there says anything: what it says may depend on others."""

    async def ask() -> bool:
        reader, writer = await asyncio.open_connection(*split_host_port(endpoint))
        try:
            writer.write(b"GET /version HTTP/1.0\r\n\r\n")
            return bool(await reader.read(1))
        finally:
            writer.close()

    try:
        return await asyncio.wait_for(ask(), ANSWER_S)
    except (OSError, asyncio.TimeoutError):
        return False


def free_port(host: str, wanted: int = 0) -> int:
    """The wanted port if nobody listens there, else one that the system assigns. Somebody may take it meanwhile."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise ProcessError(f"cannot listen at {host}")
