"""Which nodes host the run's etcd: rules, and whole stories of nodes that come and go between any two steps."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from tenplexrun.core.hosting import (
    SETTLE_S,
    START_S,
    Candidate,
    Invite,
    Promote,
    Remove,
    Server,
    Step,
    Transfer,
    next_step,
)

LATER = 100.0


def nodes(names: str, named: str = "") -> list[Candidate]:
    return [Candidate(name, f"host {name}", named=name in named) for name in names]


def step(
    servers: str, living: str, leader: str = "a", refused: Collection[str] = (), now: float = LATER
) -> Step | None:
    """Servers by name, a small letter with a vote, a capital one a learner, "?" one that has not started."""
    listed = [Server(name.lower(), name.lower().strip("?"), name.islower() or name == "?") for name in servers]
    return next_step(listed, leader, nodes(living), refused, now)


@pytest.mark.parametrize(
    ("servers", "living", "leader", "then"),
    [
        ("a", "a", "a", None),
        ("a", "ab", "a", None),
        ("a", "abc", "a", Invite("b", learner=True)),
        ("aB", "abc", "a", Promote("b", Invite("c", learner=False))),
        ("aB", "ab", "a", Remove("b")),
        ("aB", "acd", "a", Remove("b")),
        ("ab", "abc", "a", Invite("c", learner=False)),
        ("abc", "abcd", "a", None),
        ("abc", "bcd", "b", Remove("a")),
        ("abc", "bcd", "a", Transfer("b")),
        ("bc", "bcd", "b", Invite("d", learner=False)),
        ("abc", "bc", "b", Remove("a")),
        ("bc", "bc", "b", Remove("c")),
        ("bc", "bc", "c", Remove("b")),
        ("ab", "b", "a", Transfer("b")),
        ("ab", "b", "b", Remove("a")),
        ("abc", "de", "a", None),
    ],
)
def test_steps(servers: str, living: str, leader: str, then: Step | None) -> None:
    assert step(servers, living, leader) == then


def test_a_server_that_does_not_start_is_given_up() -> None:
    assert step("ab?", "abcd", now=START_S - 1) is None
    assert step("ab?", "abcd", now=START_S + 1) == Remove("?")


def test_a_learner_is_connected_for_a_while_before_it_votes() -> None:
    assert step("aB", "abc", now=SETTLE_S - 1) is None
    assert step("aB", "abc", now=SETTLE_S) is not None


def test_who_cannot_host_is_passed_over() -> None:
    assert step("a", "abcd", refused=["b"]) == Invite("c", learner=True)
    assert step("a", "abc", refused=["b"]) is None, "a second one would be of no use"


def test_who_has_no_link_yet_is_waited_for() -> None:
    two = [Server("a", "a", True), Server("b", "b", True)]
    silent = [replace(node, linked=node.link != "c") for node in nodes("abc")]
    assert next_step(two, "a", silent, (), LATER) is None
    assert next_step(two, "a", [*silent, Candidate("d", "host d")], (), LATER) == Invite("d", learner=False)


def test_other_machines_then_names_of_the_endpoint_then_the_oldest_come_first() -> None:
    servers = [Server("a", "a", True)]
    beside = [replace(node, host="host a") if node.link == "b" else node for node in nodes("abcd")]
    assert next_step(servers, "a", beside, (), LATER) == Invite("c", learner=True)
    assert next_step(servers, "a", nodes("abcd", named="d"), (), LATER) == Invite("d", learner=True)


class World:
    """etcd's list under the steps, as etcd changes it: only with a majority of living voters."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.living = [chr(97 + number) for number in range(self.random.randint(1, 6))]
        self.servers = [Server("a", "a", True)]
        self.leader, self.now = "a", 0.0

    @property
    def voters(self) -> list[Server]:
        return [server for server in self.servers if server.voter]

    @property
    def quorum(self) -> bool:
        return 2 * sum(server.name in self.living for server in self.voters) > len(self.voters)

    def tend(self) -> Step | None:
        """One look of a steward, which may be another one each time."""
        self.now += SETTLE_S
        leads = [server.id for server in self.voters if server.name in self.living]
        self.leader = self.leader if self.leader in leads else self.random.choice(leads)
        found = next_step(self.servers, self.leader, nodes("".join(self.living)), (), self.now)
        if isinstance(found, Invite):
            self.add(found)
        elif isinstance(found, Promote):
            self.servers = [replace(each, voter=True) if each.id == found.id else each for each in self.servers]
            self.add(found.then)
        elif isinstance(found, Remove):
            assert found.id != self.leader
            self.servers = [each for each in self.servers if each.id != found.id]
        elif isinstance(found, Transfer):
            assert found.to in leads
            self.leader = found.to
        return found

    def add(self, invite: Invite) -> None:
        assert invite.link in self.living
        assert invite.link not in {server.name for server in self.servers}
        id = f"{invite.link}{self.now}"
        self.servers.append(Server(id, invite.link, not invite.learner, self.now))
        assert len(self.servers) <= 3
        if not invite.learner:
            assert len(self.voters) == 3

    def settle(self) -> None:
        while self.tend() is not None:
            assert self.now < 10_000
        assert len(self.voters) == len(self.servers) == (3 if len(self.living) >= 3 else 1)

    def lose(self, node: str) -> None:
        self.living.remove(node)


def test_three_servers_survive_the_loss_of_any_node_as_often_as_there_is_another() -> None:
    for seed in range(300):
        world = World(seed)
        for name in [chr(97 + number) for number in range(6, 26)]:
            for _ in range(world.random.randint(0, 4)):
                world.tend()
            if world.random.random() < 0.5:
                world.living.append(name)
            world.settle()
            if len(world.voters) == 3:
                world.lose(world.random.choice(world.living))
                assert world.quorum, seed
            elif len(world.living) == 2:
                world.lose(next(node for node in world.living if node != world.voters[0].name))
                assert world.quorum, f"{seed}: of two, one can be lost"
        world.settle()


def test_while_it_grows_no_other_node_can_take_the_job_along() -> None:
    """Only the first host can, until there are three: a learner's loss costs nothing."""
    for seed in range(300):
        world = World(seed)
        world.living = list("abcdef")
        for _ in range(world.random.randint(0, 3)):
            world.tend()
        world.lose(world.random.choice("bcdef"))
        assert world.quorum, seed
        world.settle()
