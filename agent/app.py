"""The agent: one queue of events, one writer. Events go to `core.lifecycle`, its actions to the adapters."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import signal
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from tenplexrun.agent import dataset_memory
from tenplexrun.agent.bulletin import Bulletin
from tenplexrun.agent.decider import Decider
from tenplexrun.agent.desk import Desk
from tenplexrun.agent.hosting import LEAVE_TIMEOUT_S, URGENT_S
from tenplexrun.agent.links import is_gone
from tenplexrun.agent.outage import PERSIST_S, Patience
from tenplexrun.agent.rendezvous import Charter, Held, bury, join_run, leave_run, resume
from tenplexrun.agent.session import NodeServices, Session
from tenplexrun.agent.signals import Signals
from tenplexrun.agent.state_files import FilesSession
from tenplexrun.core import lifecycle as lc
from tenplexrun.core import rounds
from tenplexrun.core.lifecycle import Lifecycle
from tenplexrun.core.membership import Settings
from tenplexrun.core.rounds import Member, Request, Round, Verdict
from tenplexrun.core.snapshots import Holding
from tenplexrun.errors import CoordinationError, ProcessError, RunGoneError, TenplexError
from tenplexrun.ports import Coordination, KeyValue, Lease
from tenplexrun.tasks import end

RETRY_S = 0.3
PING_S = 2.0
ENDING_THE_JOB = (signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the composition root hands over. `hosted`: nodes of the job host the coordination store. `charter`: what
    all nodes must have in common."""

    run_id: str
    member: Member
    settings: Settings
    lease_s: float
    hosted: bool
    charter: Charter


class Agent:
    """Runs this node's part of a job to its end. `run` returns the verdict."""

    def __init__(
        self,
        launch: Launch,
        coordination: Coordination,
        services: NodeServices,
        desk: Desk,
        died: asyncio.Queue[Verdict],
        signals: Signals,
    ) -> None:
        self._launch, self._coordination, self._services, self._desk = launch, coordination, services, desk
        self._died, self._signals, self._hosting = died, signals, services.hosting
        self.on_joined: Callable[[str], None] = lambda key: None  # "": it is no member any more
        self._member = launch.member
        self._machine = Lifecycle(self._member.node)
        self._queue: asyncio.Queue[lc.Event] = asyncio.Queue()
        self._acks: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._last_ack: tuple[str, str] | None = None
        self._round_seen: KeyValue | None = None
        self._session: Session | None = None
        self._folder = ""
        self._lease: Lease | None = None
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._membership: list[asyncio.Task[Any]] = []
        services.links.bind(self._on_commit, self._on_lost, services.collector)
        if services.links.agreement is not None:
            services.links.agreement.end = self._request

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Join, serve rounds until the job ends or this node leaves, and leave cleanly."""
        self._signals.bind(self._on_signal, self._pass_on)
        try:
            await self._unless_ended(self._join())
            for source in (self._follow_exits, self._follow_deaths, self._write_acks, self._handle_events, self._ping):
                self._spawn(source())
            return await self._verdict
        finally:
            await self._close()

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it, but no longer than until the verdict."""
        task = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, self._verdict}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await end([task])
        elif not task.cancelled():
            task.result()

    async def _join(self) -> None:
        """Become a member, as a new node each time."""
        launch, services, member = self._launch, self._services, self._member
        place = (launch.run_id, member, launch.lease_s, is_gone, self._folder, launch.charter, services.events.say)
        self._folder, self._lease = await join_run(self._coordination, *place)
        self.on_joined(self._lease.key)
        if services.checkpoints is not None:
            services.checkpoints.joined(self._folder)
        self._round_seen, events = None, services.events
        events.emit("joined", folder=self._folder, link=member.link, store=member.store, workers=member.num_workers)
        arguments = (launch.settings, services.store.layout, events, launch.lease_s, services.links.linked)
        self._decider = Decider(self._coordination, self._folder, *arguments, services.checkpoints, services.collector)
        self._decider.steward = self._hosting.steward(services.links.invite)
        self._membership = [
            self._spawn(self._follow_round()),
            self._spawn(self._watch_lease(self._lease)),
            self._spawn(self._decider.run(member.node, member.link)),
        ]

    async def _watch_lease(self, lease: Lease) -> None:
        await lease.lost.wait()
        self._services.events.emit("lease_lost")
        self._decider.forbearance.doubt(time.monotonic())
        self._spawn(self._persistently(self._resume, math.inf))

    async def _resume(self) -> None:
        """This node's key is gone: write it again if the round is still the same, else join as a new node."""
        if self._round_seen is None:
            self._folder = ""  # nothing has begun
        else:
            launch, seen = self._launch, self._round_seen
            held = Held(launch.run_id, self._folder, seen, launch.charter)
            found = await resume(self._coordination, held, self._member, launch.lease_s)
            if found == "ended":
                return  # the watch of the round brings the verdict
            if found != "moved":
                self._services.events.emit("resumed")
                self._services.events.say("this node's key in etcd was gone; it is there again, and the round goes on")
                self._lease = found
                self._membership.append(self._spawn(self._watch_lease(found)))
                if self._last_ack is not None:
                    self._acks.put_nowait(self._last_ack)  # an etcd that came back empty has lost it
                return
        self._services.events.emit("fenced")
        self._services.events.say("this node was taken for dead: its workers stop, and it joins again as a new one")
        self._spawn(self._rejoin())

    async def _rejoin(self) -> None:
        await end(self._membership)
        if self._session is not None:
            await self._session.stop(lc.StopWorkers(self._session.round.number, "kill"))
            self._session = self._desk.session = None
        self._member = replace(self._member, node=uuid.uuid4().hex[:8], ready_s=0.0)
        self._machine = Lifecycle(self._member.node)
        await self._services.links.rename(self._member.node)
        self._services.events.node = self._member.node
        await self._persistently(self._join)

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.stop(lc.StopWorkers(self._session.round.number, "kill"))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(end([*self._tasks]), LEAVE_TIMEOUT_S)
        if self._lease is not None:
            with contextlib.suppress(TenplexError, asyncio.TimeoutError):
                await asyncio.wait_for(self._leave(self._lease), LEAVE_TIMEOUT_S)

    async def _leave(self, lease: Lease) -> None:
        await leave_run(self._coordination, self._folder, lease)
        self.on_joined("")
        if self._verdict.done():
            await self._hosting.outlast(lambda: self._coordination.list(f"{self._folder}/members"), self._signals)

    def _finish(self, verdict: Verdict) -> None:
        """End with this verdict, or with the one that all nodes have been told."""
        round_ = self._machine.round
        if not self._verdict.done():
            self._verdict.set_result(round_.verdict if round_ is not None and round_.verdict is not None else verdict)

    # --- sources of events ----------------------------------------------------------------------------------------

    async def _follow_round(self) -> None:
        key = f"{self._folder}/round"
        async for content in self._coordination.watch(key):
            if key in content:
                self._round_seen = content[key]
                self._decider.forbearance.has_round = True
                round_ = rounds.round_from_json(json.loads(content[key].value))
                self._services.links.seen(round_)
                await self._queue.put(lc.RoundSeen(round_))

    async def _follow_exits(self) -> None:
        while True:
            exit_ = await self._services.pool.exits.get()
            if self._session is not None:
                self._session.on_exit(exit_)

    async def _follow_deaths(self) -> None:
        """A process that cannot be replaced has died: this node is no use any more."""
        self._finish(await self._died.get())

    async def _ping(self) -> None:
        """Without its store a job trains on, but can neither change nor end together: not for ever."""
        launch, services, verdict = self._launch, self._services, None
        bulletin = Bulletin(self._coordination, services.store, services.kept, launch.settings.max_restarts)
        patience = Patience(time.monotonic(), launch.lease_s, launch.hosted, services.events.say)
        while verdict is None:
            await asyncio.sleep(PING_S)
            try:
                await self._coordination.get(f"{self._folder}/decider")
                patience.answered(time.monotonic())
                if await self._hosting.refresh() and self._lease is not None:
                    self.on_joined(self._lease.key)
                if self._session is not None:
                    await bulletin.publish(self._session, self._folder, self._member.node)
            except CoordinationError as error:
                self._services.events.emit("store_away", message=str(error))
                verdict = patience.away(time.monotonic(), self._machine.training)
        self._finish(verdict)

    async def _on_commit(self, round_number: int, step: int, checkpoint: str | None) -> None:
        if self._session is not None and self._session.round.number == round_number:
            await self._session.committed(step, checkpoint)

    async def _on_lost(self, node: str, link: str) -> None:
        """An agent's port refuses connections: it is gone. Say so in the store, which then says so to all."""
        if self._verdict.done():  # so do all now
            return
        self._services.events.emit("agent_gone", lost=node, link=link)
        self._decider.forbearance.proved_gone.add(node)
        await self._persistently(functools.partial(bury, self._coordination, self._folder, node), math.inf)

    def _on_signal(self, signum: signal.Signals) -> None:
        code, urgent, round_ = 128 + signum, self._signals.urgent, self._machine.round
        if round_ is None:
            self._finish(Verdict(code, f"ended by {signum.name}"))
            return
        # The only node that hosts the store takes it along, and with it whatever the others could agree on.
        ends = signum in ENDING_THE_JOB or self._hosting.sole or round_.phase == "ended"
        self._services.events.say(
            f"{signum.name}: " + ("the job ends" if ends else "this node leaves") + urgent * ", at once"
        )
        node = self._member.node
        if urgent:
            self._hurry(Verdict(code, f"ended by {signum.name}, asked twice"), wait=ends)
        if ends:
            detail = f"ended by {signum.name} on {node}"
            self._request(Request(uuid.uuid4().hex[:8], "end", code=code, detail=detail, signum=signum, urgent=urgent))
        elif not urgent:
            self._machine.draining = True
            if self._machine.live is None:
                self._finish(Verdict(code, f"left by {signum.name}"))
                return
            self._request(Request(node, "drain", node=node, code=code, detail=signum.name, signum=signum))

    def _hurry(self, verdict: Verdict, wait: bool) -> None:
        """Asked twice: no grace here. `wait`: for the others, who are to hear of it, too; but not for long."""
        if self._session is not None:
            self._spawn(self._session.stop(lc.StopWorkers(self._session.round.number, "kill")))
        asyncio.get_running_loop().call_later(URGENT_S if wait else 0.0, self._finish, verdict)

    def _request(self, request: Request) -> None:
        document = json.dumps(rounds.to_json(request))
        self._spawn(
            self._persistently(lambda: self._coordination.put(f"{self._folder}/requests/{request.id}", document))
        )

    def _pass_on(self, signum: signal.Signals) -> None:
        told, all_ = self._session.pass_on(signum) if self._session is not None else (0, 0)
        self._services.events.say(f"{signum.name}: passed on to the {told} of {all_} workers here that handle it")

    # --- the one queue --------------------------------------------------------------------------------------------

    async def _handle_events(self) -> None:
        while True:
            event = await self._queue.get()
            for action in self._machine.on(event):
                self._do(action)

    def _do(self, action: lc.Action) -> None:
        if isinstance(action, lc.StartRound):
            self._start_round(action.round)
        elif isinstance(action, lc.Hold):
            assert self._session is not None
            self._queue.put_nowait(lc.Held(action.round, action.hold, self._session.hold(action.hold)))
        elif isinstance(action, lc.Exit):
            self._finish(action.round.verdict or Verdict(0, "the job has ended"))
        elif isinstance(action, lc.Leave):
            self._finish(Verdict(143, "this node has left, the job goes on"))
        elif isinstance(action, lc.StandBy):
            self._services.events.say(f"round {action.round.number} runs without this node, which waits to be taken in")
        elif isinstance(action, lc.SendAck):
            key = f"{self._folder}/acks/{action.round}/{self._member.node}"
            self._last_ack = (key, json.dumps(rounds.to_json(action.ack)))
            self._acks.put_nowait(self._last_ack)
        elif isinstance(action, lc.AwaitParked):
            self._spawn(self._await_parked(action))
        elif isinstance(action, lc.StopWorkers):
            self._spawn(self._stop_workers(action))
        else:
            self._spawn(self._persistently(lambda: self._gather(action)))

    async def _write_acks(self) -> None:
        """In order: the last word of a node about a round must be the last one written."""
        while True:
            key, document = await self._acks.get()
            await self._persistently(functools.partial(self._coordination.put, key, document))

    def _start_round(self, round_: Round) -> None:
        self._services.events.say(round_.news)
        kind = FilesSession if self._services.state_bytes else Session
        self._session = kind(self._member.node, round_, self._services, self._queue.put_nowait)
        self._desk.session = self._session
        self._session.start()

    async def _await_parked(self, action: lc.AwaitParked) -> None:
        assert self._session is not None
        await self._session.parked(action.hold)
        self._services.events.emit("parked", round=action.round, step=action.hold)
        await self._queue.put(lc.Parked(action.round))

    async def _stop_workers(self, action: lc.StopWorkers) -> None:
        session, began = self._session, time.time()
        assert session is not None
        started = session.hold(None)
        try:
            await session.stop(action)
        except ProcessError as error:  # not even SIGKILL ends them: no place for another round, and no use in waiting
            self._session = self._desk.session = None
            self._finish(Verdict(error.exit_code, f"this node is bad and leaves the job: {error}"))
            return
        seconds = time.time() - began
        self._services.events.emit("stopped", round=action.round, how=action.how, seconds=seconds, started=started)
        if self._session is session:
            self._tell_victims(session)
            self._session = self._desk.session = None
        await self._queue.put(lc.Stopped(action.round))

    def _tell_victims(self, session: Session) -> None:
        round_ = self._machine.round
        failure = None if round_ is None else round_.verdict.failure if round_.verdict else round_.first_failure
        if failure is not None and round_ is not None and (round_.verdict or round_.cause.kind in rounds.FAILURES):
            found = session.victims(failure)
            if found:
                self._services.events.say(f"rank {failure.rank} failed first; its victims here: {found}")

    async def _gather(self, action: lc.Gather) -> None:
        holdings = [Holding.from_json(record) for record in await self._services.store.inventory()]
        port = await self._services.pool.listen(self._services.host)
        extents = await dataset_memory.held(self._services.view)
        await self._queue.put(lc.Gathered(action.round, tuple(holdings), port, extents))

    # --- helpers --------------------------------------------------------------------------------------------------

    async def _persistently(self, work: Callable[[], Coroutine[Any, Any, Any]], for_s: float = PERSIST_S) -> None:
        """Do it, through outages of the store of up to a minute; then this node gives up."""
        deadline = time.monotonic() + for_s
        while True:
            try:
                await work()
                return
            except TenplexError as error:
                if isinstance(error, RunGoneError) or time.monotonic() > deadline:
                    why = "" if isinstance(error, RunGoneError) else f"gave up after {for_s:.0f} s: "
                    self._finish(Verdict(error.exit_code, f"{why}{error}"))
                    return
                if not isinstance(error, CoordinationError):
                    self._services.events.say(f"trying again: {error}")
                await asyncio.sleep(RETRY_S)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        code = error.exit_code if isinstance(error, TenplexError) else 1
        self._services.events.emit("agent_error", message=repr(error))
        self._finish(Verdict(code, f"the agent failed: {error!r}"))
