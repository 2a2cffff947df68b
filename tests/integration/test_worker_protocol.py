"""A training script against a stand-in of the agent that keeps its word: declare, restore, snapshots, hold, leave."""

from __future__ import annotations

import asyncio
import json
import mmap
import shutil
import textwrap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from extents_of import extents_of
from scratch import scratch_dir

from tenplexrun import channel
from tenplexrun.agent.script import Command
from tenplexrun.core.control import NO_HOLD, ControlPage, num_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.order import DataOrder
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.core.snapshots import Claim, SnapshotId, arena_map
from tenplexrun.errors import LayoutError

STEPS = 9
SCRIPT = """
    import json, sys
    import torch, torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor
    import tenplexrun

    torch.set_default_dtype(torch.float64)
    job = tenplexrun.init()
    torch.manual_seed(4)
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(6, 8), job.mesh["tp"], [Shard(0)], src_data_rank=None))
    bias = torch.nn.Parameter(torch.zeros(8))
    model = torch.nn.ParameterDict({"weight": weight, "bias": bias})
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias]}], lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5], 0.5)
    job.state(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = job.loader(f"bytes:{sys.argv[1]}?sample_bytes=8", global_batch=10, micro_batch=2, seed=3)
    for step, batch in job.steps(loader, until=int(sys.argv[2])):
        x = torch.from_numpy(batch.rows).double() / 256
        y = (x + bias) @ weight.to_local().T
        losses = (y.square().sum(1) * torch.from_numpy(batch.weights)).sum()
        optimizer.zero_grad()
        losses.backward()
        flat = torch.cat([bias.grad, losses.detach()[None]])
        dist.all_reduce(flat, group=job.mesh["tp"].get_group())
        dist.all_reduce(flat, group=job.mesh["dp"].get_group())
        dist.all_reduce(weight.grad.to_local(), group=job.mesh["dp"].get_group())
        flat /= job.parallel.dp
        weight.grad /= job.parallel.dp
        bias.grad.copy_(flat[:8])
        optimizer.step()
        scheduler.step()
        if job.coord["tp"] == 0:
            ids = batch.ids[batch.weights > 0].tolist()
            record = [job.coord["dp"], step, flat[8].item(), ids, optimizer.param_groups[0]["lr"], torch.rand(1).item()]
            print(json.dumps(record), flush=True)
    """


class StandIn:
    """One node's agent for one round. `stop_at`: ask all ranks to park before the first step possible from there on."""

    def __init__(
        self, home: Path, data: Path, config: ParallelConfig, restore: dict[str, Any], stop_at: int | None = None
    ) -> None:
        self.home, self._data, self._config, self._restore, self._stop_at = home, data, config, restore, stop_at
        self.events: list[dict[str, Any]] = []
        self.snapshots: dict[int, dict[str, Any]] = {}
        self.errors: list[str] = []
        self.every, self.replicated = "1", False
        self._slots: dict[int, int] = {}
        self._layout: Layout | None = None
        self._values: dict[str, Any] = {}
        self._fence = threading.Lock()
        home.mkdir()
        control = home / "control"
        control.write_bytes(bytes(num_bytes(config.world_size)))
        with control.open("r+b") as file:
            self.page = ControlPage.create(memoryview(mmap.mmap(file.fileno(), 0)), 0, config.world_size)

    async def serve(self) -> None:
        self._server, self.address = await channel.serve(f"unix:{self.home}/agent.sock", self.handle)

    async def close(self) -> None:
        self._server.close()

    def env(self, rank: int, port: int) -> dict[str, str]:
        sizes = {f"TENPLEX_{axis.upper()}": str(size) for axis, size in self._config.to_json().items()}
        world = str(self._config.world_size)
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        agent = {
            "TENPLEX_SNAPSHOT_EVERY": self.every,
            "TENPLEX_AGENT": self.address,
            "TENPLEX_CONTROL": f"{self.home}/control",
        }
        return {**sizes, **ranks, **master, **agent, "TENPLEX_RUN_ID": "test"}

    async def handle(self, _: channel.Channel, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "declare":
            layout = Layout.from_json(args["layout"])
            if layout.digest != (self._layout or layout).digest:
                self.errors.append("layouts differ")
            self._layout, self._arena = layout, arena_map(layout, self._config, range(self._config.world_size))
            slots = [self.home / f"slot-{number}.bin" for number in (0, 1)]
            for slot in slots:
                if not slot.exists():
                    slot.write_bytes(bytes(self._arena.num_bytes))
            return {"slots": list(map(str, slots)), "replicated": self.replicated}
        if op == "restore":
            return self._restore
        if op == "view":
            return {"dir": str(self._view(args["order"]))}
        if op == "sealed":
            self._sealed(args["step"], args["slot"], args["values"])
        if op == "event":
            self.events.append(args)
        return {}

    def _sealed(self, step: int, slot: int, values: dict[str, Any] | None) -> None:
        self._values = values or self._values
        if self._slots.setdefault(step, slot) != slot:
            self.errors.append(f"two ranks write step {step} into different slots")
        # the words on the page are seen before the messages that follow them
        if self.page.all_sealed() < step or step in self.snapshots or self._values.get("step") != step:
            return
        assert self._layout is not None
        # a slot is written again two snapshots later: keep what a commit would keep
        shutil.copy(self.home / f"slot-{slot}.bin", self.home / f"kept-{step}.bin")
        pieces = tuple(
            Piece(one.fqn, one.region, one.dtype, f"kept-{step}.bin", one.offset, one.num_bytes, 0)
            for one in self._arena.entries
        )
        claims = (Claim(self._config, tuple(range(self._config.world_size))),)
        snapshot = SnapshotId(0, step, self._layout.digest)
        index = Index(snapshot, True, self._values["consumed"], self._values, claims, pieces)
        path = self.home / f"index-{step}.json"
        path.write_text(json.dumps(index.to_json()))
        self.snapshots[step] = {
            "snapshot": snapshot.to_json(),
            "index": str(path),
            "values": self._values,
            "consumed": self._values["consumed"],
            "step": step,
        }
        self.page.committed = step
        if self._stop_at is not None and step >= self._stop_at:
            self._stop_at = None
            self._hold()

    def _hold(self) -> None:
        step = self.page.max_started() + 1
        while (started := self.page.propose_hold(step, self._fence)) >= step:
            step = started + 1

    async def leave_when_parked(self) -> int:
        while not self.page.all_parked(self.page.hold) or self.page.hold not in self.snapshots:
            if self.page.all_parked(self.page.hold):
                self.page.final = self.page.hold
            await asyncio.sleep(0.005)
        self.page.leave = True
        return self.page.hold

    def _view(self, order: dict[str, Any]) -> Path:
        extents = extents_of(order.pop("dataset"), self.home / "extents")
        order.pop("bare", None)
        catalogue = extents.catalogue
        full = DataOrder.from_json(
            {**order, "num_samples": catalogue.num_samples, "fingerprint": catalogue.fingerprint}
        )
        index = {"samples": catalogue.to_json(), "directory": extents.directory}
        (self.home / "index.json").write_text(json.dumps(index))
        (self.home / "cursor.json").write_text(json.dumps({"order": full.to_json()}))
        return self.home


class Rounds:
    """Runs rounds of the script on workers of the warm pool."""

    def __init__(self, driver: Any, env: Mapping[str, str], home: Path) -> None:
        self.driver, self._env, self.home = driver, env, home
        (home / "data.bin").write_bytes(bytes(range(251)) * 3)
        (home / "train.py").write_text(textwrap.dedent(SCRIPT))
        self.command = Command("script", (str(home / "train.py"), f"{home}/data.bin", str(STEPS)), str(home))
        self._number = 0

    def run(
        self,
        config: ParallelConfig,
        restore: dict[str, Any],
        stop_at: int | None = None,
        every: str = "1",
        replicated: bool = False,
    ) -> tuple[StandIn, list[Any], list[list[Any]]]:
        """Returns the stand-in, how each worker ended, and all records that were printed, sorted by dp and step."""
        self._number += 1
        agent = StandIn(self.home / f"round-{self._number}", self.home / "data.bin", config, restore, stop_at)
        agent.every, agent.replicated = every, replicated
        self.driver.do(agent.serve())
        port = self.driver.do(self.driver.pool.listen("127.0.0.1"))
        stopping = None
        if stop_at is not None:
            stopping = asyncio.run_coroutine_threadsafe(agent.leave_when_parked(), self.driver.loop)
        envs = [{**self._env, **agent.env(rank, port)} for rank in range(config.world_size)]
        try:
            outcomes = self.driver.run(self.command, envs, host_store=True)
        finally:
            if stopping:
                stopping.cancel()
            self.driver.do(agent.close())
        assert agent.errors == []
        return agent, outcomes, sorted(json.loads(line) for one in outcomes for line in one.out.splitlines())


FRESH = {"snapshot": None, "index": None, "values": None, "consumed": 0, "step": 0}


@pytest.fixture(scope="module")
def rounds(driver: Any) -> Iterator[Rounds]:
    home = scratch_dir()
    yield Rounds(driver, {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}, home)
    shutil.rmtree(home)


def by_step(records: list[list[Any]]) -> dict[int, tuple[float, list[int], float]]:
    """Step → (loss, sample ids over all dp ranks, learning rate)."""
    found: dict[int, tuple[float, list[int], float]] = {}
    for _, step, loss, ids, rate, _ in records:
        found[step] = (loss, [*found.get(step, (0, [], 0))[1], *ids], rate)
    return found


def assert_same_training(records: list[list[Any]], expected: list[list[Any]]) -> None:
    ours, theirs = by_step(records), by_step(expected)
    assert list(ours) == [step for step in theirs if step in ours]
    for step, (loss, ids, rate) in ours.items():
        assert loss == pytest.approx(theirs[step][0], rel=1e-12)
        assert (ids, rate) == (theirs[step][1], theirs[step][2])


def test_a_round_that_is_stopped_goes_on_in_another_layout(rounds: Rounds) -> None:
    plain = rounds.driver.fresh([str(rounds.home / "train.py"), *rounds.command.argv[1:]], rounds.home, rounds._env)
    assert plain.code == 0, plain.err
    expected = [json.loads(line) for line in plain.out.splitlines()]
    assert len(expected) == STEPS

    first, outcomes, records = rounds.run(ParallelConfig(tp=2), FRESH, stop_at=2)
    assert [one.code for one in outcomes] == [0, 0], outcomes
    hold = max(first.snapshots)
    assert [step for _, step, *_ in records] == list(range(hold))
    assert_same_training(records, expected)
    names = [event["name"] for event in first.events]
    assert names.count("built") == names.count("first_step") == 2

    second, outcomes, records = rounds.run(ParallelConfig(dp=2), first.snapshots[hold])
    assert [one.code for one in outcomes] == [0, 0], outcomes
    assert {step for _, step, *_ in records} == set(range(hold, STEPS))
    assert_same_training(records, expected)
    assert max(second.snapshots) == STEPS
    restored = {event["derived_seed"] is None for event in second.events if event["name"] == "restored"}
    assert restored == {True, False}, "coordinate dp1 is new, dp0 is not"

    third, outcomes, records = rounds.run(ParallelConfig(), second.snapshots[STEPS])
    assert (outcomes[0].code, records) == (0, [])
    assert third.page.all_done()


def test_a_killed_round_repeats_from_its_newest_snapshot(rounds: Rounds) -> None:
    first, outcomes, whole = rounds.run(ParallelConfig(tp=2), FRESH)
    assert [one.code for one in outcomes] == [0, 0]
    _, outcomes, records = rounds.run(ParallelConfig(tp=2), first.snapshots[5])
    assert [one.code for one in outcomes] == [0, 0]
    assert records == whole[5:], "bit by bit, the random draws too"


def test_a_hold_that_is_lifted_lets_all_go_on(rounds: Rounds) -> None:
    parked = []

    async def lift(agent: StandIn) -> None:
        while not agent.page.all_parked(agent.page.hold):
            await asyncio.sleep(0.005)
        parked.append(agent.page.hold)
        agent.page.propose_hold(NO_HOLD, threading.Lock())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIn, "leave_when_parked", lift)
        agent, outcomes, records = rounds.run(ParallelConfig(tp=2), FRESH, stop_at=2)
    assert 2 <= parked[0] < NO_HOLD
    assert [one.code for one in outcomes] == [0, 0]
    assert len(records) == STEPS
    assert agent.page.all_done()


def test_ranks_that_parked_in_vain_have_taken_no_snapshot_alone(rounds: Rounds) -> None:
    async def lift(agent: StandIn) -> None:
        while agent.page.hold == NO_HOLD or not agent.page.all_parked(agent.page.hold):
            await asyncio.sleep(0.005)
        agent.page.propose_hold(NO_HOLD, threading.Lock())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIn, "leave_when_parked", lift)
        agent, outcomes, records = rounds.run(ParallelConfig(tp=2), FRESH, stop_at=4, every="4")
    assert [one.code for one in outcomes] == [0, 0]
    assert (len(records), sorted(agent.snapshots)) == (STEPS, [4, 8])


@pytest.mark.parametrize(("every", "replicated"), [("1", True), ("0.001s", False), ("auto", False), ("3", True)])
def test_rank_0_says_when_and_all_take_the_same_snapshots(rounds: Rounds, every: str, replicated: bool) -> None:
    first, outcomes, whole = rounds.run(ParallelConfig(dp=2), FRESH, every=every, replicated=replicated)
    assert [one.code for one in outcomes] == [0, 0]
    assert min(first.snapshots) == 1, "the first boundary of a round"
    _, outcomes, records = rounds.run(ParallelConfig(dp=2), first.snapshots[1], stop_at=2, every=every)
    assert [one.code for one in outcomes] == [0, 0]
    steps = {record[1] for record in records}
    assert records == [record for record in whole if record[1] in steps]
    assert min(steps) == 1


def test_what_the_agent_refuses_is_raised_in_the_script(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: StandIn, _: channel.Channel, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "declare":
            raise LayoutError("no room for this")
        return {"dir": str(self._view(args["order"]))} if op == "view" else {}

    monkeypatch.setattr(StandIn, "handle", refuse)
    _, outcomes, _ = rounds.run(ParallelConfig(), FRESH)
    assert (outcomes[0].code, outcomes[0].err) == (LayoutError.exit_code, "tenplexrun: no room for this\n")
