"""Each launch has an epoch of its own: what an older one left is never joined."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenplexrun.agent.memory import MemoryCoordination, MemoryLease, MemoryStore
from tenplexrun.agent.rendezvous import (
    Charter,
    Held,
    current_epoch,
    join_run,
    launch_token,
    leave_run,
    read_secret,
    resume,
    token_proof,
)
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Cause, Member, Participant, Round, to_json
from tenplexrun.errors import RunGoneError, UsageError
from tenplexrun.ports import KeyValue


def member(name: str) -> Member:
    return Member(name, "h", f"{name}:1", f"{name}:2", 1)


def test_nodes_that_come_together_meet_in_one_epoch() -> None:
    async def run() -> None:
        store = MemoryStore()
        joins = [join_run(MemoryCoordination(store), "job", member(f"n{i}"), 5.0) for i in range(8)]
        folders = {folder for folder, _ in await asyncio.gather(*joins)}
        assert len(folders) == 1

    asyncio.run(run())


def test_a_node_with_another_secret_ends_before_it_is_a_member() -> None:
    async def run() -> None:
        coordination = MemoryCoordination(MemoryStore())
        proofs = [token_proof(launch_token(secret * 16, "job")) for secret in (b"a", b"b")]
        folder, lease = await join_run(coordination, "job", member("a"), 5.0, charter=Charter(proofs[0]))
        with pytest.raises(UsageError, match="--secret-file"):
            await join_run(coordination, "job", member("b"), 5.0, charter=Charter(proofs[1]))
        assert list(await coordination.list(f"{folder}/members")) == [lease.key]
        assert (await join_run(coordination, "job", member("c"), 5.0, charter=Charter(proofs[0])))[0] == folder

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


PARTICIPANTS = (Participant("a", "h", 0, 1, "a:2"), Participant("b", "h", 1, 1, "b:2"))
CHARTER = Charter(token_proof(launch_token(b"a" * 16, "job")))
HELD = Round(3, "running", Cause("start", "", 0.0), "d", ParallelConfig(), PARTICIPANTS)


async def run_with_a_round(store: MemoryStore, round_: Round = HELD) -> tuple[MemoryCoordination, str, KeyValue]:
    """A run of the nodes a and b, and its round as a has seen it."""
    coordination = MemoryCoordination(store)
    folder, _ = await join_run(coordination, "job", member("a"), 5.0)
    await join_run(coordination, "job", member("b"), 5.0)
    return coordination, folder, await coordination.put(f"{folder}/round", json.dumps(to_json(round_)))


async def take_up(coordination: MemoryCoordination, folder: str, held: KeyValue, name: str = "a") -> object:
    return await resume(coordination, Held("job", folder, held, CHARTER), member(name), 5.0)


def test_a_member_whose_key_ran_out_is_written_again_in_the_same_round() -> None:
    async def run() -> None:
        store = MemoryStore()
        coordination, folder, held = await run_with_a_round(store)
        store.expire(f"{folder}/members/a")
        await coordination.put(held.key, json.dumps(to_json(replace(HELD, decider="another"))))
        assert getattr(await take_up(coordination, folder, held), "key", None) == f"{folder}/members/a"

    asyncio.run(run())


@pytest.mark.parametrize("change", [{"number": 4}, {"evicted": ("a",)}, {"participants": PARTICIPANTS[1:]}])
def test_a_member_that_the_others_went_on_without_is_told(change: dict[str, Any]) -> None:
    async def run() -> None:
        store = MemoryStore()
        coordination, folder, held = await run_with_a_round(store)
        store.expire(f"{folder}/members/a")
        await coordination.put(held.key, json.dumps(to_json(replace(HELD, **change))))
        assert await take_up(coordination, folder, held) == "moved"
        assert await coordination.get(f"{folder}/members/a") is None

    asyncio.run(run())


def test_they_may_go_on_while_the_key_is_written() -> None:
    class Late(MemoryCoordination):
        async def hold(self, key: str, value: str, ttl_s: float) -> MemoryLease:
            lease = await super().hold(key, value, ttl_s)
            await self.put(held.key, json.dumps(to_json(replace(HELD, number=4))))
            return lease

    async def run() -> None:
        nonlocal held
        store = MemoryStore()
        _, folder, held = await run_with_a_round(store)
        store.expire(f"{folder}/members/a")
        assert await take_up(Late(store), folder, held) == "moved"
        assert store.get(f"{folder}/members/a") is None

    held = KeyValue("", "", "")
    asyncio.run(run())


def test_an_emptied_store_gets_one_round_from_whoever_comes_first() -> None:
    async def run() -> None:
        _, folder, held = await run_with_a_round(MemoryStore())
        emptied = MemoryCoordination(MemoryStore())
        behind = replace(held, value=json.dumps(to_json(replace(HELD, number=2))))
        both = await asyncio.gather(take_up(emptied, folder, held), take_up(emptied, folder, behind, "b"))
        assert getattr(both[0], "key", None) == f"{folder}/members/a"
        assert both[1] == "moved"
        assert await current_epoch(emptied, "job") == folder
        assert (await emptied.list(folder))[held.key].value == held.value
        with pytest.raises(UsageError, match="--secret-file"):
            await join_run(emptied, "job", member("stranger"), 5.0, charter=Charter("of another secret"))
        assert (await join_run(emptied, "job", member("c"), 5.0, charter=CHARTER))[0] == folder

    asyncio.run(run())


def test_a_run_that_was_started_anew_in_an_emptied_store_is_not_joined() -> None:
    async def run() -> None:
        _, folder, held = await run_with_a_round(MemoryStore())
        emptied = MemoryCoordination(MemoryStore())
        await join_run(emptied, "job", member("new"), 5.0)
        with pytest.raises(RunGoneError, match="started anew"):
            await take_up(emptied, folder, held)
        with pytest.raises(RunGoneError, match="started anew"):
            await join_run(emptied, "job", member("a2"), 5.0, own=folder)

    asyncio.run(run())


def test_an_epoch_whose_keys_ran_out_in_an_outage_is_not_replaced_while_its_nodes_are_there() -> None:
    async def gone(address: str) -> bool:
        return address in dead

    async def run() -> None:
        store = MemoryStore()
        coordination, folder, held = await run_with_a_round(store, replace(HELD, participants=PARTICIPANTS))
        for name in "ab":
            store.expire(f"{folder}/members/{name}")
        joining = asyncio.ensure_future(join_run(coordination, "job", member("new"), 5.0, gone))
        await asyncio.sleep(0.3)
        assert not joining.done()
        await take_up(coordination, folder, held)
        assert (await joining)[0] == folder

        for name in ("a", "new"):
            store.expire(f"{folder}/members/{name}")
        dead.update(("a:2", "b:2"))
        assert (await join_run(coordination, "job", member("late"), 5.0, gone))[0] != folder

    dead: set[str] = set()
    asyncio.run(run())


def test_an_ended_run_is_left_to_its_verdict() -> None:
    async def run() -> None:
        coordination, folder, held = await run_with_a_round(MemoryStore())
        await coordination.put(held.key, json.dumps(to_json(replace(HELD, phase="ended"))))
        assert await take_up(coordination, folder, held) == "ended"
        await coordination.delete_folder(folder)
        with pytest.raises(RunGoneError, match="has ended"):
            await take_up(coordination, folder, held)

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


def test_a_node_with_other_flags_ends_before_it_is_a_member_or_is_told() -> None:
    async def run() -> None:
        coordination, notes = MemoryCoordination(MemoryStore()), list[str]()
        terms = {"--tp": "2", "--state-files": "0", "--replicas": "2", "the script": "a.py"}
        folder, lease = await join_run(coordination, "job", member("a"), 5.0, charter=Charter("p", terms, "host1"))
        other = Charter("p", {**terms, "--state-files": "64", "--checkpoint-dir": "/ck", "--replicas": "1"}, "host2")
        words = (
            r"\[host2\] and on host1, .*: --checkpoint-dir is /ck here, none there, --state-files is 64 here, 0 there;"
        )
        with pytest.raises(UsageError, match=words):
            await join_run(coordination, "job", member("b"), 5.0, charter=other, note=notes.append)
        assert (notes, list(await coordination.list(f"{folder}/members"))) == ([], [lease.key])
        like = Charter("p", {**terms, "--replicas": "1"}, "host3")
        assert (await join_run(coordination, "job", member("c"), 5.0, charter=like, note=notes.append))[0] == folder
        (note,) = notes
        assert note.endswith("[host3] and on host1, which began the run job: --replicas is 1 here, 2 there")

    asyncio.run(run())
