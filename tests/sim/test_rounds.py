"""Random lives of jobs: once faults stop, a job runs on all living nodes that it can use, or ends with one verdict."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tenplexrun.core.rounds import Request

from .world import World

QUIET_S = 900.0
BLOCKS, BLOCK = 20, 50


FAULTS = {
    "join": 4, "host": 1, "agent": 2, "worker": 3, "pause": 2, "cut": 2, "part": 1,
    "mend": 3, "down": 1, "drain": 1, "resize": 2, "slow": 1, "loss": 1, "hang": 1,
}  # fmt: skip
"""How often, against each other."""


def fault(world: World) -> None:
    """One thing goes wrong, or somebody wishes something."""
    chance, agents = world.random, [world.agents[name] for name in sorted(world.agents)]
    kind = chance.choices([*FAULTS], [*FAULTS.values()])[0]
    seconds = chance.choice([0.3, 3.0, 8.0, 40.0]) * chance.random()
    if kind == "join":
        if len(agents) < world.most + 1:
            world.new_host()
    elif kind == "mend":
        world.heal()
    elif kind == "down":
        world.tell(f"the store is down for {seconds:.1f} s")
        world.store.down = True
        world.later(seconds, lambda: setattr(world.store, "down", False))
    elif kind == "slow":
        world.slow = 0.1
    elif kind == "loss":
        world.store.lost_answers = 0.1
    elif kind == "part":
        world.part()
    elif kind == "resize":
        sizes = {"tp": chance.choice([1, 2]), "pp": chance.choice([1, 2])}
        world.tell(f"asked for {sizes}")
        world.request(Request(f"r{len(world.story)}", "resize", sizes))
    elif agents:
        agent = chance.choice(agents)
        if kind == "host" and len(agents) > 1:
            world.lose_host(agent)
        elif kind == "agent" and len(agents) > 1:
            world.kill_agent(agent)
        elif kind == "worker" and agent.workers is not None:
            agent.fail(agent.workers, "killed")
        elif kind == "hang" and agent.workers is not None:
            agent.hang(agent.workers)
        elif kind == "pause":
            world.pause(agent, seconds)
        elif kind == "cut":
            world.tell(f"{agent.name} cannot reach the store for {seconds:.1f} s")
            agent.host.cut = True
            world.later(seconds, lambda: setattr(agent.host, "cut", False))
        elif kind == "drain" and len(agents) > 1:
            world.tell(f"{agent.name} gets SIGTERM")
            agent.drain()


def live(seed: int, most_nodes: int = 6) -> World:
    """A whole life. Raises AssertionError with its story."""
    world = World(seed, most_nodes)
    try:
        for _ in range(world.random.randint(1, world.most)):
            world.new_host()
        for _ in range(world.random.randint(0, 40)):
            world.advance(world.now + world.random.random() * world.random.choice([0.2, 1.0, 2.0, 10.0]))
            fault(world)
        world.heal()
        world.advance(world.now + 45.0)  # until the last of the stopped has woken
        world.advance(world.now + QUIET_S, world.settled)
        assert world.settled(), "it never settles"
        step = world.steps()
        world.advance(world.now + 30.0)
        assert world.settled(), "it settles for a moment only"
        assert not world.agents or world.steps() > step, "it stands still"
        codes = {(verdict.code, verdict.message) for verdict in world.verdicts}
        assert len(codes) <= 1, f"the nodes end with different verdicts: {codes}"
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\n" + "\n".join(world.story[-80:])) from error
    return world


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_life_settles(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        live(seed)


def some(block: int) -> None:
    for seed in range(100_000 + block * 100, 100_000 + (block + 1) * 100):
        live(seed, 50 if seed % 100 == 0 else 8)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_lives_settle() -> None:
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        for _ in pool.map(some, range(500)):
            pass


def test_the_same_seed_lives_the_same_life() -> None:
    assert live(7).story == live(7).story
