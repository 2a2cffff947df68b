from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenplexrun.agent.embedded import SERVING, etcd_command, find_etcd
from tenplexrun.agent.guardian import die_with_parent


class EtcdServer:
    """A real etcd of one member, which tests may stop, go on, kill and start again."""

    def __init__(self, directory: Path) -> None:
        self.binary = asyncio.run(find_etcd())
        self.directory = directory
        self.port = 0
        self.start()

    def start(self, port: int | None = None) -> None:
        parent = os.getpid()
        self.process = subprocess.Popen(
            etcd_command(self.binary, self.directory / "data", "127.0.0.1", self.port if port is None else port),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: die_with_parent(parent),
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if SERVING.encode() in line:
                self.endpoint = json.loads(line)["address"]
                self.port = int(self.endpoint.rpartition(":")[2])
                break
        else:
            raise AssertionError("etcd ended at once")
        log = open(self.directory / "log", "ab")  # noqa: SIM115
        self.drain = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=log)
        self.process.stderr.close()
        log.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.drain.wait()

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)


@pytest.fixture(scope="session", autouse=True)
def etcd_server() -> Iterator[EtcdServer]:
    directory = Path(tempfile.mkdtemp(prefix="tenplexrun-test-", dir="/dev/shm"))
    server = EtcdServer(directory)
    yield server
    server.kill()
    shutil.rmtree(directory)


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """One that the test may mistreat."""
    directory = Path(tempfile.mkdtemp(prefix="tenplexrun-test-", dir="/dev/shm"))
    server = EtcdServer(directory)
    yield server
    server.kill()
    shutil.rmtree(directory)
