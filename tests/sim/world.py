"""A seeded world in virtual time: hosts, a coordination store, a network, and all that can go wrong with them.

The machines of tenplexrun.core are the real ones; adapters and workers are simulated (`node`, `store`).
What must always hold is checked after every event that could break it.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace

from tenplexrun.core import forming, rounds
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.membership import Decision, Settings, View
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Request, Round, Verdict
from tenplexrun.core.snapshots import Claim, Holding, SnapshotId, choose, gaps, holders_of

from .node import Agent, Host
from .store import RUN, Entry, Store

LAYOUT = Layout((TensorSpec("w", (8, 4), "float64", (Shard(0, "tp"),)),))
SHAPES = ((ParallelConfig(tp=2), 2), (ParallelConfig(pp=2), 1), (ParallelConfig(), 1), (ParallelConfig(), 4))
STEP_S = 0.25
COLLECTIVE_TIMEOUT_S = 20.0


class World:
    """`run` lets faults happen for a while, mends what can be mended, and waits until the job is settled."""

    def __init__(self, seed: int, most_nodes: int = 6) -> None:
        self.random = random.Random(seed)
        sizes, self.num_workers = self.random.choice(SHAPES)
        self.most = self.random.randint(2, most_nodes)
        least = self.random.choice([1, 1, 2, self.most])
        self.settings = Settings(
            least, self.most, self.random.choice([0, 3, 50, 50]), sizes, join_window_s=1.0, rendezvous_timeout_s=120.0,
            gather_timeout_s=30.0, park_timeout_s=20.0,
        )  # fmt: skip
        self.until = self.random.choice([30, 1 << 40, 1 << 40])
        self.now = 0.0
        self.layouts = {LAYOUT.digest: LAYOUT}
        self.store = Store(self.random, self.later)
        self.store.on_write = self.on_write
        self.hosts: dict[int, Host] = {}
        self.agents: dict[str, Agent] = {}
        self.plans: dict[int, Round] = {}
        self.newest: Round | None = None
        self.committed: SnapshotId | None = None
        self.verdicts: list[Verdict] = []
        self.story: list[str] = []
        self.slow = 0.0
        self._events: list[tuple[float, int, Agent | None, Callable[[], None]]] = []
        self._order = itertools.count()

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:8.2f} {what}")

    # --- time -----------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        self.at(delay_s, work, None)

    def at(self, delay_s: float, work: Callable[[], None], agent: Agent | None) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), agent, work))

    def advance(self, until_s: float, settled: Callable[[], bool] = lambda: False) -> None:
        looked = self.now
        while self._events and self._events[0][0] <= until_s:
            self.now, _, agent, work = heapq.heappop(self._events)
            if agent is None:
                work()
            elif not agent.over:
                if agent.host.paused:
                    agent.host.deferred.append((agent, work))
                else:
                    work()
            if self.now > looked + 1.0:
                looked = self.now
                if settled():
                    return
        self.now = until_s

    def phase(self) -> float:
        """How long starting, stopping or taking stock takes: mostly short, sometimes past every time-out."""
        return self.random.random() * (45.0 if self.random.random() < self.slow else 0.3)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def new_host(self) -> None:
        host = Host(
            len(self.hosts), self.num_workers, self.random.choice([0.0, -3600.0, 3600.0 * self.random.random()])
        )
        self.hosts[host.index] = host
        self.start(host)

    def start(self, host: Host) -> None:
        agent = Agent(self, host)
        self.agents[agent.name] = agent
        agent.join()

    def lose_host(self, agent: Agent) -> None:
        self.tell(f"{agent.name}: its host is gone, silently")
        agent.end()
        agent.host.holdings.clear()

    def kill_agent(self, agent: Agent) -> None:
        """Its port refuses connections from now on: whoever has a link to it removes its keys."""
        self.tell(f"{agent.name} is killed")
        decider = self.newest.decider if self.newest else ""
        agent.end()
        agent.host.holdings.clear()
        for other in list(self.agents.values()):
            if decider in (agent.member.link, other.member.link) and other.host.side == agent.host.side:
                self.at(0.05 + 0.2 * self.random.random(), lambda other=other: self._proved_gone(other, agent), other)

    def _proved_gone(self, witness: Agent, gone: Agent) -> None:
        def remove() -> None:
            witness.decider.forbearance.proved_gone.add(gone.name)
            self.store.delete(f"{RUN}/members/{gone.name}")
            held = self.store.entries.get(f"{RUN}/decider")
            if held is not None and json.loads(held.value)["node"] == gone.name:
                self.store.delete(f"{RUN}/decider", held.token)

        witness.call(remove)

    def pause(self, agent: Agent, seconds: float) -> None:
        host = agent.host
        if host.paused:
            return
        self.tell(f"{agent.name} is stopped for {seconds:.1f} s")
        host.paused = True

        def wake() -> None:
            self.tell(f"host {host.index} wakes")
            host.paused = False
            deferred, host.deferred = host.deferred, []
            for owner, work in deferred:
                self.at(0.0, work, owner)

        self.later(seconds, wake)

    # --- the job --------------------------------------------------------------------------------------------------

    def request(self, request: Request) -> None:
        self.store.put(f"{RUN}/requests/{request.id}", json.dumps(rounds.to_json(request)))

    def linked(self, decider: Agent) -> set[str]:
        return {agent.name for agent in self.agents.values() if agent.host.side == decider.host.side}

    def group(self, round_: Round) -> list[Agent] | None:
        """The agents of a round if workers of it live on all of them, and none is apart."""
        found = [self.agents.get(node) for node in round_.nodes]
        if any(a is None or a.workers is None or a.workers.round.number != round_.number for a in found):
            return None
        agents = [agent for agent in found if agent is not None]
        return agents if len({agent.host.side for agent in agents}) <= 1 else None

    def try_step(self, round_: Round) -> None:
        """A step is done when all ranks of the round do it."""
        group = self.group(round_)
        if group is None:
            return
        steps = {agent.workers.running if agent.workers and agent.workers.well else None for agent in group}
        step = steps.pop()
        if not steps and step is not None:
            self.later(STEP_S * (0.5 + self.random.random()), lambda: self._step(round_, group, step))

    def _step(self, round_: Round, group: list[Agent], step: int) -> None:
        if self.group(round_) != group or any(
            agent.workers is None or not agent.workers.well or agent.workers.running != step for agent in group
        ):
            return
        snapshot = SnapshotId(round_.number, step + 1, LAYOUT.digest)
        for agent in group:
            assert agent.workers is not None
            mine = round_.participant(agent.name)
            assert mine is not None
            agent.step_done(agent.workers, snapshot, Holding(snapshot, (Claim(round_.parallel, tuple(mine.ranks)),)))
        self.later(0.1 * self.random.random(), lambda: self._commit(round_, snapshot, group))

    def _commit(self, round_: Round, snapshot: SnapshotId, group: list[Agent]) -> None:
        if all(not agent.over and not agent.host.paused for agent in group) and len({a.host.side for a in group}) == 1:
            for agent in group:
                agent.committed = snapshot.step
            self.committed = max(self.committed or snapshot, snapshot)

    def bereaved(self, number: int) -> None:
        """Workers of this round have gone: sooner or later their peers' collectives fail."""
        for agent in list(self.agents.values()):
            workers = agent.workers
            if workers is not None and workers.round.number == number and not workers.failed:
                delay = 0.02 + self.random.random() * (0.3 if self.random.random() < 0.7 else 5.0)
                self.at(delay, lambda agent=agent, workers=workers: agent.fail(workers, "lost its peer"), agent)

    def part(self) -> None:
        """Some hosts can't reach the others; collectives across time out."""
        for host in self.hosts.values():
            host.side = self.random.randint(0, 1)
        self.tell(f"the network parts: {[host.index for host in self.hosts.values() if host.side]} are apart")
        for agent in list(self.agents.values()):
            workers = agent.workers
            if workers is not None and self.group(workers.round) is None:
                delay = COLLECTIVE_TIMEOUT_S * (0.5 + self.random.random())
                self.at(delay, lambda agent=agent, workers=workers: self._time_out(agent, workers), agent)

    def _time_out(self, agent: Agent, workers: object) -> None:
        if agent.workers is not None and agent.workers is workers and self.group(agent.workers.round) is None:
            agent.fail(agent.workers, "its collective timed out")

    def heal(self) -> None:
        self.tell("all that can be mended is mended")
        self.store.down, self.store.lost_answers, self.slow = False, 0.0, 0.0
        for host in self.hosts.values():
            host.cut, host.side = False, 0
        for agent in list(self.agents.values()):
            if agent.workers is not None:
                self.try_step(agent.workers.round)

    # --- what must always hold ------------------------------------------------------------------------------------

    def check(self, decision: Decision, view: View, now: float) -> None:
        """A decision, by whoever holds itself for the decider, whether or not it can be written."""
        after, before = decision.round, view.round
        if after is None:
            return
        if after.phase != "running" or (before is not None and before.phase == "running"):
            return
        ranks = [rank for p in after.participants for rank in p.ranks]
        assert ranks == list(range(after.parallel.world_size)), "ranks are contiguous and unique"
        assert len(set(after.nodes)) == len(after.nodes), "a node is in a round once"
        silent = {node for node, since in view.unlinked.items() if now >= since + self.settings.unreachable_s}
        there = set(view.members) - silent.union(before.evicted if before else ())
        assert set(after.nodes) <= there, "a node that is not there takes no part"
        assert set(after.sources or {}) <= there, "a node believed lost is never a source"
        held = {node: ack.holdings for node, ack in view.acks.items() if node in there}
        assert after.snapshot == choose(held, LAYOUT), "the newest snapshot that the living can complete"

    def on_write(self, key: str, entry: Entry) -> None:
        """The round document has a new version."""
        if key != f"{RUN}/round":
            return
        before, after = self.newest, rounds.round_from_json(json.loads(entry.value))
        self.newest = after
        self.tell(f"round {after.number} {after.phase} {after.stop.mode}: {after.cause.detail}")
        assert before is None or before.phase != "ended" or after.phase == "ended", "an end is final"
        assert after.number - (before.number if before else 0) in (0, 1), "rounds are numbered in order"
        if after.phase == "running":
            if after.number not in self.plans:
                self._check_kept(after)
                self._check_boundary(before, after)
            plan = self.plans.setdefault(after.number, after)
            assert replace(after, decider=plan.decider) == plan, f"one plan a round: {plan} then {after}"

    def _check_boundary(self, before: Round | None, after: Round) -> None:
        """Who stops at a boundary loses no step."""
        if before is not None and before.stop.committed and set(before.nodes) <= set(after.sources or {}):
            assert after.snapshot is not None
            assert after.snapshot.step == before.stop.hold, f"{after.snapshot} after a stop before {before.stop.hold}"

    def _check_kept(self, after: Round) -> None:
        """Nothing committed is lost while its holders live and take part in the decision."""
        if self.committed is not None and after.sources is not None:
            held = {a.name: list(a.host.holdings.values()) for a in self.agents.values() if a.name in after.sources}
            if not gaps(LAYOUT, holders_of(self.committed, held, LAYOUT)):
                assert after.snapshot is not None, f"{self.committed} was there, nothing is used"
                assert after.snapshot >= self.committed, f"{self.committed} was there, {after.snapshot} is used"

    def steps(self) -> int:
        """Completed in the newest round, everywhere."""
        return min((agent.workers.step for agent in self.agents.values() if agent.workers), default=0)

    def settled(self) -> bool:
        """The job has ended for all, or runs on every living node that it can use."""
        if self.newest is not None and self.newest.phase == "ended":
            return not self.agents
        if not self.agents:
            return True
        if self.newest is None or self.newest.phase != "running":
            return False
        group = self.group(self.newest)
        if any(agent.workers is not None and not agent.workers.well for agent in group or []):
            return False
        members = [agent.member for agent in self.agents.values()]
        best = forming.select(members, self.newest.sizes, self.settings.min_nodes, self.settings.max_nodes)
        return group is not None and best is not None and len(best.members) == len(group)
