"""Where and how long nodes meet: torchrun's --rdzv-* and --master-* flags, checked."""

from __future__ import annotations

import argparse
import math
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tenplexrun.agent.etcd import PLAIN, Access
from tenplexrun.channel import join_host_port
from tenplexrun.core.hang import Bounds
from tenplexrun.errors import UsageError

HOSTED, RUNNING = ("static", "c10d"), ("etcd", "etcd-v2", "etcd-v3")
APIS = {"etcd-v2": "v2", "etcd-v3": "v3"}
C10D_PORT, STATIC_PORT, ETCD_PORT = 29400, 29500, 2379


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds, in the order in which they may run out (checked): a lease, a hang, a rendezvous; a stop has its own.

    `hang_s`: inf: hangs are not looked for; None: by the length of the steps.
    """

    lease_s: float = 5.0
    join_window_s: float = 3.0
    grace_s: float = 30.0
    rendezvous_s: float = 600.0
    hang_s: float | None = None

    def __post_init__(self) -> None:
        given = (self.lease_s, self.join_window_s, self.grace_s, self.rendezvous_s, self.hang_s or 0.0)
        if any(math.isnan(seconds) for seconds in given):
            raise UsageError("a time-out that is not a number (nan) never runs out; give seconds")
        if not 2 <= self.lease_s <= self.rendezvous_s:
            raise UsageError(
                f"lease of {self.lease_s:g} s and join_timeout of {self.rendezvous_s:g} s are in the wrong order; "
                f"need 2 <= lease <= join_timeout (--rdzv-conf)"
            )
        if min(self.join_window_s, self.grace_s) < 0:
            raise UsageError("last_call_timeout and --shutdown-timeout cannot be negative")
        if self.hang_s is not None and self.hang_s < self.unreachable_s:
            raise UsageError(
                f"--hang-timeout {self.hang_s:g}: workers may wait {self.unreachable_s:g} s for a silent node without "
                f"a hang; name at least 2 * lease = {self.unreachable_s:g}, or a shorter --rdzv-conf lease=SECONDS"
            )

    @property
    def unreachable_s(self) -> float:
        """For how long a member may be without a link to the decider."""
        return 2 * self.lease_s

    @property
    def hangs(self) -> Bounds:
        return Bounds.of(self.hang_s, self.unreachable_s)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the nodes meet. `endpoints`: HOST:PORT of each server, none for a private etcd. `hosted`: nodes of the job
    host the etcd; `is_host` says whether this one does, None: find out by the address. `api`: v2 or v3, None:
    find out what is served."""

    endpoints: tuple[str, ...]
    hosted: bool
    is_host: bool | None = None
    api: str | None = None
    access: Access = PLAIN


def find_meeting(args: argparse.Namespace, max_nodes: int, conf: Mapping[str, str]) -> Meeting:
    backend, endpoint = args.rdzv_backend, args.rdzv_endpoint
    if backend not in HOSTED + RUNNING:
        raise UsageError(
            f"--rdzv-backend {backend!r}: plug-ins of torchrun are not loaded; use {', '.join(HOSTED + RUNNING)}"
        )
    if args.standalone:
        return Meeting((), True)
    hosted = backend in HOSTED
    is_host = _boolean("is_host", conf["is_host"]) if hosted and "is_host" in conf else None
    if backend == "static" and not endpoint and (args.master_port is not None or max_nodes > 1):
        endpoint = join_host_port(args.master_addr.strip("[]"), args.master_port or STATIC_PORT)
    elif not endpoint and max_nodes > 1 and hosted:
        endpoint = join_host_port("127.0.0.1", C10D_PORT)
    elif not endpoint and hosted:
        return Meeting((), True, is_host)
    elif not endpoint:
        raise UsageError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT of the etcd that runs")
    endpoints = find_endpoints(endpoint, C10D_PORT if hosted else ETCD_PORT)
    access = find_access(conf)
    if hosted and access != PLAIN:
        raise UsageError(
            f"--rdzv-backend {backend} lets nodes host a plain etcd; TLS and users are for one that runs already "
            f"(--rdzv-backend etcd)"
        )
    return Meeting(endpoints, hosted, is_host, APIS.get(backend), access)


def find_endpoints(text: str, default_port: int = ETCD_PORT) -> tuple[str, ...]:
    """HOST:PORT,... with the ports. Raises UsageError."""
    return tuple(_endpoint(part, default_port) for part in text.split(","))


def find_access(conf: Mapping[str, str]) -> Access:
    """What --rdzv-conf says of TLS and users, under torchrun's names for etcd and etcd-v2. Raises UsageError."""
    files = {name: conf[key] for key, name in TLS_FILES.items() if key in conf}
    for name, path in files.items():
        if not os.access(path, os.R_OK):
            raise UsageError(f"--rdzv-conf {name}: cannot read {path!r}")
    if "key" in files and "cert" not in files:
        raise UsageError("--rdzv-conf key needs the certificate that it belongs to: cert=FILE")
    protocol = conf.get("protocol", "https" if files else "http").lower()
    if protocol not in ("http", "https") or (files and protocol == "http"):
        raise UsageError(f"--rdzv-conf protocol={protocol}: certificates need https; without them http or https")
    password_file = conf.get("password_file")
    if (password_file is None) != ("user" not in conf):
        raise UsageError("--rdzv-conf user=NAME and password_file=FILE belong together")
    password = ""
    if password_file is not None:
        try:
            password = Path(password_file).read_text().strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"--rdzv-conf password_file: cannot read {password_file!r}: {error}") from None
    return Access(protocol == "https", **files, user=conf.get("user"), password=password)


def _endpoint(text: str, default_port: int) -> str:
    """HOST, HOST:PORT, [IPv6] or [IPv6]:PORT, with the port."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([\w.-]+))(?::(\d{1,5}))?", text.strip())
    if found is None or int(found[3] or 0) >= 2**16:
        raise UsageError(f"--rdzv-endpoint {text!r} is not HOST:PORT; IPv6 addresses stand in brackets")
    return join_host_port(found[1] or found[2], default_port if found[3] is None else int(found[3]))


def run_id(text: str, meeting: Meeting) -> str:
    """As given. Where nobody else can join, and none is, one of its own, as torchrun does: scripts name files by it."""
    if text == "none" and not meeting.endpoints:
        return str(uuid.uuid4())
    if not text or any(not (c.isalnum() or c in "-_.") for c in text):
        raise UsageError(f"--rdzv-id {text!r}: use letters, digits, '-', '_' and '.'")
    if len(os.fsencode(text)) > MAX_RUN_ID_BYTES:
        raise UsageError(f"--rdzv-id is part of names of files and keys: {MAX_RUN_ID_BYTES} bytes at most")
    return text


MAX_RUN_ID_BYTES = 128  # a part of file names (255 bytes) and of etcd's URLs

# torchrun's settings of --rdzv-conf that change nothing here: no fixed waits, and no store of its own to tune.
WITHOUT_EFFECT = ("close_timeout", "heartbeat_timeout", "read_timeout", "etcd_prefix", "rank")
TLS_FILES = {
    **{"cert": "cert", "key": "key", "cacert": "ca_cert"},
    **{"ssl_cert": "cert", "ssl_cert_key": "key", "ca_cert": "ca_cert"},
}
HANGS = {"auto": None, "off": math.inf}
SECONDS = {"timeout": "rendezvous_s", "join_timeout": "rendezvous_s", "last_call_timeout": "join_window_s"}


def read_conf(text: str) -> dict[str, str]:
    """The pairs of --rdzv-conf. Raises UsageError for what is no pair and for what cannot be honoured."""
    conf = {}
    for pair in filter(None, text.strip().split(",")):
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value:
            raise UsageError(f"--rdzv-conf {pair!r} is not KEY=VALUE")
        conf[name] = value
    if conf.get("store_type", "tcp").lower() != "tcp":
        raise UsageError("--rdzv-conf store_type: only tcp; nodes meet at an etcd, not in a file")
    return conf


def timeouts(args: argparse.Namespace, conf: Mapping[str, str], environ: Mapping[str, str]) -> Timeouts:
    grace_s = args.shutdown_timeout
    if grace_s is None:
        grace_s = _seconds("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30")
    given = {"grace_s": float(grace_s)}
    for name, setting in SECONDS.items():  # the more exact name comes later, and wins
        if name in conf:
            given[setting] = _seconds(f"--rdzv-conf {name}", conf[name])
    if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
        interval = _seconds("--rdzv-conf keep_alive_interval", conf.get("keep_alive_interval", "5"))
        given["lease_s"] = interval * _seconds(
            "--rdzv-conf keep_alive_max_attempt", conf.get("keep_alive_max_attempt", "3")
        )
    if "lease" in conf:
        given["lease_s"] = _seconds("--rdzv-conf lease", conf["lease"])
    return Timeouts(**given, hang_s=_hang_s(args.hang_timeout))


def _hang_s(text: str) -> float | None:
    if text in HANGS:
        return HANGS[text]
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--hang-timeout {text!r} is none of auto, off and a number of seconds") from None


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"):
        raise UsageError(f"--rdzv-conf {name}={text!r} is neither true nor false")
    return text.lower() in ("1", "true", "t", "yes", "y")


def unknown(conf: Mapping[str, str]) -> list[str]:
    """Names of --rdzv-conf that nobody knows here."""
    known = {*SECONDS, "lease", "keep_alive_interval", "keep_alive_max_attempt", "is_host", "store_type", "protocol"}
    known |= {*TLS_FILES, "user", "password_file"}
    return sorted(conf.keys() - known - set(WITHOUT_EFFECT))
