"""Real etcd servers that tests may stop, go on, kill and start again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from scratch import scratch_dir

from tenplexrun.agent.embedded import SERVING, Binary, etcd_command, find_etcd
from tenplexrun.agent.guardian import die_with_parent

# An address that no other test run has, and ports in turn: the JSON gateway of an etcd on port 0 dials port 0.
HOST = f"127.{os.getpid() >> 16 & 127 | 64}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
_PORTS = itertools.count(20_000, 2)


class EtcdServer:
    """One server. `flags` come last, and so win."""

    def __init__(
        self,
        directory: Path,
        v2: bool = True,
        flags: Sequence[str] = (),
        binary: Binary | None = None,
        port: int | None = None,
        scheme: str = "http",
    ) -> None:
        self.binary = binary or asyncio.run(find_etcd())
        self.directory, self.v2 = directory, v2
        self.port = next(_PORTS) if port is None else port
        url = f"{scheme}://{HOST}:{self.port}"
        self.flags = ["--listen-client-urls", url, "--advertise-client-urls", url, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.port}"

    def launch(self) -> None:
        self.directory.mkdir(exist_ok=True)
        argv = etcd_command(self.binary, self.directory / "data", HOST, self.port)
        argv = [word for word in argv if self.v2 or word != "--enable-v2"]
        parent = os.getpid()
        self.log = self.directory / f"log-{time.monotonic_ns()}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, *self.flags], stdout=log, stderr=log, preexec_fn=lambda: die_with_parent(parent)
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            if SERVING in self.log.read_text():
                return
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.02)

    def start(self) -> None:
        self.launch()
        self.wait()

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def empty(self) -> None:
        """Lose all data; only while it is down."""
        shutil.rmtree(self.directory / "data")


class EtcdCluster:
    """Three servers, each on a loopback address that no other test run has."""

    def __init__(self, directory: Path, v2: bool = True, binary: Binary | None = None) -> None:
        ports = [next(_PORTS) for _ in range(3)]
        peers = [f"http://{HOST}:{port + 1}" for port in ports]
        members = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        self.servers = []
        for number, (port, peer) in enumerate(zip(ports, peers, strict=True)):
            flags = ["--name", f"m{number}", "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            flags += [
                "--initial-cluster",
                members,
                "--initial-cluster-token",
                members,
                "--heartbeat-interval",
                "50",
                "--election-timeout",
                "500",
            ]
            self.servers.append(EtcdServer(directory / f"m{number}", v2, flags, binary, port))
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait()

    @property
    def endpoints(self) -> list[str]:
        return [server.endpoint for server in self.servers]

    def leader(self) -> EtcdServer:
        for server in self.servers:
            url, body = f"http://{server.endpoint}/v3/maintenance/status", b"{}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, body, timeout=5) as answer:
                status = json.load(answer)
                if status["leader"] == status["header"]["member_id"]:
                    return server
        raise AssertionError("no leader")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    directory = scratch_dir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
