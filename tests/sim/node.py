"""A simulated host: the real lifecycle, outlook and membership machines of its agent, and its workers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenplexrun.core import lifecycle as lc
from tenplexrun.core import rounds
from tenplexrun.core.control import NONE
from tenplexrun.core.hang import STOPPED, Bounds, Sight, Watch
from tenplexrun.core.lifecycle import Lifecycle
from tenplexrun.core.rounds import Failure, Member, Request, Round
from tenplexrun.core.snapshots import Holding, SnapshotId

from .decider import SimDecider
from .store import LEASE_S, RETRY_S, RUN, CompareFailed, Entry, Unreachable

if TYPE_CHECKING:
    from .world import World


LOOK_S = 1.0


@dataclass(eq=False)
class Host:
    """A machine. Its snapshots outlive its agent's names, not itself. `side`: who is apart from whom."""

    index: int
    num_workers: int
    skew_s: float
    paused: bool = False
    cut: bool = False
    side: int = 0
    deferred: list[tuple[Agent, Callable[[], None]]] = field(default_factory=list)
    holdings: dict[SnapshotId, Holding] = field(default_factory=dict)
    names: int = 0


@dataclass(eq=False)
class Workers:
    """Those of one round here. `step`: steps completed; `started`: the step begun; `running`: it is past the hold.
    `hung`: one of them is stopped by a signal."""

    round: Round
    step: int
    started: int | None = None
    running: int | None = None
    failed: bool = False
    hung: bool = False

    @property
    def well(self) -> bool:
        return not self.failed and not self.hung


class Agent:
    """One name of a host's agent: from joining until it ends, is killed or is fenced out."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host = world, host
        self.name = f"n{host.index}" + "'" * host.names
        host.names += 1
        self.member = Member(self.name, f"10.0.0.{host.index}", f"{self.name}:1", f"{self.name}:2", host.num_workers)
        self.machine = Lifecycle(self.name)
        self.over = False
        self.workers: Workers | None = None
        self.hold: int | None = None
        self.committed: int | None = None
        self._awaiting: lc.AwaitParked | None = None
        self._acks: deque[tuple[str, str]] = deque()
        self._since: float | None = world.now  # when the store began to answer without a break
        self.decider = SimDecider(self)

    @property
    def connected_s(self) -> float:
        return 0.0 if self._since is None else self.world.now - self._since

    @property
    def cut(self) -> bool:
        return self.host.cut

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        self.world.at(delay_s, work, self)

    def tell(self, what: str) -> None:
        self.world.tell(f"{self.name} {what}")

    def call(self, operation: Callable[[], Any], done: Callable[[Any], None] = lambda _: None) -> None:
        def answered(found: Any) -> None:
            self._since = None if isinstance(found, Unreachable) else self._since or self.world.now
            done(found)

        self.world.store.call(self, operation, answered)

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self) -> None:
        key, document = f"{RUN}/members/{self.name}", json.dumps(rounds.to_json(self.member))

        def done(found: Any) -> None:
            if isinstance(found, Unreachable):
                self.at(RETRY_S, self.join)
            elif isinstance(found, CompareFailed):  # its answer was lost: the real adapters know their own nonce
                joined(self.world.store.entries.get(key))
            else:
                joined(found)

        def joined(entry: Entry | None) -> None:
            if entry is None:
                self.join()
                return
            self.tell("joins")
            self.refresh(key, entry.token, self._resume)
            self.world.store.watch(self, f"{RUN}/round", self._on_content)
            self.decider.campaign()

        self.call(lambda: self.world.store.create(key, document, LEASE_S), done)

    def refresh(
        self, key: str, token: str, lost: Callable[[], None], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Keep a lease alive for as long as it is wanted."""

        def done(kept: Any) -> None:
            if kept is False:
                lost()
            elif wanted():
                self.at(LEASE_S / 4, lambda: self.refresh(key, token, lost, wanted))

        self.call(lambda: self.world.store.refresh(key, token), done)

    def _resume(self) -> None:
        """As agent/rendezvous.py: write the key again while the run is still in the round that this node knows."""
        key, document = f"{RUN}/members/{self.name}", json.dumps(rounds.to_json(self.member))
        known = self.machine.round

        def still(found: Any) -> bool:
            """Whether it may go on; if not, or if nobody knows, that is seen to."""
            if isinstance(found, Unreachable):
                self.at(RETRY_S, self._resume)
                return False
            now = rounds.round_from_json(json.loads(found[f"{RUN}/round"].value))
            if now.phase != "ended" and (known is None or now.number != known.number or now.without(self.name)):
                self._fence()
            return now.phase != "ended" and not self.over

        def look(then: Callable[[], None]) -> None:
            self.call(lambda: self.world.store.content(f"{RUN}/round"), lambda found: still(found) and then())

        def write() -> None:
            self.call(lambda: self.world.store.create(key, document, LEASE_S), written)

        def written(found: Any) -> None:
            entry = self.world.store.entries.get(key) if isinstance(found, CompareFailed) else found
            if isinstance(entry, Entry):
                look(lambda: self._resumed(key, entry.token))
            else:
                self.at(RETRY_S, self._resume)

        self.decider.forbearance.doubt(self.world.now + self.host.skew_s)
        if known is None:
            self._fence()
        else:
            look(write)

    def _resumed(self, key: str, token: str) -> None:
        self.tell("writes its key again")
        self.refresh(key, token, self._resume)

    def _fence(self) -> None:
        self.tell("was taken for dead")
        self.end()
        self.world.later(self.world.phase(), lambda: self.world.start(self.host))

    def end(self) -> None:
        """The agent and all that belongs to it; the host stays."""
        if self.over:
            return
        self.over = True
        self.world.store.forget(self)
        self.world.agents.pop(self.name, None)
        self._drop_workers()

    def leave(self, verdict: rounds.Verdict | None) -> None:
        self.tell(f"ends: {verdict.message if verdict else 'it leaves'}")
        if verdict is not None:
            self.world.verdicts.append(verdict)
        self.world.store.call(self, lambda: self.world.store.delete(f"{RUN}/members/{self.name}"), lambda _: None)
        self.end()

    def _on_content(self, content: Mapping[str, Entry]) -> None:
        for entry in content.values():
            self.decider.forbearance.has_round = True
            self.handle(lc.RoundSeen(rounds.round_from_json(json.loads(entry.value))))

    def drain(self) -> None:
        self.machine.draining = True
        if self.machine.live is None:
            self.leave(None)
            return
        request = Request(self.name, "drain", node=self.name, code=143, detail="SIGTERM")
        self.persistently(lambda: self.world.request(request))

    def persistently(self, operation: Callable[[], Any]) -> None:
        self.call(
            operation,
            lambda found: (
                self.at(RETRY_S, lambda: self.persistently(operation)) if isinstance(found, Unreachable) else None
            ),
        )

    # --- the machine's actions ------------------------------------------------------------------------------------

    def handle(self, event: lc.Event) -> None:
        for action in self.machine.on(event):
            if not self.over:
                self._do(action)

    def _do(self, action: lc.Action) -> None:
        if isinstance(action, lc.StartRound):
            assert self.workers is None, f"{self.name} is in two rounds"
            step = action.round.snapshot.step if action.round.snapshot else 0
            workers = self.workers = Workers(action.round, step)
            self.hold = self.committed = None
            self.at(self.world.phase(), lambda: self.begin_step(workers))
        elif isinstance(action, lc.StopWorkers):
            self.at(self.world.phase(), lambda: self._stopped(action))
        elif isinstance(action, lc.Hold):
            self.hold = action.hold if action.hold is not None else self.hold
            started = self.workers.started if self.workers else None
            self.handle(lc.Held(action.round, action.hold, started))
            if self.workers is not None and self.workers.running is None and self.workers.started is not None:
                self._past_hold(self.workers, self.workers.started)
        elif isinstance(action, lc.AwaitParked):
            self._awaiting = action
            self._look_if_parked()
        elif isinstance(action, lc.Gather):
            self.at(self.world.phase(), lambda: self._gathered(action))
        elif isinstance(action, lc.SendAck):
            key = f"{RUN}/acks/{action.round}/{self.name}"
            self._acks.append((key, json.dumps(rounds.to_json(action.ack))))
            if len(self._acks) == 1:
                self._write_ack()
        elif isinstance(action, lc.Exit):
            self.leave(action.round.verdict)
        elif isinstance(action, lc.Leave):
            self.leave(None)

    def _write_ack(self) -> None:
        def done(found: Any) -> None:
            if not isinstance(found, Unreachable):
                self._acks.popleft()
            if self._acks:
                self.at(RETRY_S if isinstance(found, Unreachable) else 0.0, self._write_ack)

        key, document = self._acks[0]
        self.call(lambda: self.world.store.put(key, document), done)

    def _gathered(self, action: lc.Gather) -> None:
        self.handle(lc.Gathered(action.round, tuple(self.host.holdings.values()), 4000))

    def _stopped(self, action: lc.StopWorkers) -> None:
        if self.workers is not None and self.workers.round.number == action.round:
            self._drop_workers()
        self.handle(lc.Stopped(action.round))

    def _drop_workers(self) -> None:
        workers, self.workers, self._awaiting = self.workers, None, None
        if workers is not None:
            self.world.bereaved(workers.round.number)

    # --- workers --------------------------------------------------------------------------------------------------

    def begin_step(self, workers: Workers) -> None:
        """As in core/control.py: publish what is started, then look at the hold."""
        if self.workers is workers and not workers.failed:
            step = workers.started = workers.step
            self.at(self.world.random.random() * 0.02, lambda: self._past_hold(workers, step))

    def _past_hold(self, workers: Workers, step: int) -> None:
        if self.workers is not workers or workers.failed or workers.running is not None:
            return
        if not workers.started == step == workers.step:
            return
        if self.hold is not None and step >= self.hold:
            self._look_if_parked()
        else:
            workers.running = step
            self.world.try_step(workers.round)

    def _look_if_parked(self) -> None:
        """All ranks that are parked before the agreed step have sealed the snapshot of the one before it."""
        action, workers = self._awaiting, self.workers
        if action is not None and workers is not None and workers.running is None and workers.step >= action.hold:
            self._awaiting = None
            self.handle(lc.Parked(action.round))

    def step_done(self, workers: Workers, snapshot: SnapshotId, holding: Holding) -> None:
        workers.step, workers.running = workers.step + 1, None
        kept = sorted(self.host.holdings)[-2:]
        keep = {known for known in self.host.holdings if known in kept or known == self.world.committed}
        self.host.holdings = {known: self.host.holdings[known] for known in keep}
        self.host.holdings[snapshot] = holding
        if workers.step >= self.world.until:
            workers.started = None
            self.workers = None
            self.handle(lc.WorkersEnded(workers.round.number, None, self.committed))
        else:
            self.at(self.world.random.random() * 0.02, lambda: self.begin_step(workers))

    def fail(self, workers: Workers, why: str) -> None:
        if self.workers is workers and not workers.failed:
            workers.failed = True
            self.tell(f"a worker fails in round {workers.round.number}: {why}")
            self.world.bereaved(workers.round.number)
            self._report(workers, -9)

    def _report(self, workers: Workers, code: int, hung: str = "") -> None:
        failure = Failure(self.name, self.member.host, 0, 0, 1, code, self.world.now + self.host.skew_s, hung=hung)
        self.handle(lc.WorkersEnded(workers.round.number, failure, self.committed))

    def hang(self, workers: Workers) -> None:
        """In the middle of a step. Its peers wait for it, and nobody would ever hear of it."""
        if workers.running is not None and not workers.failed and not workers.hung:
            workers.hung = True
            self.tell(f"a worker of round {workers.round.number} is stopped in step {workers.running}")
            first = workers.round.snapshot.step if workers.round.snapshot else 0
            self._look(workers, Watch(Bounds.of(None, self.world.settings.unreachable_s), first))

    def _look(self, workers: Workers, watch: Watch) -> None:
        if self.workers is workers and not workers.failed and workers.started is not None:
            sights = {0: Sight(workers.started, NONE, NONE, STOPPED)}
            found = watch.look(self.world.now, sights, NONE, self.hold is not None)
            if found is None:
                self.at(LOOK_S, lambda: self._look(workers, watch))
            else:
                workers.failed = True
                self.tell(f"a worker {found}")
                self._report(workers, 74, str(found))
