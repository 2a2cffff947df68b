"""The agent's client of the guardian: what it starts, and how that ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from scratch import scratch_dir

from tenplexrun.agent.embedded import EmbeddedEtcd, find_etcd
from tenplexrun.agent.etcd_v2 import EtcdV2
from tenplexrun.agent.probing import served_api
from tenplexrun.agent.processes import NODE_DIR_VARIABLE, Processes, ProcessExit, module_command
from tenplexrun.errors import CoordinationError, ProcessError

DEADLINE_S = 60.0
Test = Callable[[Processes, Path], Awaitable[None]]


@pytest.fixture
def check() -> Iterator[Callable[[Test], None]]:
    """Runs a test with a guardian and its node directory, which is gone afterwards."""
    node_dir = scratch_dir()

    async def bounded(test: Test) -> None:
        processes = await Processes.start(node_dir)
        try:
            await asyncio.wait_for(test(processes, node_dir), DEADLINE_S)
        finally:
            await processes.close()
            assert not node_dir.exists()

    yield lambda test: asyncio.run(bounded(test))
    shutil.rmtree(node_dir, ignore_errors=True)


async def output(processes: Processes, argv: list[str], fd: int = 1, **options: object) -> tuple[str, ProcessExit]:
    read_end, write_end = os.pipe()
    try:
        pid = await processes.spawn("test", argv, {fd: write_end}, **options)  # type: ignore[arg-type]
    finally:
        os.close(write_end)
    ended = await processes.exits.get()
    assert (ended.pid, ended.name) == (pid, "test")
    with open(read_end) as file:
        return file.read(), ended


def test_streams_environment_directory_and_exit_code(check: Callable[[Test], None], tmp_path: Path) -> None:
    async def test(processes: Processes, node_dir: Path) -> None:
        os.environ["INHERITED"], os.environ["REMOVED"] = "1", "1"
        script = f'echo "$PWD|$INHERITED|${{REMOVED--}}|$NEW|${NODE_DIR_VARIABLE}"; exit 3'
        processes_ = await Processes.start(node_dir / "other")  # it inherits what the environment is now
        text, ended = await output(
            processes_, ["sh", "-c", script], env={"NEW": "a b", "REMOVED": None}, cwd=str(tmp_path)
        )
        assert text == f"{tmp_path}|1|-|a b|{node_dir / 'other'}\n"
        assert ended.code == 3
        await processes_.close()
        text, _ = await output(processes, ["sh", "-c", "echo seven >&7; ls /proc/self/fd | wc -l"], fd=7)
        assert text == "seven\n"

    check(test)


def test_signals_and_ignored_ones(check: Callable[[Test], None]) -> None:
    async def test(processes: Processes, _: Path) -> None:
        text, _ = await output(processes, ["sh", "-c", "grep -E 'SigIgn|SigBlk' /proc/self/status"])
        argv = ["grep", "-E", "SigIgn|SigBlk", "/proc/self/status"]
        assert text == subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        pid = await processes.spawn("sleeper", ["sleep", "1000"])
        assert os.getpgid(pid) == pid
        processes.kill(pid, signal.SIGTERM)
        assert await processes.exits.get() == ProcessExit(pid, "sleeper", -signal.SIGTERM)
        processes.kill(pid, signal.SIGTERM)
        assert (await output(processes, ["true"]))[1].code == 0

    check(test)


def test_what_cannot_be_started_is_said(check: Callable[[Test], None]) -> None:
    async def test(processes: Processes, _: Path) -> None:
        with pytest.raises(ProcessError, match="cannot start no-such-program: No such file or directory"):
            await processes.spawn("x", ["no-such-program"])
        with pytest.raises(ProcessError, match="cannot start true: No such file or directory"):
            await processes.spawn("x", ["true"], cwd="/no/such/directory")
        large = {f"LARGE{n}": "x" * 100_000 for n in range(5)}
        assert (await output(processes, ["sh", "-c", "echo ${#LARGE4}"], env=large))[0] == "100000\n"

    check(test)


def test_modules_run_from_the_package_whatever_lies_around(
    check: Callable[[Test], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tenplexrun", "agent", "json", "importlib"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "mine.py").write_text("import sys\ndef main(): print(sys.argv[1:], __name__); return 5\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))

    async def test(processes: Processes, _: Path) -> None:
        text, ended = await output(processes, module_command("mine", "a", "-b"), cwd=str(tmp_path))
        assert (text, ended.code) == ("['a', '-b'] mine\n", 5)
        argv = [*module_command("tenplexrun.agent.warm", "7")]
        assert argv[0] == sys.executable

    check(test)


def test_embedded_etcd_serves_and_ends(check: Callable[[Test], None]) -> None:
    async def test(processes: Processes, node_dir: Path) -> None:
        server = await EmbeddedEtcd.start(processes, node_dir)
        assert await served_api([server.endpoint])
        client = EtcdV2([server.endpoint])
        await client.put("a", "1")
        lease = await client.hold("members/n", "me", 60)
        processes.set_cleanup(client.removals(lease.key))
        host, _, port = server.endpoint.rpartition(":")
        with pytest.raises(ProcessError, match=r"ended at once.*address already in use"):
            await EmbeddedEtcd.start(processes, node_dir / "..", host, int(port))
        assert (await processes.exits.get()).code != 0
        server.stop()
        assert (await processes.exits.get()).name == "etcd"
        assert not await served_api([server.endpoint])
        again = await EmbeddedEtcd.start(processes, node_dir, host, int(port))
        assert again.endpoint == server.endpoint
        assert await client.get("a") is not None
        await client.close()

    check(test)


def test_what_else_listens_is_no_etcd() -> None:
    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CoordinationError, match="is not an etcd"):
            await served_api([f"127.0.0.1:{port}"])
        server.close()
        assert not await served_api(["127.0.0.1:1"])
        assert not await served_api(["no-such-host.invalid:1"])

    asyncio.run(test())


def test_an_etcd_that_loses_data_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, chosen in (("3.4.23", True), ("3.5.0", False), ("3.5.9", True), ("3.4.21", False), ("3.6.1", False)):
        fake = tmp_path / "etcd"
        fake.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\necho 'Git SHA: 1.2.3'\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert (asyncio.run(find_etcd()).path == str(fake)) == chosen
