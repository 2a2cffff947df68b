"""Which nodes host the run's etcd: one server, or three where there are three nodes. Pure and level-triggered.

    1 ──(a third node is there)──► 1 + learner ──promote, add──► 3 ──(one is lost)──► 2 ──► 3, or 1 without a third node

The second server joins as a learner, without a vote, so that its loss costs nothing; it gets its vote at the moment at
which the third can be added. Two voters, of which neither may be lost, are never left so longer than that takes. A lost
server is removed before another one is added (etcd's own advice on its runtime reconfiguration).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

FULL = 3
START_S = 30.0
"""For how long a server that was added may take to start before it counts as lost."""
SETTLE_S = 6.0
"""etcd adds no server before all have been connected for 5 s."""


@dataclass(frozen=True, slots=True)
class Server:
    """One entry of etcd's own list of members. `name`: the link of the agent that runs it, "" until it has started.

    `since`: when it was first seen like this, seconds of the caller's clock.
    """

    id: str
    name: str
    voter: bool
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living node, by its agent's link. `linked`: it can be asked now. `named`: in --rdzv-endpoint, where newcomers
    will look for a server."""

    link: str
    host: str
    linked: bool = True
    named: bool = False


@dataclass(frozen=True, slots=True)
class Invite:
    """Have this node start a server. `learner`: without a vote at first."""

    link: str
    learner: bool


@dataclass(frozen=True, slots=True)
class Promote:
    """Give the learner its vote; at once after that `then` is invited."""

    id: str
    then: Invite


@dataclass(frozen=True, slots=True)
class Remove:
    id: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """Let another one lead: who leads is never removed, so that whoever stays knows of the removal."""

    to: str


Step = Invite | Promote | Remove | Transfer


def next_step(
    servers: Sequence[Server], leader: str, nodes: Sequence[Candidate], refused: Collection[str], now: float
) -> Step | None:
    """The next change, None while there is nothing to do or a server is starting.

    `nodes`: the living ones, those that have been there longest first. `refused`: links of nodes that cannot host now.
    """
    living = {node.link for node in nodes}
    lost = [server for server in servers if not _lives(server, living, now)]
    voters = [server for server in servers if server.voter]
    good = [server for server in voters if server not in lost]
    learner = next((server for server in servers if not server.voter), None)
    guests = _guests(servers, nodes, refused)
    if learner in lost and learner is not None:
        return Remove(learner.id)
    if lost and good:
        return _remove(lost[0], good, leader)
    if any(not server.name for server in servers) or not good:
        return None
    if len(servers) + len(guests) < FULL:  # one is safer than two
        spare = learner or (_follower(voters, leader) if len(voters) == FULL - 1 else None)
        return None if spare is None else Remove(spare.id)
    if len(voters) == FULL or not guests[0].linked:
        return None
    if len(voters) == FULL - 1:
        return Invite(guests[0].link, learner=False)
    if learner is None:
        return Invite(guests[0].link, learner=True)
    settled = now >= learner.since + SETTLE_S
    return Promote(learner.id, Invite(guests[0].link, learner=False)) if settled else None


def _lives(server: Server, living: Collection[str], now: float) -> bool:
    return server.name in living if server.name else now < server.since + START_S


def _guests(servers: Sequence[Server], nodes: Sequence[Candidate], refused: Collection[str]) -> list[Candidate]:
    """Who may host next, the best first: machines that host none yet, then names of the endpoint, then the oldest."""
    names = {server.name for server in servers}
    taken = {node.host for node in nodes if node.link in names}
    free = [node for node in nodes if node.link not in names and node.link not in refused]
    return sorted(free, key=lambda node: (not node.linked, node.host in taken, not node.named))


def _follower(voters: Sequence[Server], leader: str) -> Server:
    return next(server for server in reversed(voters) if server.id != leader)


def _remove(server: Server, stay: Sequence[Server], leader: str) -> Step:
    if server.id == leader:
        return Transfer(next(other.id for other in stay if other.id != leader))
    return Remove(server.id)
