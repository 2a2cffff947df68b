"""Each launch has an epoch of its own: what an older one left is never joined."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tenplexrun.agent.memory import MemoryCoordination, MemoryStore
from tenplexrun.agent.rendezvous import current_epoch, join_run, launch_token, leave_run, read_secret
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Cause, Member, Round, to_json
from tenplexrun.errors import UsageError


def member(name: str) -> Member:
    return Member(name, "h", f"{name}:1", f"{name}:2", 1)


def test_nodes_that_come_together_meet_in_one_epoch() -> None:
    async def run() -> None:
        store = MemoryStore()
        joins = [join_run(MemoryCoordination(store), "job", member(f"n{i}"), 5.0) for i in range(8)]
        folders = {folder for folder, _ in await asyncio.gather(*joins)}
        assert len(folders) == 1

    asyncio.run(run())


def test_an_epoch_without_members_is_replaced() -> None:
    async def run() -> None:
        coordination = MemoryCoordination(MemoryStore())
        first, lease = await join_run(coordination, "job", member("a"), 5.0)
        await lease.release()  # as after kill -9 and the end of the lease
        second, _ = await join_run(coordination, "job", member("b"), 5.0)
        assert first != second

    asyncio.run(run())


def test_an_epoch_whose_job_has_ended_is_replaced_though_members_linger() -> None:
    async def run() -> None:
        coordination = MemoryCoordination(MemoryStore())
        first, _ = await join_run(coordination, "job", member("a"), 5.0)
        ended = Round(0, "ended", Cause("end", "", 0.0), "d", ParallelConfig())
        await coordination.put(f"{first}/round", json.dumps(to_json(ended)))
        second, _ = await join_run(coordination, "job", member("b"), 5.0)
        assert first != second
        assert await current_epoch(coordination, "job") == second

    asyncio.run(run())


def test_the_last_to_leave_takes_the_records_along() -> None:
    async def run() -> None:
        coordination = MemoryCoordination(MemoryStore())
        folder, first = await join_run(coordination, "job", member("a"), 5.0)
        _, second = await join_run(coordination, "job", member("b"), 5.0)
        await coordination.put(f"{folder}/round", "{}")
        assert await leave_run(coordination, folder, first)
        assert not await leave_run(coordination, folder, second)
        assert not await coordination.list(folder)

    asyncio.run(run())


def test_the_secret_is_made_once_and_must_be_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    secret = read_secret(path)
    assert read_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert launch_token(secret, "a") != launch_token(secret, "b")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(UsageError, match="fewer than 16"):
        read_secret(path)
    with pytest.raises(UsageError, match="--secret-file"):
        read_secret(Path(os.devnull) / "x")
