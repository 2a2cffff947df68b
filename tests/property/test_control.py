"""Write–verify–park under any interleaving of agent and workers, word by word: no step runs past a standing hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from tenplexrun.core.control import DONE, NO_HOLD, ControlPage, num_bytes

FENCE = nullcontext()
RANKS = 2
STEPS = 4


class Story:
    """What ran, and the hold that the agent believes to stand (None: none)."""

    def __init__(self) -> None:
        self.page = ControlPage.create(memoryview(bytearray(num_bytes(RANKS))), 0, RANKS)
        self.standing: int | None = None
        self.stops = 0

    def worker(self, rank: int) -> Iterator[None]:
        for step in range(STEPS):
            while True:
                self.page.publish_started(rank, step, FENCE)
                yield
                allowed = step < self.page.read_hold()
                yield
                if allowed:
                    break
                self.page.park(rank, step)
                yield
                while self.page.read_hold() <= step:
                    yield
                yield
            assert self.standing is None or step < self.standing, "a step ran past a hold that stood"
            yield
        self.page.publish_started(rank, DONE, FENCE)

    def agent(self) -> Iterator[None]:
        while not self.page.all_done():
            hold = self.page.max_started() + 1
            yield
            self.page.propose_hold(hold, FENCE)
            yield
            while (begun := self.page.max_started()) >= hold:
                hold = begun + 1
                yield
                self.page.propose_hold(hold, FENCE)
                yield
            self.standing = hold
            while not self.page.all_parked(hold):
                yield
            self.stops += 1
            yield
            self.standing = None
            self.page.propose_hold(NO_HOLD, FENCE)
            yield


@examples(300)
@given(st.lists(st.integers(0, RANKS), min_size=20, max_size=120))
def test_no_interleaving_passes_a_hold(schedule: list[int]) -> None:
    story = Story()
    actors = [story.agent(), *(story.worker(rank) for rank in range(RANKS))]
    for turn in schedule:
        next(actors[turn], None)
    for _ in range(500):  # then everybody gets turns: it ends, nobody waits for ever
        for actor in actors:
            next(actor, None)
    assert story.page.all_done()
