"""Snapshots of one round in all interleavings: ranks, stores, links, deciders and crashes, in seeded random order.

Pace, Turns, Commits and the buddies are the real ones. After every event, whichever nodes fewer than the replicas are
lost, the others must hold a snapshot at least as new as whatever any node knows to be committed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import pytest

from tenplexrun.core.buddies import buddies
from tenplexrun.core.commits import Commits, News
from tenplexrun.core.control import NONE
from tenplexrun.core.layout import Layout, Shard, Stage, TensorSpec
from tenplexrun.core.pace import Interval, Pace, Turns, Word
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import AnyClaim, BuddyClaim, Claim, Holding, SnapshotId, choose

LAYOUT = Layout(
    (
        *(TensorSpec(f"layers.{i}.w", (4, 2), "float32", (Shard(0, "tp"),), Stage(i, 4)) for i in range(4)),
        TensorSpec("norm", (4,), "float32"),
    )
)
CONFIGS = (
    *(ParallelConfig(pp=4), ParallelConfig(pp=2, dp=2), ParallelConfig(pp=2, tp=2), ParallelConfig(dp=4)),
    *(ParallelConfig(dp=3), ParallelConfig(pp=2), ParallelConfig(tp=2), ParallelConfig(dp=2), ParallelConfig()),
)


@dataclass
class Slot:
    """What a slot file has: of which step, written by which ranks so far; whether it is sealed, and its buddy part."""

    step: int
    ranks: set[int] = field(default_factory=set)
    sealed: bool = False
    buddy: bool = False


@dataclass
class Rank:
    turns: Turns
    step: int = 0
    waiting: int = NONE
    """The step whose snapshot it is about to write, once the one before is committed."""
    taken: list[tuple[int, int]] = field(default_factory=list)
    saved: bool = False


class Node:
    def __init__(self, place: int, ranks: range) -> None:
        self.place, self.ranks = place, ranks
        self.slots: list[Slot | None] = [None, None]
        self.committed, self.sealed, self.begun, self.replicating = NONE, NONE, NONE, NONE
        self.report: tuple[int, bool] | None = None
        self.up: deque[tuple[int, bool, int | None]] = deque()
        self.down: deque[tuple[str, int]] = deque()

    def slot_of(self, step: int) -> Slot | None:
        return next((slot for slot in self.slots if slot is not None and slot.step == step), None)


@dataclass
class Past:
    """What a round begins with: who is left of the one before, what they hold, and how many were lost since its last
    commit. `source`: what the round goes on from, which is there until the round's first commit."""

    number: int = 0
    names: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    replicas: int = 0
    held: dict[str, list[Holding]] = field(default_factory=dict)
    source: SnapshotId | None = None
    lost: int = 0


class Life:
    """Of one round."""

    def __init__(self, seed: int, past: Past | None = None) -> None:
        self.random, self.past = random.Random(seed), past or Past()
        self.workers = self.past.workers or self.random.choice([(1, 1, 1, 1), (2, 2), (1, 3), (2, 1, 1)])
        self.config = self.random.choice([one for one in CONFIGS if one.world_size == sum(self.workers)])
        self.replicas, self.until = self.random.randint(1, 4), self.random.randint(3, 14)
        self.replicas = self.past.replicas or self.replicas
        every = Interval.parse(self.random.choice(["1", "1", "2", "3", "4s", "auto"]))
        self.owed = buddies(LAYOUT, self.config, self.workers, self.replicas)
        self.by_word = every.steps is None or any(self.owed)
        self.nodes, first = [], 0
        for place, count in enumerate(self.workers):
            self.nodes.append(Node(place, range(first, first + count)))
            first += count
        self.ranks = [Rank(Turns(every, 0, self.by_word)) for _ in range(first)]
        self.pace, self.now = Pace(every, 0, 0.0), 0.0
        self.words: dict[int, Word] = {}
        self.commits = Commits(0)
        self.commits.expect(self._names())
        self.final, self.committed, self.stalled = NONE, NONE, False
        self.story: list[str] = []

    def _names(self) -> list[str]:
        return [str(node.place) for node in self.nodes]

    def node_of(self, rank: int) -> Node:
        return next(node for node in self.nodes if rank in node.ranks)

    # --- ranks: what worker/boundary.py does ---------------------------------------------------------------------

    def advance(self, number: int) -> bool:
        """One move of a rank. Returns whether it could."""
        rank, node = self.ranks[number], self.node_of(number)
        if rank.waiting != NONE:
            return self._write(number, rank, node)
        if rank.saved or rank.step >= self.until or rank.step > min(other.step for other in self.ranks) + 1:
            return False
        if rank.step == self.final:
            return self._at_the_end(rank)
        step = rank.step + 1
        due = rank.turns.due(step)
        if rank.turns.asks(step):
            if number == 0 and step not in self.words:
                self.words[step] = self.pace.decide(step, self.now, node.committed < rank.turns.sealed)
            if step not in self.words:
                return False
            rank.turns.hear(self.words[step])
            due = self.words[step].take
        rank.step = step
        if due:
            rank.waiting = step
        return True

    def _at_the_end(self, rank: Rank) -> bool:
        """All nodes have agreed to stop here: the state is saved, unless it is already."""
        rank.saved = True
        if rank.turns.sealed != rank.step:
            rank.waiting = rank.step
        return True

    def _write(self, number: int, rank: Rank, node: Node) -> bool:
        if node.committed < rank.turns.sealed:
            return False
        step, rank.waiting = rank.waiting, NONE
        index = rank.turns.take(step)
        rank.taken.append((step, index))
        old = node.slots[index]
        if old is None or old.step != step:
            assert old is None or old.step < self.committed or self.committed == NONE, "the committed slot is kept"
            assert old is None or not (old.sealed and old.step > node.committed), "so is a candidate of unknown fate"
            node.slots[index] = old = Slot(step)
        old.ranks.add(number)
        if number == 0:
            self.pace.cost(0.01)
        return True

    # --- stores and agents ---------------------------------------------------------------------------------------

    def seal(self, node: Node) -> bool:
        for slot in node.slots:
            if slot is not None and not slot.sealed and slot.ranks == set(node.ranks):
                slot.sealed, node.sealed = True, slot.step
                self._report(node, slot.step, held=not self.owed[node.place])
                return True
        return False

    def _report(self, node: Node, step: int, held: bool) -> None:
        node.report = (step, held)
        node.up.append((step, held, None if node.committed == NONE else node.committed))

    def replicate(self, node: Node) -> bool:
        """The fetch ends: well, if all that is owed is there."""
        step, mine = node.replicating, node.slot_of(node.replicating)
        if step == NONE or self.stalled or mine is None:
            return False
        sources = {holder for one in self.owed[node.place] for holder in one.holders[:1]}
        held = [self.nodes[place].slot_of(step) for place in sources]
        assert all(slot is not None and slot.sealed for slot in held), "nobody writes over what others still fetch"
        mine.buddy, node.replicating = True, NONE
        self._report(node, step, held=True)
        return True

    def up(self, node: Node) -> bool:
        if not node.up:
            return False
        step, held, known = node.up.popleft()
        news = self.commits.report(str(node.place), step, held, known)
        if news == News():
            self._tell(self.commits.known, [node])
        self._tell(news, self.nodes)
        return True

    def _tell(self, news: News, nodes: list[Node]) -> None:
        if news.commit is not None:
            self.committed = max(self.committed, news.commit)
        for op, step in (("committed", news.commit), ("replicate", news.replicate)):
            for node in nodes if step is not None else ():
                node.down.append((op, step))

    def down(self, node: Node) -> bool:
        if not node.down:
            return False
        op, step = node.down.popleft()
        if op == "committed":
            node.committed = max(node.committed, step)
        elif self.owed[node.place] and step == node.sealed and step > node.begun:
            node.begun = node.replicating = step
        return True

    def new_decider(self) -> None:
        """Links break, and what was under way on them is lost; each node says its last word again."""
        self.story.append("another decider")
        self.commits = Commits(0)
        for node in self.nodes:
            node.up.clear()
            node.down.clear()
            if node.report is not None:
                self._report(node, *node.report)
        self._tell(self.commits.expect(self._names()), self.nodes)

    def stop(self) -> None:
        """All agree on a step that nobody has passed."""
        if self.final == NONE:
            self.final = max(rank.step for rank in self.ranks) + self.random.randint(0, 2)
            self.until = max(self.until, self.final + 1)
            self.story.append(f"stop before {self.final}")

    # --- what must always hold -----------------------------------------------------------------------------------

    def name(self, node: Node) -> str:
        return self.past.names[node.place] if self.past.names else str(node.place)

    def holdings(self) -> dict[str, list[Holding]]:
        found: dict[str, list[Holding]] = {}
        for node in self.nodes:
            name = self.name(node)
            found[name] = [] if node.committed != NONE else list(self.past.held.get(name, ()))
            if node.committed == NONE and self.past.source is not None:  # moved here when the round began
                found[name].append(Holding(self.past.source, (Claim(self.config, tuple(node.ranks)),)))
            for slot in node.slots:
                if slot is not None and slot.sealed:
                    claims: list[AnyClaim] = [Claim(self.config, tuple(node.ranks))]
                    if slot.buddy:
                        claims.append(BuddyClaim(self.config, self.workers, self.replicas, node.place))
                    snapshot = SnapshotId(self.past.number, slot.step, LAYOUT.digest)
                    found[name].append(Holding(snapshot, tuple(claims)))
        return found

    def check(self) -> None:
        taken = sorted((rank.taken for rank in self.ranks), key=len)
        assert all(taken[-1][: len(one)] == one for one in taken), "all take the same snapshots into the same slots"
        due = self.due
        if due is None:
            return
        held = self.holdings()
        for gone in combinations(held, self.spare):
            snapshot = choose({node: held[node] for node in held if node not in gone}, LAYOUT)
            assert snapshot is not None, f"without {gone} nothing is left"
            assert snapshot >= due, f"without {gone} only {snapshot} is left, not {due}"

    @property
    def due(self) -> SnapshotId | None:
        """What must not be lost."""
        if self.committed == NONE:
            return self.past.source
        return SnapshotId(self.past.number, self.committed, LAYOUT.digest)

    @property
    def spare(self) -> int:
        """So many nodes may be lost now. What were lost before the round count until its first commit."""
        lost = self.past.lost if self.committed == NONE else 0
        return max(0, min(self.replicas - 1 - lost, len(self.nodes) - 1))

    def lose(self) -> Past:
        """Some nodes are lost, as many as may be at the most: what the round after this begins with."""
        count, held = self.random.randint(0, self.spare), self.holdings()
        gone = set(self.random.sample(sorted(held), count))
        left = [node for node in self.nodes if self.name(node) not in gone]
        held = {name: held[name] for name in held if name not in gone}
        source, lost = choose(held, LAYOUT), count + (self.past.lost if self.committed == NONE else 0)
        assert self.due is None or (source is not None and source >= self.due), f"{gone}: {source}, not {self.due}"
        if source is not None and (self.due is None or source > self.due):
            lost = self.replicas  # a candidate that no commit has confirmed is on no more nodes than its own
        names, workers = tuple(map(self.name, left)), tuple(len(node.ranks) for node in left)
        return Past(self.past.number + 1, names, workers, self.replicas, held, source, lost)

    def moves(self) -> list[Callable[[], bool]]:
        moves: list[Callable[[], bool]] = [partial(self.advance, number) for number in range(len(self.ranks))]
        for node in self.nodes:
            moves += [partial(move, node) for move in (self.seal, self.replicate, self.up, self.down)]
        return moves

    def stir(self) -> None:
        """Live on for a while, in whatever order."""
        moves = self.moves()
        for _ in range(self.random.randint(0, 400)):
            self.now += self.random.random() * 0.3
            if self.random.random() < 0.02:
                self.random.choice([self.new_decider, self.stop])()
            if self.random.random() < 0.05:  # peers' stores are away, or slow, for a while
                self.stalled = self.random.random() < 0.5
            if self.random.choice(moves)():
                self.check()

    def run(self) -> None:
        self.stir()
        moves, self.stalled = self.moves(), False
        while sum(move() for move in moves):
            self.now += 0.1
            self.check()
        end = self.until if self.final == NONE else self.final
        assert all(rank.step == end and rank.waiting == NONE for rank in self.ranks), "nobody waits for ever"
        if self.final != NONE:
            assert {rank.taken[-1][0] for rank in self.ranks} == {end}, "a planned stop never skips"
        last = self.ranks[0].turns.sealed
        assert {node.committed for node in self.nodes} == {last} == {self.committed}, "what was taken is committed"


@pytest.mark.parametrize("block", range(4))
def test_whatever_happens_committed_state_survives_and_nobody_waits_for_ever(block: int) -> None:
    for seed in range(block * 150, (block + 1) * 150):
        life = Life(seed)
        try:
            life.run()
        except AssertionError as error:
            world = f"seed {seed}: {life.config} on {life.workers}, {life.replicas} replicas"
            raise AssertionError(f"{world}: {error}; {life.story}") from error


def test_a_buddy_that_never_delivers_does_not_stop_the_training() -> None:
    for seed in range(100):
        life = Life(seed)
        life.stalled = True
        while sum(move() for move in life.moves()):
            life.now += 0.1
            life.check()
        assert {rank.step for rank in life.ranks} == {life.until}, f"seed {seed}: {life.workers}"


@pytest.mark.parametrize("block", range(2))
def test_rounds_follow_one_another_and_nodes_are_lost_at_any_moment(block: int) -> None:
    """What a round goes on from is there until its own first commit, whoever has heard of that."""
    for seed in range(block * 150, (block + 1) * 150):
        past = None
        for number in range(4):
            life = Life(10 * seed + number, past)
            try:
                life.check()
                life.stir()
                past = life.lose()
            except AssertionError as error:
                world = f"seed {seed}, round {number}: {life.config} on {life.workers}, {life.replicas} replicas"
                raise AssertionError(f"{world}, {life.past}: {error}; {life.story}") from error
