"""The window ahead of a rank: whatever it reads and however long fetching takes, its rows come in order, and once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.ahead import Ahead
from tenplexrun.core.order import DataOrder


@st.composite
def windows(draw: st.DrawFn) -> Ahead:
    num_samples, size = draw(st.integers(1, 300)), draw(st.integers(1, 5))
    batch = draw(st.integers(1, 40))
    micro, tail = draw(st.integers(1, batch)), draw(st.sampled_from(["short", "wrap"]))
    order = DataOrder(num_samples, draw(st.integers(0, 9)), batch, micro, tail)
    begin = order.step(draw(st.integers(0, 700)) // batch * batch).start
    return Ahead(order, draw(st.integers(0, size - 1)), size, draw(st.integers(1, 400)), begin)


@given(windows(), st.lists(st.sampled_from(["read", "fetch", "fail"]), max_size=80))
def test_all_rows_are_fetched_before_they_pass_and_no_more_than_the_window(window: Ahead, events: list[str]) -> None:
    order, reading, there = window.order, window.reached, set()
    for event in events:
        chunk = window.next_chunk()
        if event == "fetch" and chunk is not None:
            there |= set(chunk.ids.tolist())
            window.done(chunk)
        elif event == "read" and reading < window.fetched:
            assert set(order.share(reading, window.rank, window.size)[0].tolist()) <= there
            window.reach(reading)
            reading = order.step(reading).stop
        assert window.reached <= window.fetched
        assert window.fetched <= window.reached + window.limit + order.global_batch
        assert window.kept_from <= window.reached
        assert (window.next_chunk() is None) == (window.fetched >= window.reached + window.limit)


@given(windows(), st.integers(0, 3000))
def test_a_rank_that_is_elsewhere_moves_the_window(window: Ahead, begin: int) -> None:
    """A failed round goes back; a script may read another epoch."""
    for _ in range(3):
        if (chunk := window.next_chunk()) is not None:
            window.done(chunk)
    held = range(window.kept_from, window.fetched + 1)
    fetched = window.fetched
    window.reach(begin)
    assert window.fetched == (fetched if begin in held else begin)
    chunk = window.next_chunk()
    assert chunk is None or chunk.first == window.fetched
    if begin not in held:
        assert chunk is not None
        assert set(window.order.share(begin, window.rank, window.size)[0].tolist()) == set(chunk.ids.tolist())


def test_a_chunk_that_comes_late_is_not_counted() -> None:
    window = Ahead(DataOrder(100, 0, 10, 5), 0, 2, 100, 0)
    chunk = window.next_chunk()
    assert chunk is not None
    window.reach(500)
    window.done(chunk)
    assert window.fetched == 500


def test_chunks_grow_and_stay_a_part_of_the_window() -> None:
    window = Ahead(DataOrder(10**6, 0, 10, 5), 0, 2, 1000, 0)
    sizes = []
    while (chunk := window.next_chunk()) is not None:
        sizes.append((chunk.stop - chunk.first) // 10)
        window.done(chunk)
        assert np.array_equal(chunk.ids, np.unique(chunk.ids))
    assert sizes[:6] == [1, 2, 4, 8, 16, 32]
    assert max(sizes) == 50
    assert sum(sizes) == 200
