"""A small seeded world: the real membership and lifecycle machines, simulated nodes, workers, store and clock."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field

from tenplexrun.core import lifecycle as lc
from tenplexrun.core import membership, rounds
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.lifecycle import Lifecycle
from tenplexrun.core.membership import Settings, View
from tenplexrun.core.rounds import Failure, Member, Request, Round
from tenplexrun.core.snapshots import Claim, Holding, SnapshotId, choose

LAYOUT = Layout((TensorSpec("w", (8, 4), "float64", (Shard(0, "tp"),)),))


@dataclass
class Node:
    """A node with its machine. `step`: steps its workers have completed; `due`: what its agent has still to do."""

    member: Member
    machine: Lifecycle
    due: deque[lc.Action | lc.Event] = field(default_factory=deque)
    live: int | None = None
    step: int = 0
    hold: int | None = None
    holdings: dict[SnapshotId, Holding] = field(default_factory=dict)
    seen_token: int = -1


class World:
    """`run` lets `num_events` random things happen, then lets faults rest until the job runs or has ended."""

    def __init__(self, seed: int, settings: Settings, num_workers: int = 2) -> None:
        self.random = random.Random(seed)
        self.settings, self.num_workers = settings, num_workers
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.dead: set[str] = set()
        self.round: Round | None = None
        self.token = 0
        self.acks: dict[int, dict[str, rounds.Ack]] = {}
        self.requests: dict[str, Request] = {}
        self.seen: dict[str, float] = {}
        self.since: tuple[object, float] = (None, 0.0)
        self.story: list[str] = []
        self.newest_commit = 0

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:8.2f} {what}")

    # --- faults and wishes ------------------------------------------------------------------------------------

    def join(self) -> None:
        name = f"n{len(self.nodes) + len(self.dead)}"
        member = Member(name, f"10.0.0.{len(name)}", f"{name}:1", f"{name}:2", self.num_workers)
        self.nodes[name] = Node(member, Lifecycle(name))
        self.seen[name] = self.now
        self.tell(f"{name} joins")

    def kill_node(self, name: str) -> None:
        self.dead.add(name)
        del self.nodes[name]
        self.tell(f"{name} dies")

    def kill_worker(self, name: str) -> None:
        node = self.nodes[name]
        if node.live is None:
            return
        self.tell(f"a worker on {name} dies in round {node.live}")
        failure = Failure(name, node.member.host, 0, 0, 1, -9, self.now)
        node.due.append(lc.WorkersEnded(node.live, failure, None))

    def resize(self, tp: int) -> None:
        request = Request(f"r{self.token}-{len(self.story)}", "resize", {"tp": tp})
        self.requests[request.id] = request
        self.tell(f"asked for tp={tp}")

    # --- time -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One thing happens, somewhere."""
        self.now += self.random.random() * 0.2
        names = sorted(self.nodes)
        if not names:
            return
        if self.random.random() < 0.3:
            self.decide()
            return
        node = self.nodes[self.random.choice(names)]
        if self.round is not None and node.seen_token != self.token and self.random.random() < 0.5:
            node.seen_token = self.token
            node.due.append(lc.RoundSeen(self.round))
        elif node.due:
            self.work(node, node.due.popleft())
        elif node.live is not None and not node.machine._stopping:
            self.train(node)

    def train(self, node: Node) -> None:
        """A step, if all other nodes of the round keep up, then a snapshot; or wait at the hold."""
        peers = [other for other in self.nodes.values() if other.live == node.live]
        if node.hold is not None and node.step >= node.hold:
            return
        if all(abs(other.step - node.step) <= 1 and other.step >= node.step for other in peers):
            node.step += 1
            assert self.round is not None
            running = node.machine.round
            mine = running.participant(node.member.node) if running else None
            if mine is not None and running is not None:
                snapshot = SnapshotId(node.live, node.step, LAYOUT.digest)
                claim = Claim(running.parallel, tuple(mine.ranks))
                kept = sorted(node.holdings)[-2:]
                node.holdings = {old: node.holdings[old] for old in kept}
                node.holdings[snapshot] = Holding(snapshot, (claim,))

    def work(self, node: Node, item: lc.Action | lc.Event) -> None:
        name = node.member.node
        if isinstance(item, lc.Event):
            node.due.extendleft(reversed(node.machine.on(item)))
        elif isinstance(item, lc.SendAck):
            self.acks.setdefault(item.round, {})[name] = rounds.ack_from_json(
                json.loads(json.dumps(rounds.to_json(item.ack)))
            )
        elif isinstance(item, lc.StartRound):
            node.live, node.hold = item.round.number, None
            node.step = item.round.snapshot.step if item.round.snapshot else 0
        elif isinstance(item, lc.StopWorkers):
            node.live = None
            node.due.append(lc.Stopped(item.round))
        elif isinstance(item, lc.Hold):
            node.hold = item.hold if item.hold is not None else node.hold
            node.due.append(lc.Held(item.round, item.hold, node.step if node.live is not None else None))
        elif isinstance(item, lc.AwaitParked):
            if node.live is None:
                return  # stopped meanwhile
            done = node.step >= item.hold
            node.due.append(lc.Parked(item.round) if done else item)
            if not done:
                node.hold = item.hold
                self.train(node)
        elif isinstance(item, lc.Gather):
            node.due.append(lc.Gathered(item.round, tuple(node.holdings.values()), 4000))

    def decide(self) -> None:
        state = None if self.round is None else (self.round.number, self.round.phase, self.round.stop)
        if self.since[0] != state:
            self.since = (state, self.now)
        view = View(
            decider="d:1",
            members={name: node.member for name, node in self.nodes.items()},
            seen={name: self.seen[name] for name in self.nodes},
            round=self.round,
            acks={} if self.round is None else self.acks.get(self.round.number, {}),
            requests=tuple(self.requests.values()),
            layouts={LAYOUT.digest: LAYOUT},
            since=self.since[1],
            wall=self.now,
        )
        decision = membership.decide(view, self.settings, self.now)
        for name in decision.answers or {}:
            del self.requests[name]
        if decision.round is not None:
            self.check(decision.round, view)
            self.round = rounds.round_from_json(json.loads(json.dumps(rounds.to_json(decision.round))))
            self.token += 1
            self.tell(f"round {self.round.number} {self.round.phase} {self.round.stop}: {decision.reason}")

    # --- what must always hold --------------------------------------------------------------------------------

    def check(self, after: Round, view: View) -> None:
        before = self.round
        assert before is None or after.number in (before.number, before.number + 1), "rounds are numbered in order"
        if after.phase != "running":
            return
        ranks = [rank for p in after.participants for rank in p.ranks]
        assert ranks == list(range(after.parallel.world_size)), "ranks are contiguous and unique"
        assert not set(after.sources or {}) & self.dead, "a node believed lost is never a source"
        assert not set(after.nodes) & self.dead - set(view.members), "a lost node takes no part"
        live = [n.member.node for n in self.nodes.values() if n.live is not None and n.live < after.number]
        assert not (before is None or before.number != after.number or before.phase != "gathering") or not live, (
            "no worker of an older round lives when a round starts"
        )
        if after.snapshot is not None:
            held = {name: list(node.holdings.values()) for name, node in self.nodes.items()}
            assert choose(held, LAYOUT) is not None, "the chosen snapshot can be completed"

    def settled(self) -> bool:
        """The job has ended, or runs on every node that it can use, with nothing left to do."""
        if self.round is None:
            return len(self.nodes) < self.settings.min_nodes
        if self.round.phase == "ended":
            return True
        if self.round.phase != "running" or self.requests:
            return False
        return all(
            self.nodes[name].live == self.round.number for name in self.round.nodes if name in self.nodes
        ) and all(name in self.nodes for name in self.round.nodes)
