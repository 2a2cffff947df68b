"""Where the nodes of a run meet: an etcd that runs already, or one that a node of the run hosts."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tenplexrun.agent.etcd import PLAIN, Access, Etcd
from tenplexrun.agent.etcd_v2 import EtcdV2
from tenplexrun.agent.etcd_v3 import EtcdV3
from tenplexrun.agent.hosting import Hosting
from tenplexrun.agent.probing import served_api
from tenplexrun.channel import join_host_port, split_host_port
from tenplexrun.errors import CoordinationError, ProcessError, UsageError

LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::")
HOST_TIMEOUT_S = 60.0
SUCCESSION_S = 10.0
"""Of several named nodes each waits so long for those that are named before it."""
ETCD_TIMEOUT_S = 5.0
RETRY_S = 0.3


def own_host(endpoints: Sequence[str], local_addr: str | None) -> str:
    """The address that others reach this node by: as given, else the one that leads to an endpoint."""
    if local_addr is not None:
        _must_be_here(local_addr)
        return local_addr
    if not endpoints:
        return LOOPBACK
    for endpoint in endpoints[:-1]:
        with contextlib.suppress(CoordinationError):
            return _way_to(endpoint)
    return _way_to(endpoints[-1])


def _way_to(endpoint: str) -> str:
    host, port = split_host_port(endpoint)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only asks for the route
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise CoordinationError(f"no route to the rendezvous endpoint {endpoint}: {error}") from None
    return _outward_address() or found if _is_named_loopback(host) else found


def _must_be_here(address: str) -> None:
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise UsageError(f"--local-addr {address} is no address of this machine: {error.strerror or error}") from None


def _is_named_loopback(host: str) -> bool:
    """A machine's own name often stands for a loopback address in its own /etc/hosts; others know it by another."""
    try:
        ipaddress.ip_address(host)
        return False
    except ValueError:
        return host != "localhost" and ipaddress.ip_address(_resolve(host)).is_loopback


def _resolve(host: str) -> str:
    """IPv4 where there is a choice. Raises OSError for a name that nobody knows."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def _outward_address() -> str | None:
    """The address of this machine on its default route, if it has one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))  # for documentation only (RFC 5737), and nothing is sent
        return str(probe.getsockname()[0])
    return None


def named_ports(endpoints: Sequence[str]) -> dict[str, int]:
    """Ports of the endpoints by address, as far as their names are known here."""
    found: dict[str, int] = {}
    for host, port in map(split_host_port, endpoints):
        with contextlib.suppress(OSError):
            found.setdefault(_resolve(host), port)
    return found


def _listening_address(host: str) -> str:
    """What etcd, which knows addresses only, listens on for an endpoint of this name."""
    return ANY[0] if _is_named_loopback(host) else _resolve(host)


class Wanted(Protocol):
    """What the command line says of it."""

    @property
    def endpoints(self) -> Sequence[str]: ...
    @property
    def access(self) -> Access: ...
    @property
    def api(self) -> str | None:
        """ "v2" or "v3". None: find out."""

    @property
    def hosted(self) -> bool:
        """A node of the job hosts the etcd, else one runs there already."""

    @property
    def is_host(self) -> bool | None:
        """Whether it is this one. None: it is if the endpoint's address is its own."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The run's etcd."""

    endpoints: tuple[str, ...]
    api: str
    access: Access

    def connect(self) -> Etcd:
        return (EtcdV2 if self.api == "v2" else EtcdV3)(self.endpoints, self.access)

    def __str__(self) -> str:
        return f"{', '.join(self.endpoints)} ({self.api})"


async def find_meeting(wanted: Wanted, local_addr: str | None, hosting: Hosting) -> Meeting:
    """A living etcd for the run. Starts one where an endpoint is this node's and none lives, or none is named.

    Raises CoordinationError when nothing answers there in time.
    """
    if not wanted.hosted:
        return await find_running(wanted)

    async def host(name: str, port: int) -> Meeting:
        address, port = split_host_port(await hosting.start(_listening_address(name), port))
        endpoint = join_host_port(LOOPBACK if address in ANY else address, port)
        return Meeting((endpoint,), "v3" if hosting.growing else "v2", PLAIN)

    if not wanted.endpoints:
        return await host(local_addr or LOOPBACK, 0)
    if wanted.is_host is False:
        return await find_running(wanted, HOST_TIMEOUT_S)
    if split_host_port(wanted.endpoints[0])[1] == 0:
        return await host(split_host_port(wanted.endpoints[0])[0], 0)
    began = time.monotonic()

    async def host_if_own() -> Meeting | None:
        own = _own(wanted, local_addr)
        before = wanted.endpoints[: 0 if own is None else wanted.endpoints.index(own)]
        if own is None or time.monotonic() < began + SUCCESSION_S * len(before):
            return None
        try:
            found = await host(*split_host_port(own))
        except ProcessError:
            if await served_api(wanted.endpoints) is None:
                raise
            return None  # another agent of this machine was faster
        if before and await served_api(before) is not None:  # its turn, and it has come after all
            hosting.stop()
            return None
        return found

    return await find_running(wanted, HOST_TIMEOUT_S, host_if_own)


def _own(wanted: Wanted, local_addr: str | None) -> str | None:
    """The endpoint that this node is to host the first server at."""
    found = (endpoint for endpoint in wanted.endpoints if _is_own(split_host_port(endpoint)[0], local_addr))
    return next(found, wanted.endpoints[0] if wanted.is_host else None)


async def find_running(
    wanted: Wanted, timeout_s: float = ETCD_TIMEOUT_S, instead: Callable[[], Awaitable[Meeting | None]] | None = None
) -> Meeting:
    """An etcd that runs already, or will soon; while none does, `instead` may come up with one.

    Raises CoordinationError when nothing answers there in time.
    """
    deadline = time.monotonic() + timeout_s
    while (api := await served_api(wanted.endpoints, wanted.access)) is None:
        if instead is not None and (found := await instead()) is not None:
            return found
        if time.monotonic() > deadline:
            todo = "start it, or the node that hosts it, or correct --rdzv-endpoint"
            if wanted.hosted:
                todo += "; if the job goes on without that node, name one that hosts its etcd now (the nodes' output)"
            if not wanted.hosted and not wanted.access.tls:
                todo = "start it, or correct --rdzv-endpoint (over TLS it needs --rdzv-conf protocol=https)"
            raise CoordinationError(f"no etcd answers at {', '.join(wanted.endpoints)}; {todo}")
        await asyncio.sleep(RETRY_S)
    return Meeting(tuple(wanted.endpoints), wanted.api or api, wanted.access)


def _is_own(host: str, local_addr: str | None) -> bool:
    """Whether `host` is this node: as told by --local-addr, else an address of this machine."""
    if local_addr is not None:
        return host == local_addr
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
            return True
    except OSError:
        return False
