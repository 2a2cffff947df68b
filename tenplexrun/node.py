"""One node: its processes and adapters, put together around its agent. A composition root."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tenplexrun import channel
from tenplexrun.agent import dataset_memory
from tenplexrun.agent.agreement import Agreement
from tenplexrun.agent.app import Agent, Launch
from tenplexrun.agent.desk import Desk
from tenplexrun.agent.durable import Collector
from tenplexrun.agent.environment import NodeFacts
from tenplexrun.agent.etcd import Etcd
from tenplexrun.agent.etcd_members import Members
from tenplexrun.agent.etcd_v3 import EtcdV3
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.hosting import Hosting
from tenplexrun.agent.links import Links
from tenplexrun.agent.logs import WorkerLogs
from tenplexrun.agent.meeting import Meeting, find_meeting, named_ports, own_host
from tenplexrun.agent.pool import SINGLE_THREADED, Pool
from tenplexrun.agent.processes import Processes, module_command
from tenplexrun.agent.rendezvous import Charter, token_proof
from tenplexrun.agent.session import NodeServices
from tenplexrun.agent.signals import Signals
from tenplexrun.assignment import least_cost
from tenplexrun.config import JobSpec
from tenplexrun.core.hosting import FULL
from tenplexrun.core.membership import Settings
from tenplexrun.core.output import Output
from tenplexrun.core.rounds import Member, Verdict
from tenplexrun.errors import ProcessError
from tenplexrun.store.client import StoreClient
from tenplexrun.terms import terms_of
from tenplexrun.vfs.client import ViewClient
from tenplexrun.worker.checkpoint_client import CheckpointClient

WARM_UP_NEWS_S = 10.0
MEETING_NEWS_S = 5.0
PATROL_S, SILENT_S, STRIKES = 2.0, 10.0, 3
LOADING_STRIKES = 7  # of the checkpoint process: imports may hold it up
LONGEST_PAUSE_S = 60.0  # before the checkpoint process is started again
MAX_RESTARTS = 20  # of the store or the view, killed from outside; ends of their own are never repeated


@dataclass
class Node:
    """The processes and adapters of one node."""

    spec: JobSpec
    node: str
    node_dir: Path
    processes: Processes
    pool: Pool
    events: EventLog
    token: str
    output: Output
    began: float  # when it was launched, monotonic
    pids: dict[str, int] = field(default_factory=dict)  # of those that are started again
    _starting: asyncio.Future[None] | None = None  # the checkpoint process, after a pause

    async def run(self, signals: Signals) -> Verdict:
        spec = self.spec
        (self.node_dir / "token").touch(mode=0o600)
        (self.node_dir / "token").write_text(self.token)
        data_bytes = dataset_memory.budget(spec.data_bytes, self.node_dir)
        died: asyncio.Queue[Verdict] = asyncio.Queue()
        pool = self.pool
        host = own_host(spec.meeting.endpoints, spec.local_addr)
        await asyncio.gather(self._start_store(host), self._start_view(), self._start_checkpoints())
        growing = spec.meeting.hosted and bool(spec.meeting.endpoints) and spec.max_nodes >= FULL
        hosting = Hosting(self.processes, self.node_dir, self.events, host, growing)
        store = StoreClient(str(self.node_dir / "store.sock"))
        kept = dataset_memory.Kept(self.events)
        view = ViewClient(str(self.node_dir / "view.sock"), self._view_failed, kept.told, self._view_recovered)
        checkpoints = self._checkpoints()
        watching = self._watch_over(host, hosting, died, checkpoints is not None)
        links, desk = Links(self.node, self.token, spec.tls), Desk()
        links.agreement = Agreement(spec.replica_check, store, self.events)
        logs = WorkerLogs(self.output, alias=f"{spec.run_id}_{self.node}")
        link = hosting.name = await links.start(host)
        meeting, coordination = await self._meet(hosting)
        links.on_invite = hosting.join
        try:
            store_address = channel.join_host_port(host, await store.hello())
            shown = await view.hello()
            self._tell_start(meeting, shown)
            await desk.start(f"unix:{self.node_dir / 'agent.sock'}")
            place = (spec.num_workers, spec.node_rank, spec.role, spec.rack)
            member = Member(self.node, host, link, store_address, *place)
            services = NodeServices(
                host=host,
                facts=self._facts(store_address),
                control=self.node_dir / "control",
                pool=pool,
                store=store,
                view=view,
                links=links,
                logs=logs,
                events=self.events,
                data=await self._data(view),
                kept=kept,
                hangs=spec.timeouts.hangs,
                checkpoints=checkpoints,
                collector=self._collector(checkpoints),
                state_bytes=spec.state_bytes,
                hosting=hosting,
            )
            await self._warm_up()
            member = replace(member, ready_s=round(time.monotonic() - self.began, 3), data_bytes=data_bytes)
            charter = Charter(token_proof(self.token), terms_of(spec), host)
            rest = (spec.timeouts.lease_s, spec.meeting.hosted, charter)
            launch = Launch(spec.run_id, member, self._settings(), *rest)
            agent = Agent(launch, coordination, services, desk, died, signals)
            agent.on_joined = lambda key: self.processes.set_cleanup(coordination.removals(key) if key else ())
            return await agent.run()
        finally:
            for task in watching:
                task.cancel()
            await desk.close()
            await links.close()
            await pool.close()
            if self._starting is not None:
                self._starting.cancel()
            if checkpoints is not None:
                await checkpoints.close()
            await logs.close()
            await coordination.close()

    def _watch_over(
        self, host: str, hosting: Hosting, died: asyncio.Queue[Verdict], checkpoints: bool
    ) -> list[asyncio.Future[None]]:
        """Those of our processes that are started again."""
        watches = [
            self._keep_alive(host, hosting, died),
            self._patrol("view", STRIKES, self._view_failed),
            self._patrol("store", STRIKES, self._store_failed),
        ]
        if checkpoints:
            watches.append(self._patrol("checkpoints", LOADING_STRIKES, self._checkpoints_failed))
        return [asyncio.ensure_future(each) for each in watches]

    async def _meet(self, hosting: Hosting) -> tuple[Meeting, Etcd]:
        """The run's etcd, and what this node has to know to host a part of it."""
        wanted = self.spec.meeting
        text = f"no etcd answers yet at {', '.join(wanted.endpoints) or 'this node'}, waiting for it"
        news = asyncio.get_running_loop().call_later(MEETING_NEWS_S, self.events.say, text)
        try:
            meeting = await find_meeting(wanted, self.spec.local_addr, hosting)
        finally:
            news.cancel()
        coordination = meeting.connect()
        if hosting.growing and isinstance(coordination, EtcdV3):
            hosting.members, hosting.named = Members(coordination), named_ports(wanted.endpoints)
            hosting.port = channel.split_host_port(meeting.endpoints[0])[1]
        return meeting, coordination

    def _tell_start(self, meeting: Meeting, shown: Mapping[str, Any]) -> None:
        # a .npy begins with a header: as real files tensors would take their memory a second time
        state = "" if shown["mode"] == "fuse" else ", the state only by HTTP"
        self.events.say(
            f"run {self.spec.run_id}, etcd at {meeting}; data shown by {shown['mode']} ({shown['reason']}){state}; "
            f"{self._limits()}"
        )
        self.events.emit(
            "started",
            pid=os.getpid(),
            endpoint=",".join(meeting.endpoints),
            api=meeting.api,
            view=shown["mode"],
            dir=str(self.node_dir),
        )

    async def _warm_up(self) -> None:
        """Wait for the pool's imports; nobody should take a slow disk for a hang."""
        warming, began = asyncio.ensure_future(self.pool.ready()), time.monotonic()
        while not (await asyncio.wait([warming], timeout=WARM_UP_NEWS_S))[0]:
            self.events.say(f"importing torch for the workers, {time.monotonic() - began:.0f} s so far")
        await warming

    def _settings(self) -> Settings:
        spec, times = self.spec, self.spec.timeouts
        return Settings(
            min_nodes=spec.min_nodes,
            max_nodes=spec.max_nodes,
            max_restarts=spec.max_restarts,
            sizes=spec.sizes,
            join_window_s=times.join_window_s,
            rendezvous_timeout_s=times.rendezvous_s,
            gather_timeout_s=times.grace_s + 30,
            park_timeout_s=times.grace_s + 30,
            unreachable_s=times.unreachable_s,
            max_churn=spec.max_churn,
            replicas=spec.replicas,
            way=spec.way,
            assign=least_cost,
            durable=spec.checkpoints is not None,
        )

    def _facts(self, store_address: str) -> NodeFacts:
        spec = self.spec
        return NodeFacts(
            run_id=spec.run_id,
            virtual_local_rank=spec.virtual_local_rank,
            signals=",".join(signum.name for signum in spec.signals),
            max_restarts=spec.max_restarts,
            snapshot_every=str(spec.snapshot_every),
            checkpoints=spec.checkpoints is not None and spec.checkpoints.home is not None,
            grace_s=spec.timeouts.grace_s,
            node_dir=str(self.node_dir),
            store=store_address,
            token_file=str(self.node_dir / "token"),
            agent=f"unix:{self.node_dir / 'agent.sock'}",
            control=str(self.node_dir / "control"),
        )

    def _limits(self) -> str:
        times = self.spec.timeouts
        return (
            f"a silent node is given up after {times.lease_s:g} s, a stop has {times.grace_s:g} s of grace, "
            f"joins are gathered for {times.join_window_s:g} s, too few nodes wait {times.rendezvous_s:g} s, "
            f"{times.hangs}"
        )

    def _checkpoints(self) -> CheckpointClient | None:
        spec = self.spec.checkpoints
        if spec is None:
            return None
        return CheckpointClient(str(self.node_dir / "checkpoints.sock"), spec.home, spec.origin, spec.keep)

    def _collector(self, client: CheckpointClient | None) -> Collector | None:
        spec = self.spec.checkpoints
        if client is None or spec is None or not spec.home:
            return None
        return Collector(client, spec.every, self.events, self.spec.timeouts.grace_s)

    async def _data(self, view: ViewClient) -> dict[str, object] | None:
        data = self.spec.data
        if data is None:
            return None
        from tenplexrun import formats  # numpy; few launches need it

        dataset = formats.absolute(data.dataset)
        described = await view.describe(dataset)
        return {
            "dataset": dataset,
            "num_samples": described["num_samples"],
            "fingerprint": described["fingerprint"],
            "seed": data.seed,
            "global_batch": data.global_batch,
            "micro_batch": data.micro_batch,
        }

    # --- processes ------------------------------------------------------------------------------------------------

    async def _start_store(self, host: str) -> None:
        config = {
            "dir": str(self.node_dir),
            "host": host,
            "token_file": str(self.node_dir / "token"),
            "socket": str(self.node_dir / "store.sock"),
            "tls": self.spec.tls and self.spec.tls.to_json(),
        }
        command = module_command("tenplexrun.store.server", json.dumps(config))
        self.pids["store"] = await self.processes.spawn("store", command)

    async def _start_view(self) -> None:
        config = {
            "dir": str(self.node_dir),
            "socket": str(self.node_dir / "view.sock"),
            "mode": self.spec.view_mode,
            "window_bytes": self.spec.view_window_bytes,
            "store": str(self.node_dir / "store.sock"),
        }
        command = module_command("tenplexrun.vfs.server", json.dumps(config))
        self.pids["view"] = await self.processes.spawn("view", command)

    async def _patrol(self, name: str, strikes: int, failed: Callable[[str], None]) -> None:
        """Kill a process that hangs, and with it the waiting for its answers; `_keep_alive` starts it again. Of a view
        that shows files nobody waits for any.

        `strikes`: how often in a row it may not answer.
        """
        missed, caller = 0, channel.Caller(f"unix:{self.node_dir / name}.sock", name)
        try:
            while True:
                await asyncio.sleep(PATROL_S)
                pid = self.pids[name]
                try:
                    if (await caller.hello(SILENT_S)).get("mode", "fuse") != "fuse":
                        return
                    missed = 0
                except ProcessError as error:
                    missed = missed + 1 if pid == self.pids[name] else 0
                    if missed == strikes:
                        failed(f"it hangs, and is started anew: {error}")
                        self.processes.kill(pid)
                        missed = 0
        finally:
            await caller.close()

    def _view_failed(self, message: str) -> None:
        self.events.emit("view_failed", message=message)
        self.events.say(f"the dataset view of this node: {message}")

    def _view_recovered(self, message: str) -> None:
        self.events.emit("view_recovered", message=message)
        self.events.say(f"the dataset view of this node: {message}")

    def _store_failed(self, message: str) -> None:
        self.events.emit("store_failed", message=message)
        self.events.say(f"the tensor store of this node: {message}")

    def _checkpoints_failed(self, message: str) -> None:
        self.events.say(f"the checkpoint process of this node: {message}")

    async def _start_checkpoints(self, pause_s: float = 0.0) -> None:
        if self.spec.checkpoints is None:
            return
        await asyncio.sleep(pause_s)
        config = json.dumps({"socket": str(self.node_dir / "checkpoints.sock")})
        argv = module_command("tenplexrun.worker.checkpointer", config)
        self.pids["checkpoints"] = await self.processes.spawn("checkpoints", argv, env=SINGLE_THREADED)

    async def _keep_alive(self, host: str, hosting: Hosting, died: asyncio.Queue[Verdict]) -> None:
        """Start store, view and checkpoint process again when they die; what cannot be replaced ends this node.
        Training does not need the checkpoint process, which may die as often as it does."""
        restart = {
            "store": lambda: self._start_store(host),
            "view": self._start_view,
        }
        restarts: Counter[str] = Counter()
        while True:
            ended = await self.processes.exits.get()
            self.events.emit("process_ended", name=ended.name, code=ended.code)
            restarts[ended.name] += 1
            if ended.name == "checkpoints":
                pause = min(LONGEST_PAUSE_S, 0.1 * 2 ** min(restarts["checkpoints"] - 1, 10))
                self._checkpoints_failed(f"it has ended with {ended.code}, and is started anew in {pause:g} s")
                self._starting = asyncio.ensure_future(self._start_checkpoints(pause))
            elif ended.name in restart and ended.code < 0 and restarts[ended.name] <= MAX_RESTARTS:
                await restart[ended.name]()
            elif ended.name in restart:
                died.put_nowait(
                    Verdict(max(ended.code, 1), f"the {ended.name} of this node gave up; its reason is above")
                )
            elif ended.name == "etcd":
                reason = hosting.ended(ended.pid, ended.code)
                if reason is not None:
                    died.put_nowait(Verdict(ProcessError.exit_code, reason))
            elif ended.name == "guardian":
                reason = f"the guardian of this node ended with {ended.code}; start the node again"
                died.put_nowait(Verdict(ProcessError.exit_code, reason))
