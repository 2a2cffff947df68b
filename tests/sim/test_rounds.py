"""Random lives of jobs: once faults stop, the job runs on living nodes or has ended with a verdict."""

from __future__ import annotations

import pytest

from tenplexrun.core.membership import Settings
from tenplexrun.core.parallel import ParallelConfig

from .world import World

SETTINGS = Settings(1, 3, 6, ParallelConfig(tp=2), join_window_s=0.5, rendezvous_timeout_s=500.0, gather_timeout_s=60.0)


def live(seed: int) -> World:
    world = World(seed, SETTINGS)
    world.join()
    for _ in range(400):
        world.step()
        chance = world.random.random()
        names = sorted(world.nodes)
        if chance < 0.01 and len(names) < 4:
            world.join()
        elif chance < 0.015 and len(names) > 1:
            world.kill_node(world.random.choice(names))
        elif chance < 0.025 and names:
            world.kill_worker(world.random.choice(names))
        elif chance < 0.03:
            world.resize(world.random.choice([1, 2]))
    for _ in range(6000):
        if world.settled():
            break
        world.step()
    return world


@pytest.mark.parametrize("block", range(10))
def test_every_life_settles(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        try:
            world = live(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert world.settled(), f"seed {seed}:\n" + "\n".join(world.story[-40:])


def test_the_same_seed_lives_the_same_life() -> None:
    assert live(7).story == live(7).story
