"""One round on one node: prepares state and data, starts the workers, answers them, ends them.

All that is known of a round lives and dies with its session, so that nothing of an old one can disturb a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenplexrun.agent import error_file
from tenplexrun.agent.blame import Blame, of_system
from tenplexrun.agent.dataset_memory import Kept
from tenplexrun.agent.durable import Collector, Declared, PartWriter
from tenplexrun.agent.environment import NodeFacts, worker_env
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.hangs import HangWatcher
from tenplexrun.agent.hosting import Hosting
from tenplexrun.agent.links import Links
from tenplexrun.agent.logs import WorkerLogs
from tenplexrun.agent.replication import Replication
from tenplexrun.agent.transformer import Restored, Transformer
from tenplexrun.agent.workers import Workers, new_page, victims
from tenplexrun.core.control import NONE
from tenplexrun.core.hang import Bounds, Watch
from tenplexrun.core.lifecycle import Event, StopWorkers, WorkersEnded
from tenplexrun.core.rounds import Failure, Round
from tenplexrun.errors import LayoutError, ProcessError, TenplexError
from tenplexrun.ports import CheckpointClient, StoreClient, ViewClient, WorkerExit, WorkerPool, WorkerSpec

POLL_S = 0.002
DROP_TIMEOUT_S = 0.5
LAST_COMMIT_S = 20.0
LOADED_SLOT = 1
"""Where a durable checkpoint is read into: the first snapshot goes into the other one."""


@dataclass(frozen=True, slots=True)
class NodeServices:
    """What a session uses of its node."""

    host: str
    facts: NodeFacts
    control: Path
    pool: WorkerPool
    store: StoreClient
    view: ViewClient
    links: Links
    logs: WorkerLogs
    events: EventLog
    data: Mapping[str, Any] | None
    kept: Kept
    hangs: Bounds
    hosting: Hosting
    checkpoints: CheckpointClient | None = None
    collector: Collector | None = None
    state_bytes: int = 0  # of the files of one rank; 0: the script has none that are kept


class Session:
    """`put` takes the events of this round. Methods run on the agent's loop."""

    def __init__(self, node: str, round_: Round, services: NodeServices, put: Callable[[Event], None]) -> None:
        mine = round_.participant(node)
        assert mine is not None
        self.round, self._node, self._mine, self._services, self._put = round_, node, mine, services, put
        home = services.control.parent
        self._blame = Blame(node, services.host, round_.number, mine.first_rank, services.logs, home)
        self._page = new_page(services.control, round_.number, mine.num_workers)
        self._fence = threading.Lock()
        self._workers = Workers(services.pool, services.control, services.facts.grace_s, services.events)
        self._stopping = False
        self._failed = False
        self._slots: asyncio.Future[dict[str, Any]] | None = None
        self._is_declared = asyncio.Event()
        self._declared: Declared | None = None
        self._digest = ""
        self._sealed: dict[int, int] = {}  # slot by step, until sealed
        self._values: dict[int, dict[str, Any]] = {}
        self._sealing_step = self._sealed_step = self._committing = NONE
        self._snapshot: tuple[dict[str, Any], int] | None = None  # the newest one's id, and its slot
        client, report = services.checkpoints, services.links.written
        self._parts = None if client is None else PartWriter(client, round_, node, report, services.events)
        self._seal: asyncio.Task[None] | None = None
        self._commit: asyncio.Task[None] | None = None
        self._replication = Replication(round_, services.store, services.links, services.events)
        self._views: dict[tuple[int, str], asyncio.Future[str]] = {}
        self._restored: asyncio.Task[Restored] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    # --- start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Move state and start workers, side by side."""
        self._restored = asyncio.ensure_future(self._restore())
        self._starting = asyncio.ensure_future(self._start())

    async def _restore(self) -> Restored:
        transformer = Transformer(self._services.store, self._services.events)
        return await (self._load() if self.round.checkpoint else transformer.restore(self._node, self.round))

    async def _prepare(self) -> None:
        """What else must be there before the workers start."""

    def _env(self, local_rank: int) -> dict[str, str]:
        return worker_env(os.environ, self.round, self._node, local_rank, self._services.facts)

    async def _start(self) -> None:
        services, number = self._services, self.round.number
        specs: list[WorkerSpec] = []
        try:
            await self._prepare()
            data_dirs = await self._show_data()
            for local_rank in range(self._mine.num_workers):
                env = self._env(local_rank)
                env["TORCHELASTIC_ERROR_FILE"] = error_file.make(self._blame.error_path(local_rank))
                if data_dirs:
                    env["TENPLEX_DATA_DIR"] = data_dirs[self._coord(local_rank)["dp"]]
                rank = self._mine.first_rank + local_rank
                out, err = services.logs.open(number, rank, local_rank, self._mine.role)
                specs.append(WorkerSpec(local_rank, env, out, err))
            started = time.time()
            pids = await services.pool.spawn(specs, host_store=self._mine.first_rank == 0)
            self._workers.started(pids)
            self._watching = asyncio.ensure_future(self._watch_for_hangs())
            services.events.emit("spawned", round=number, began=started, seconds=time.time() - started, pids=pids)
        except TenplexError as error:
            self._fail_here("start of the workers", error)
        except OSError as error:
            self._fail_here("start of the workers", of_system(error))
        finally:
            for spec in specs:
                os.close(spec.stdout_fd)
                os.close(spec.stderr_fd)

    async def _show_data(self) -> dict[int, str]:
        """With --data: the view of each dp rank of this node, before its workers start."""
        if self._services.data is None:
            return {}
        dp_ranks = sorted({self._coord(local_rank)["dp"] for local_rank in range(self._mine.num_workers)})
        return {dp_rank: await self._show(self._services.data, dp_rank) for dp_rank in dp_ranks}

    # --- what workers ask -----------------------------------------------------------------------------------------

    async def answer(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """One request of a worker. Raises what the store and the view raise, to be carried to the script."""
        local_rank = int(args.pop("local_rank", 0))
        if op == "declare":
            return await self._declare(args["layout"], args["config"], args["groups"])
        if op == "restore":
            if self.round.checkpoint is not None and not args.get("declared", True):
                return {"url": self.round.checkpoint.url, "step": self.round.checkpoint.step}
            return (await self._restoring()).to_json()
        if op == "sealed":
            self._on_sealed(int(args["step"]), int(args["slot"]), args.get("values"), bool(args["last"]))
            return {}
        if op == "view":
            return {"dir": await self._show(args["order"], self._coord(local_rank)["dp"])}
        if op == "event":
            self._services.events.emit("worker", round=self.round.number, local_rank=local_rank, **args)
            return {}
        raise ProcessError(f"the agent answers no request {op!r}")

    async def source(self) -> str | None:
        """The index of the snapshot that the round goes on from, if some of that is on this node already."""
        if self.round.snapshot is None or self.round.checkpoint is not None:
            return None
        with contextlib.suppress(TenplexError):
            return await self._services.store.index(self.round.snapshot.to_json())
        return None

    async def _restoring(self) -> Restored:
        assert self._restored is not None
        return await asyncio.shield(self._restored)

    async def _load(self) -> Restored:
        """Read this node's part of the round's durable checkpoint: it becomes a snapshot like any other."""
        client, checkpoint, services = self._services.checkpoints, self.round.checkpoint, self._services
        assert client is not None
        assert checkpoint is not None
        await self._is_declared.wait()
        assert self._declared is not None
        assert self._slots is not None
        began, declared = time.time(), self._declared
        try:
            slot = (await asyncio.shield(self._slots))["slots"][LOADED_SLOT]
            config, ranks = self.round.parallel.to_json(), list(self._mine.ranks)
            loaded = await client.load(checkpoint, declared.layout, config, ranks, declared.groups, slot)
            await self._seal_slot(checkpoint.step, LOADED_SLOT, loaded["values"], loaded["without"])
            assert self._snapshot is not None
            index = await services.store.index(self._snapshot[0])
        except TenplexError as error:
            self._fail_here(f"load of {checkpoint.url}", error)
            return await asyncio.Future()  # the workers that wait for it are ended
        size, seconds = loaded["num_bytes"], time.time() - began
        services.events.emit("loaded", round=self.round.number, url=checkpoint.url, num_bytes=size, seconds=seconds)
        return Restored(checkpoint.step, loaded["consumed"], self._snapshot[0], index, loaded["values"])

    async def _declare(self, layout: dict[str, Any], config: dict[str, Any], groups: dict[str, int]) -> dict[str, Any]:
        if config != self.round.parallel.to_json():
            raise LayoutError(f"the script built a mesh of {config}, the round has {self.round.parallel.to_json()}")
        if self._slots is None:
            self._digest = json.dumps(layout, sort_keys=True)
            self._slots = asyncio.ensure_future(self._open(layout, config))
            self._declared = Declared(layout, groups)
            self._is_declared.set()
        elif json.dumps(layout, sort_keys=True) != self._digest:
            raise LayoutError("two ranks of this node declare different layouts of the job's state")
        return await asyncio.shield(self._slots)

    async def _open(self, layout: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        ranks, buddy = list(self._mine.ranks), self.round.buddy_claim(self._node)
        owed = None if buddy is None else buddy.to_json()
        opened = await self._services.store.open_round(self.round.number, layout, config, ranks, owed)
        self._replication.opened(opened)
        return {"slots": opened["slots"], "replicated": opened["replicated"]}

    def _on_sealed(self, step: int, slot: int, values: dict[str, Any] | None, last: bool) -> None:
        """A rank has written its part. When the last of this node has, the store makes it a snapshot."""
        if last:
            self._services.links.ends(self.round.number, step)
        if values is not None:
            self._values[step] = values
        self._sealed.setdefault(step, slot)
        if step <= self._sealing_step or self._page.all_sealed() < step or step not in self._values:
            return
        self._sealing_step = step
        # A task of the session: the connection that brought the last word may end with its worker.
        self._seal = asyncio.ensure_future(self._make_snapshot(step, self._sealed.pop(step), self._values.pop(step)))

    async def _make_snapshot(self, step: int, slot: int, values: dict[str, Any]) -> None:
        try:
            await self._seal_slot(step, slot, values)
        except TenplexError as error:
            self._fail_here(f"snapshot of step {step}", error)

    async def _seal_slot(self, step: int, slot: int, values: dict[str, Any], without: Sequence[str] = ()) -> None:
        self._snapshot = await self._services.store.seal(self.round.number, step, slot, values, without), slot
        self._sealing_step = max(step, self._sealing_step)
        self._sealed_step = step
        self._services.events.emit("sealed", round=self.round.number, step=step)
        if not without:  # else nobody could have a copy of all of it; the next one will do
            await self._replication.sealed(step, slot)

    async def _show(self, order: Mapping[str, Any], dp_rank: int) -> str:
        held = [holding for source in (self.round.sources or {}).values() for holding in source.holdings]
        begun = self.round.checkpoint.consumed if self.round.checkpoint else 0
        consumed = max((holding.consumed for holding in held), default=begun)
        key = (dp_rank, json.dumps(order, sort_keys=True))
        if key not in self._views:
            placement = self.round.placement(self._node).to_json()
            dp_size = self.round.parallel.dp
            showing = self._services.view.show(self.round.number, dict(order), dp_rank, dp_size, consumed, placement)
            self._views[key] = asyncio.ensure_future(showing)
        return await asyncio.shield(self._views[key])

    async def committed(self, step: int, checkpoint: str | None) -> None:
        """Every node has sealed `step` of this round, and it is on as many as asked; with the tag of a `checkpoint` it
        is to be written, too."""
        if step <= self._committing:
            return  # said again
        self._committing = step
        # A task of the session: the link that brought the news ends when another agent decides from then on, and nobody
        # would say it again to any effect.
        self._commit = asyncio.ensure_future(self._make_commit(step, checkpoint))
        await asyncio.shield(self._commit)

    async def _make_commit(self, step: int, checkpoint: str | None) -> None:
        try:
            await self._services.store.commit(self.round.number, step)
            if checkpoint is not None:
                await self._write_part(step, checkpoint)
        except TenplexError as error:
            self._fail_here(f"commit of step {step}", error)
            return
        self._page.committed = step
        self._services.events.emit("committed", round=self.round.number, step=step)

    async def _write_part(self, step: int, tag: str) -> None:
        """Before the workers hear of the commit: from then on a later snapshot may be made."""
        if self._parts is None or self._declared is None or self._snapshot is None or step != self._sealed_step:
            return
        record, slot = self._snapshot
        index = await self._services.store.index(record)
        self._page.pinned = slot
        self._parts.begin(step, tag, index, self._declared, functools.partial(self._unpin, slot))

    def _unpin(self, slot: int) -> None:
        if self._page.pinned == slot:  # no later one has been pinned
            self._page.pinned = NONE

    # --- stopping -------------------------------------------------------------------------------------------------

    def hold(self, step: int | None) -> int | None:
        """Write a hold (None: only look). Returns the newest step begun here; None if no worker counts steps."""
        started = self._page.max_started() if step is None else self._page.propose_hold(step, self._fence)
        counting = any(self._page.started(local_rank) != NONE for local_rank in range(self._page.num_ranks))
        return started if counting else None

    async def parked(self, hold: int) -> None:
        """All nodes stop before step `hold`. Return when every worker here waits there, and that is sealed."""
        self._page.final = hold
        while not (self._page.all_parked(hold) and self._sealed_step >= hold):
            await asyncio.sleep(POLL_S)

    async def stop(self, order: StopWorkers) -> None:
        """End all workers. Returns when none lives."""
        self._stopping = True
        for task in filter(None, [self._starting, self._restored, self._watching]):
            task.cancel()
        await self._workers.stop(order, self._leave)
        await self._replication.stop()
        if under_way := [*filter(None, [self._seal, self._commit])]:
            await asyncio.wait(under_way)  # what was written whole must be in the inventory
        if self._parts is not None:
            await self._parts.cancel()
        await self._services.pool.sweep()
        self._services.logs.close_round(self.round.number)
        with contextlib.suppress(TenplexError, asyncio.TimeoutError):  # dead or stopped: the next round need not wait
            await asyncio.wait_for(self._services.view.drop(self.round.number), DROP_TIMEOUT_S)

    def progress(self) -> dict[str, Any]:
        """For people: the step begun, the newest snapshots, on how many nodes each part of a committed one is."""
        copies = min(self.round.replicas, len(self.round.participants))
        snapshots = {"committed": self._newest_commit(), "sealed": self._sealed_step, "copies": copies}
        return {"round": self.round.number, "step": self.hold(None), **snapshots}

    def pass_on(self, signum: int) -> tuple[int, int]:
        """A signal for the script: to how many workers it went, and how many there are."""
        return self._workers.pass_on(signum)

    def victims(self, failure: Failure) -> str:
        """Who else ended badly here."""
        return victims(self._workers.ends, self._mine.first_rank, failure, self._node)

    def _leave(self) -> None:
        self._page.leave = True

    # --- exits ----------------------------------------------------------------------------------------------------

    def on_exit(self, exit_: WorkerExit) -> None:
        end = self._workers.ended(exit_)
        if end is None or self._stopping or self._failed:
            return
        if exit_.code != 0:
            self._fail(self._blame.ended(end))
        elif not self._workers:
            self._finishing = asyncio.ensure_future(self._finished())

    async def _finished(self) -> None:
        """All have exited with 0. Where checkpoints are written, the last snapshot must be known to be one before."""
        deadline = time.monotonic() + LAST_COMMIT_S
        while self._parts and self._page.committed < self._page.all_sealed() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self._put(WorkersEnded(self.round.number, None, self._newest_commit()))

    async def _watch_for_hangs(self) -> None:
        if self._services.hangs.never:
            return
        watch = Watch(self._services.hangs, self.round.start_step)
        watcher = HangWatcher(watch, self._page, self._services.control, self._workers.alive)
        hang = await watcher.found(self._services.pool.signal)
        if not self._stopping and not self._failed:
            pid = next(pid for pid, local_rank in self._workers.alive.items() if local_rank == hang.ranks[0])
            self._fail(self._blame.hung(hang, pid))

    def _fail_here(self, what: str, error: TenplexError) -> None:
        """Something that the workers wait for has failed on this node: nobody would ever wake them."""
        self._fail(self._blame.node_itself(what, error))

    def _fail(self, failure: Failure) -> None:
        self._failed = True
        kind = failure.cause.kind
        self._services.events.emit(kind, round=self.round.number, at=failure.at, rank=failure.rank, how=failure.how)
        self._put(WorkersEnded(self.round.number, failure, self._newest_commit()))

    def _newest_commit(self) -> int | None:
        return None if self._page.committed == NONE else self._page.committed

    def _coord(self, local_rank: int) -> dict[str, int]:
        return self.round.parallel.coord(self._mine.first_rank + local_rank)
