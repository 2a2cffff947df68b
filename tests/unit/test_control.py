from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from tenplexrun.core.control import DONE, NO_HOLD, NONE, ControlPage, num_bytes
from tenplexrun.errors import LayoutError

FENCE = nullcontext()


def page(num_ranks: int = 2) -> ControlPage:
    return ControlPage.create(memoryview(bytearray(num_bytes(num_ranks))), round_number=3, num_ranks=num_ranks)


def test_a_new_page() -> None:
    one = page()
    assert (one.hold, one.committed, one.leave, one.beat, one.round, one.num_ranks) == (NO_HOLD, NONE, False, 0, 3, 2)
    assert [(one.started(rank), one.parked(rank), one.sealed(rank)) for rank in (0, 1)] == [(NONE, NONE, NONE)] * 2
    assert (one.max_started(), one.all_sealed(), one.all_done()) == (NONE, NONE, False)


def test_both_sides_see_one_buffer() -> None:
    buffer = bytearray(num_bytes(2) + 8)
    agent = ControlPage.create(memoryview(buffer), 0, 2)
    worker = ControlPage(memoryview(buffer).cast("q"))
    agent.committed, agent.beat, agent.leave = 7, 2**62, True
    assert (worker.committed, worker.beat, worker.leave) == (7, 2**62, True)
    worker.seal(0, 4)
    worker.seal(1, 3)
    assert agent.all_sealed() == 3
    agent.release()
    worker.release()
    buffer.extend(b"a released page does not pin its buffer")


def test_a_rank_that_is_parked_has_begun_the_step_before() -> None:
    one = page()
    assert one.may_start(0, 4, FENCE)
    assert one.propose_hold(5, FENCE) == 4
    assert not one.may_start(0, 5, FENCE)
    assert one.max_started() == 5, "published, and not yet known to have seen the hold"
    one.park(0, 5)
    assert one.max_started() == 4
    assert not one.all_parked(5), "the other rank is still on its way"
    one.publish_started(1, DONE, FENCE)
    assert one.all_parked(5)
    assert one.max_started() == 4, "a rank that is done does not count"
    assert one.propose_hold(NO_HOLD, FENCE) == 4
    assert one.may_start(0, 5, FENCE)
    assert one.parked(0) == NONE
    one.publish_started(0, DONE, FENCE)
    assert one.all_done()


def test_buffers_that_are_no_page_are_refused() -> None:
    for buffer in (bytearray(8), bytearray(num_bytes(2)), bytearray(num_bytes(2) + 3)):
        with pytest.raises(LayoutError):
            ControlPage(memoryview(buffer))
    with pytest.raises(LayoutError, match="needs"):
        ControlPage.create(memoryview(bytearray(num_bytes(1))), 0, 2)
    cut = bytearray(num_bytes(2))
    ControlPage.create(memoryview(cut), 0, 2).release()
    with pytest.raises(LayoutError):
        ControlPage(memoryview(cut)[: num_bytes(1)])
    with pytest.raises(LayoutError, match="local rank 2"):
        page().started(2)


def test_threads_never_pass_a_hold_that_stands() -> None:
    """The real protocol on real threads, stopped at one boundary ten times."""
    one, ran, enough, pause = page(3), [NONE] * 3, threading.Event(), threading.Event()

    def work(rank: int) -> None:
        fence, step = threading.Lock(), 0
        while not enough.is_set():
            while not one.may_start(rank, step, fence):
                one.park(rank, step)
                while one.read_hold() <= step:
                    pause.wait(0.0001)
            ran[rank] = step
            step += 1
            pause.wait(0.0002)
        one.publish_started(rank, DONE, fence)

    fence = threading.Lock()
    workers = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(10):
            hold = one.max_started() + 1
            while (begun := one.propose_hold(hold, fence)) >= hold:
                hold = begun + 1
            while not one.all_parked(hold):
                assert max(ran) < hold
                pause.wait(0.0001)
            assert ran == [hold - 1] * 3
            one.propose_hold(NO_HOLD, fence)
            pause.wait(0.002)
    finally:
        enough.set()
        one.propose_hold(NO_HOLD, fence)
        for worker in workers:
            worker.join()
    assert one.all_done()
