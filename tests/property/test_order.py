"""Any sequence of data-parallel degrees reads what one rank reads, in the same order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from tenplexrun.core.order import TAILS, DataOrder


def make(n: int, seed: int, steps: int, micro: int, tail: str, algo: str) -> DataOrder:
    batch = max(1, n // steps) if tail == "drop" else max(1, n // steps) + seed % 3
    return DataOrder(n, seed, batch, min(micro, batch), tail, algo)


orders = st.builds(
    make,
    st.integers(1, 400),
    st.integers(0, 2**64 - 1),
    st.integers(1, 9),
    st.integers(1, 20),
    st.sampled_from(TAILS),
    st.sampled_from(["feistel-1", "blocks-1:7:3", "blocks-1:64:2"]),
)
quiet = examples(30)


def real_rows(order: DataOrder, consumed: int, dp: int) -> list[int]:
    """Sample ids of one step, rank after rank, without padding."""
    shares = [order.share(consumed, rank, dp) for rank in range(dp)]
    assert len({len(ids) for ids, _, _ in shares}) == 1
    assert all(len(ids) == number * order.micro_batch for ids, _, number in shares)
    assert abs(sum(float(weights.sum()) for _, weights, _ in shares) - dp) < 1e-9
    return np.concatenate([ids[weights > 0] for ids, weights, _ in shares]).tolist()


@quiet
@given(
    orders, st.lists(st.tuples(st.integers(1, 64), st.integers(-3, 3)), min_size=1, max_size=8), st.integers(0, 1000)
)
def test_any_resize_sequence_equals_one_rank(order: DataOrder, changes: list[tuple[int, int]], consumed: int) -> None:
    """Also where the global batch changes on the way."""
    for dp, more in changes:
        batch = min(max(order.global_batch + more, order.micro_batch), order.num_samples)
        order = replace(order, global_batch=batch) if batch >= order.micro_batch else order
        step = order.step(consumed)
        assert real_rows(order, consumed, dp) == order.sample_at(np.arange(step.start, step.stop)).tolist()
        consumed = step.stop


@quiet
@given(orders, st.integers(0, 1000), st.integers(1, 9))
def test_shares_of_many_steps_are_those_of_each(order: DataOrder, consumed: int, dp: int) -> None:
    shares = order.shares(consumed, dp - 1, dp)
    for begin, share in shares.items():
        assert begin == consumed
        for found, wanted in zip(share, order.share(begin, dp - 1, dp), strict=True):
            np.testing.assert_array_equal(found, wanted)
        consumed = order.step(begin).stop
    assert sum(len(ids) for ids, _, _ in shares.values()) < 8192 + order.global_batch + order.micro_batch


@examples(10)
@given(orders, st.lists(st.integers(1, 64), min_size=1, max_size=3))
def test_short_reads_every_sample_exactly_once_an_epoch(order: DataOrder, degrees: list[int]) -> None:
    order = replace(order, tail="short")
    end = 2 * order.num_samples
    consumed, seen, step = order.num_samples, [], 0
    while consumed < end:
        seen += real_rows(order, consumed, degrees[step % len(degrees)])
        consumed, step = order.step(consumed).stop, step + 1
    assert sorted(seen) == list(range(order.num_samples))


def test_1003_samples_through_4_then_3_then_6_ranks() -> None:
    """Case D1."""
    order, consumed, seen = DataOrder(1003, 17, 24, 4), 0, []
    for step in range(42):
        dp = 4 if step < 7 else 3 if step < 12 else 6
        seen += real_rows(order, consumed, dp)
        consumed = order.step(consumed).stop
    assert consumed == 1003
    assert seen == order.sample_at(np.arange(1003)).tolist()
    assert sorted(seen) == list(range(1003))
