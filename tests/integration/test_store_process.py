"""The store as the agent runs it: a process of its own, its control socket, and kill -9."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenplexrun.agent.events import EventLog
from tenplexrun.agent.transformer import Transformer
from tenplexrun.core.arena import arena_map
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import Index
from tenplexrun.core.snapshots import Claim, SnapshotId
from tenplexrun.errors import ArenaFullError, LayoutError, ProcessError, StoreError, WireError
from tenplexrun.ports import StoreClient as StorePort
from tenplexrun.store.client import StoreClient

LAYOUT = Layout((TensorSpec("w", (64, 32), "float64", (Shard(1, "tp"),)), TensorSpec("b", (3,), "float64")))
CONFIG = ParallelConfig(tp=2)
W = np.arange(64 * 32, dtype=np.float64).reshape(64, 32)


class StoreProcess:
    """A store in `folder`, like an agent's."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(config.pop("token", "secret") + "\n")
        self._config = {
            "dir": str(folder),
            "host": "127.0.0.1",
            "token_file": str(folder / "token"),
            "socket": str(folder / "store.sock"),
            **config,
        }
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tenplexrun.store.server", json.dumps(self._config)], cwd="/", text=True
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def client(self) -> StoreClient:
        return StoreClient(self._config["socket"])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Callable[..., StoreProcess]]:
    started: list[StoreProcess] = []

    def start(name: str, **config: Any) -> StoreProcess:
        started.append(StoreProcess(tmp_path / name, **config))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def ready(process: StoreProcess) -> tuple[StoreClient, str]:
    """The store's client and its address for peers."""
    client = process.client
    _: StorePort = client  # it is one, as far as mypy can tell
    return client, f"127.0.0.1:{await client.hello()}"


async def train(client: StoreClient, number: int, step: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """What one step of the job's workers makes of this node's store. Returns the snapshot."""
    opened = await client.open_round(number, LAYOUT.to_json(), CONFIG.to_json(), ranks)
    path = opened["slots"][step % 2]
    for entry in arena_map(LAYOUT, CONFIG, ranks).entries:
        whole = W if entry.fqn == "w" else np.arange(3.0)
        slot = np.memmap(path, np.float64, "r+", entry.offset, entry.region.lengths)
        slot[...] = whole[entry.region.slices] + step
    return await client.seal(number, step, step % 2, {"step": step, "consumed": 8 * step})


async def column_halves(client: StoreClient, snapshot: dict[str, Any]) -> dict[int, Any]:
    """By first column: the pieces of `w` as the index lists them."""
    path = Path(await client.index(snapshot))
    index = Index.from_json(json.loads(path.read_text()))
    return {
        piece.region.offsets[1]: np.memmap(
            path.parent / piece.file, np.float64, "r", piece.offset, piece.region.lengths
        )
        for piece in index.pieces
        if piece.fqn == "w"
    }


def fetch_of(column: int, address: str) -> dict[str, Any]:
    return {"fqn": "w", "source": "b", "region": [[0, column], [64, 16]], "num_bytes": 64 * 16 * 8, "address": address}


def test_a_lost_half_comes_from_the_other_node(store: Callable[..., StoreProcess]) -> None:
    async def scenario() -> None:
        (a, _), (b, address) = await ready(store("a")), await ready(store("b"))
        snapshot = await train(a, 1, 5, (0,))
        assert await train(b, 1, 5, (1,)) == snapshot == {"round": 1, "step": 5, "digest": LAYOUT.digest}
        await a.commit(1, 5)
        claim = {"config": ParallelConfig().to_json(), "ranks": [0]}
        report = await a.pull(2, snapshot, LAYOUT.to_json(), claim, [fetch_of(16, address)])
        assert (report["num_bytes"], report["num_fetches"]) == (64 * 16 * 8, 1)
        halves = await column_halves(a, snapshot)
        np.testing.assert_array_equal(np.hstack([halves[0], halves[16]]), W + 5)
        holdings = await a.inventory()
        assert [(held["claims"], held["committed"], held["except"]) for held in holdings] == [
            ([Claim(CONFIG, (0,)).to_json()], True, []),
            ([claim], True, []),
        ]
        assert await a.progress() == {"num_bytes": 0, "total_bytes": 0}

    run(scenario)


def test_killed_store_goes_on_where_it_was(store: Callable[..., StoreProcess]) -> None:
    async def scenario() -> None:
        process = store("a")
        client, _ = await ready(process)
        await train(client, 1, 1, (0, 1))
        await client.commit(1, 1)
        second = await train(client, 1, 2, (0, 1))
        before = await client.inventory()
        process.kill()
        asked = asyncio.ensure_future(client.inventory())
        await asyncio.sleep(0.1)
        process.start()
        assert await asked == before, "asked while it was away"
        assert await client.layout(LAYOUT.digest, []) == LAYOUT.to_json()
        assert len(await column_halves(client, second)) == 2
        third = await train(client, 1, 3, (0, 1))
        await client.commit(1, 3)
        assert [held["snapshot"] for held in await client.inventory()] == [third]

    run(scenario)


def test_killed_while_sealing_leaves_whole_snapshots(store: Callable[..., StoreProcess]) -> None:
    async def scenario() -> None:
        process = store("a")
        client, _ = await ready(process)
        await train(client, 1, 1, (0, 1))
        await client.commit(1, 1)
        for step in range(2, 6):
            sealing = asyncio.ensure_future(train(client, 1, step, (0, 1)))
            await asyncio.sleep(0.001 * step)
            process.kill()
            sealing.cancel()  # or it would be asked for again
            await asyncio.wait([sealing])
            process.start()
            await process.client.hello()
            held = await client.inventory()
            assert held[0]["snapshot"]["step"] >= step - 1
            assert all(not record["except"] for record in held if record["snapshot"]["step"] >= step - 1)
            await train(client, 1, step, (0, 1))
            await client.commit(1, step)

    run(scenario)


def test_peer_of_another_run_is_refused(store: Callable[..., StoreProcess]) -> None:
    async def scenario() -> None:
        (a, _), (b, address) = await ready(store("a")), await ready(store("b", token="other"))
        snapshot = await train(a, 1, 5, (0,))
        await train(b, 1, 5, (1,))
        claim = {"config": CONFIG.to_json(), "ranks": [0, 1]}
        with pytest.raises(WireError, match="not that of this run"):
            await a.pull(2, snapshot, LAYOUT.to_json(), claim, [fetch_of(16, address)])
        assert len(await a.inventory()) == 1

    run(scenario)


BIG = Layout((TensorSpec("big", (48 << 20,), "uint8"),))
ONE = ParallelConfig()


async def hold_big(client: StoreClient) -> dict[str, Any]:
    await client.open_round(1, BIG.to_json(), ONE.to_json(), [0])
    return await client.seal(1, 1, 0, {})


async def begin_pull(client: StoreClient, snapshot: dict[str, Any], *addresses: str) -> asyncio.Future[dict[str, Any]]:
    """Of the big tensor, from the first address that delivers it. Returns when some of it has come."""
    fetch = {"fqn": "big", "source": "b", "region": [[0], [48 << 20]], "num_bytes": 48 << 20}
    fetch |= {"address": addresses[0], "alternatives": addresses[1:]}
    claim = {"config": ONE.to_json(), "ranks": [0]}
    pulling = asyncio.ensure_future(client.pull(2, snapshot, BIG.to_json(), claim, [fetch]))
    while not (await client.progress())["num_bytes"] and not pulling.done():
        await asyncio.sleep(0)
    return pulling


async def killed(process: StoreProcess) -> None:
    process.kill()


async def killed_and_restarted(process: StoreProcess) -> None:
    process.kill()
    process.start()


async def stopped(process: StoreProcess) -> None:
    process.process.send_signal(signal.SIGSTOP)


async def stopped_for_a_while(process: StoreProcess) -> None:
    process.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(3.0)  # longer than a pull waits for progress
    process.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("fault", "replicas"),
    [(killed, 2), (stopped, 2), (killed_and_restarted, 1), (stopped_for_a_while, 1), (killed, 1)],
)
def test_source_that_dies_or_stalls_in_mid_stream(
    store: Callable[..., StoreProcess], fault: Callable[[StoreProcess], Awaitable[None]], replicas: int
) -> None:
    """With another replica it is replaced; without one it is asked again when it is back; else the pull fails whole."""

    async def scenario() -> None:
        patience_s = 20 if fault is killed_and_restarted else 2  # one that is busy takes long to start
        puller, victim = store("a", timeout_s=patience_s), store("b")
        (a, _), (b, first) = await ready(puller), await ready(victim)
        snapshot, addresses = await hold_big(b), [first]
        if replicas == 2:
            c, second = await ready(store("c"))
            assert await hold_big(c) == snapshot
            addresses.append(second)
        pulling = await begin_pull(a, snapshot, *addresses)
        await fault(victim)
        if replicas == 1 and fault is killed:
            with pytest.raises(WireError, match=f"1 of 1 regions did not arrive, the first is big.*{first}"):
                await pulling
            assert await a.inventory() == []
            assert not list((puller.folder / "arena").glob("*.bin"))
        else:
            assert (await pulling)["num_bytes"] == 48 << 20
            assert [held["except"] for held in await a.inventory()] == [[]]

    run(scenario)


def test_a_new_round_ends_the_pulls_of_the_old_one_at_once(store: Callable[..., StoreProcess]) -> None:
    """Their source is stopped, so that they would wait for long; their memory is there again for what comes next."""

    async def scenario() -> None:
        puller, victim = store("a", limit_bytes=60 << 20), store("b")
        (a, _), (b, address) = await ready(puller), await ready(victim)
        snapshot = await hold_big(b)
        for end in (a.abandon, a.inventory):
            pulling = await begin_pull(a, snapshot, address)
            victim.process.send_signal(signal.SIGSTOP)
            if not pulling.done():
                await end()
                with pytest.raises(WireError, match="did not arrive"):
                    await pulling
                assert not list((puller.folder / "arena").glob("*.bin"))
            victim.process.send_signal(signal.SIGCONT)
        assert await a.progress() == {"num_bytes": 0, "total_bytes": 0}

    run(scenario)


def test_errors_keep_their_class(store: Callable[..., StoreProcess]) -> None:
    async def scenario() -> None:
        client, _ = await ready(store("a", limit_bytes=1000))
        with pytest.raises(ArenaFullError, match=r"a round with its two slots needs \d+ bytes more, 1000 are free"):
            await train(client, 1, 1, (0, 1))
        with pytest.raises(LayoutError, match="ranks"):
            await client.open_round(1, LAYOUT.to_json(), CONFIG.to_json(), [2])
        with pytest.raises(StoreError, match="not in this store"):
            await client.index(SnapshotId(1, 1, "d").to_json())
        with pytest.raises(WireError, match="no holder"):
            await client.layout("unknown", [])

    run(scenario)


def test_full_tmpfs_is_an_error_message(store: Callable[..., StoreProcess], tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")

    async def scenario() -> None:
        process = store("small")
        client, _ = await ready(process)
        with pytest.raises(ArenaFullError, match="shared memory is too small"):
            await train(client, 1, 1, (0, 1))
        assert not list((folder / "arena").glob("*.bin"))
        assert await client.inventory() == []
        process.kill()

    try:
        run(scenario)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_client_says_that_no_store_came(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ProcessError, match="did not start within"):
            await StoreClient(str(tmp_path / "none.sock")).hello(timeout_s=0.05)

    run(scenario)


@pytest.mark.parametrize("config", ["", "{}", '{"dir": "/x", "host": "h", "token_file": "/none", "socket": "/s"}'])
def test_bad_config_is_one_line(config: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tenplexrun.store.server", config], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tenplexrun store: the store cannot start")
    assert len(done.stderr.splitlines()) == 1


def test_starts_without_heavy_imports() -> None:
    code = "import sys, tenplexrun.store.server, tenplexrun.store.client; print(*sys.modules)"
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    loaded = subprocess.run([sys.executable, "-c", code], cwd="/", env=env, capture_output=True, text=True, check=True)
    assert not {"torch", "etcd", "pyfuse3", "urllib3"} & set(loaded.stdout.split())


def test_a_store_killed_in_the_middle_of_its_own_pull_begins_again(store: Callable[..., StoreProcess]) -> None:
    async def scenario() -> None:
        puller = store("a")
        (a, _), (b, address) = await ready(puller), await ready(store("b"))
        snapshot = await hold_big(b)
        pulling = await begin_pull(a, snapshot, address)
        await killed_and_restarted(puller)
        assert (await pulling)["num_bytes"] == 48 << 20
        assert [held["except"] for held in await a.inventory()] == [[]]
        assert len(list((puller.folder / "arena").glob("*.bin"))) == 1, "what had come before is gone"

    run(scenario)


def test_a_long_move_is_told_of_and_a_superseded_one_is_given_up(
    store: Callable[..., StoreProcess], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(kind: str) -> list[dict[str, Any]]:
        found = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        return [event for event in found if event["event"] == kind]

    async def scenario() -> None:
        puller, victim = store("a"), store("b")
        (a, _), (b, address) = await ready(puller), await ready(victim)
        snapshot, events = await hold_big(b), EventLog("a", tmp_path / "events.jsonl")
        victim.process.send_signal(signal.SIGSTOP)
        fetch = {"fqn": "big", "source": "b", "region": [[0], [48 << 20]], "num_bytes": 48 << 20, "address": address}
        claim = {"config": ONE.to_json(), "ranks": [0]}
        pulling = a.pull(2, snapshot, BIG.to_json(), claim, [{**fetch, "alternatives": []}])
        moving = asyncio.ensure_future(Transformer(a, events)._pull(7, pulling))
        while not told("moving"):
            await asyncio.sleep(0.05)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        victim.process.send_signal(signal.SIGCONT)
        assert [event["round"] for event in told("move_abandoned")] == [7]
        while (await a.progress())["total_bytes"]:
            await asyncio.sleep(0.05)
        assert await a.inventory() == []
        events.close()

    run(scenario)
    assert "moving state: 0 of 48 MiB" in capfd.readouterr().err
