"""The data order: known answers, an independent scalar definition, statistics of the shuffle, dealing, tails."""

from __future__ import annotations

import numpy as np
import pytest

from tenplexrun.core.order import DataOrder, deal
from tenplexrun.errors import DataError

# Order "feistel-1" may never change: jobs that are running depend on it.
KNOWN = [
    (1003, 0, 0, [762, 319, 341, 853, 961, 158, 882, 868]),
    (1003, 0, 1, [858, 206, 626, 870, 996, 216, 822, 138]),
    (10**9, 12345, 0, [4224008, 778370356, 247645152, 711341399, 959503192, 757525962, 361847701, 426943723]),
    (10**9, 12345, 3, [98870492, 285874753, 435229375, 312867948, 636987674, 321636298, 736945236, 911031470]),
    (3, 7, 0, [1, 2, 0]),
    (2**33 + 5, 2**63 + 11, 2, [2815028235, 1487640449, 369172162, 1413487859, 4375835586, 6836408156, 6197924456]),
]
WORD = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def scalar_sample_at(position: int, num_samples: int, seed: int) -> int:
    """The definition of feistel-1, number by number, without numpy."""
    golden, (epoch, value) = 0x9E3779B97F4A7C15, divmod(position, num_samples)
    bits = max(6, (num_samples - 1).bit_length())
    low, high = bits // 2, bits - bits // 2
    of_epoch = mix(mix(seed + golden & WORD) + (epoch + 1) * golden & WORD)
    keys = [mix(of_epoch + number * golden & WORD) for number in range(1, 9)]

    def top(x: int, width: int) -> int:
        x = x * 0xBF58476D1CE4E5B9 & WORD
        return (x ^ x >> 32) * 0x94D049BB133111EB % 2**64 >> 64 - width

    while True:
        left, right = value >> low, value & (1 << low) - 1
        for number, key in enumerate(keys):
            if number % 2:
                right ^= top(left + key & WORD, low)
            else:
                left ^= top(right + key & WORD, high)
        value = left << low | right
        if value < num_samples:
            return value


@pytest.mark.parametrize(("num_samples", "seed", "epoch", "expected"), KNOWN)
def test_known_answers(num_samples: int, seed: int, epoch: int, expected: list[int]) -> None:
    positions = epoch * num_samples + np.arange(len(expected))
    assert DataOrder(num_samples, seed, 1, 1).sample_at(positions).tolist() == expected


@pytest.mark.parametrize(("num_samples", "seed"), [(1, 0), (2, 1), (64, 5), (65, 5), (1003, 9), (2**40 + 1, 2**64 - 1)])
def test_equals_the_scalar_definition(num_samples: int, seed: int) -> None:
    order = DataOrder(num_samples, seed, 1, 1)
    positions = np.array([0, 1, num_samples - 1, num_samples, 3 * num_samples + 1, 2**50], dtype=np.int64)
    expected = [scalar_sample_at(int(position), num_samples, seed) for position in positions]
    assert order.sample_at(positions).tolist() == expected


@pytest.mark.parametrize("num_samples", [1, 2, 3, 63, 64, 65, 1000, 1003, 4097])
def test_every_epoch_is_a_permutation(num_samples: int) -> None:
    order = DataOrder(num_samples, 42, 1, 1)
    epochs = order.sample_at(np.arange(3 * num_samples)).reshape(3, num_samples)
    assert (np.sort(epochs, axis=1) == np.arange(num_samples)).all()
    if num_samples > 60:
        assert (epochs[0] != epochs[1]).any()
        assert (epochs[0] != DataOrder(num_samples, 43, 1, 1).sample_at(np.arange(num_samples))).any()


def test_the_shuffle_is_uniform() -> None:
    """Chi-square of (place, sample) over many epochs, of neighbours' distances, and correlation of epochs.

    Cells of a permutation matrix have variance E/N · (1 - 1/N), hence the factor; bounds are 5 standard deviations.
    """
    num_samples, epochs = 33, 20_000
    ids = DataOrder(num_samples, 1, 1, 1).sample_at(np.arange(num_samples * epochs)).reshape(epochs, num_samples)
    counts = np.stack([np.bincount(place, minlength=num_samples) for place in ids.T])
    freedom = (num_samples - 1) ** 2
    chi = ((counts - epochs / num_samples) ** 2).sum() / (epochs / num_samples) * (num_samples - 1) / num_samples
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)
    distances = np.bincount((ids[:, 1] - ids[:, 0]) % num_samples, minlength=num_samples)[1:]
    expected = epochs / (num_samples - 1)
    chi = ((distances - expected) ** 2 / expected).sum()
    assert abs(chi - (num_samples - 2)) < 5 * np.sqrt(2 * (num_samples - 2))
    large = DataOrder(10_007, 1, 1, 1).sample_at(np.arange(2 * 10_007)).reshape(2, -1)
    assert abs(np.corrcoef(large)[0, 1]) < 5 / np.sqrt(10_007)
    assert abs(np.corrcoef(large[0], np.arange(10_007))[0, 1]) < 5 / np.sqrt(10_007)


def test_shape_of_positions_is_kept() -> None:
    order = DataOrder(100, 1, 1, 1)
    assert order.sample_at(np.zeros((2, 3), dtype=np.int64)).shape == (2, 3)
    assert order.sample_at([]).shape == (0,)
    with pytest.raises(DataError, match="position -1"):
        order.sample_at([3, -1])


def test_dealing_micro_batches() -> None:
    """Case D2: five ranks do not divide a batch of 24."""
    shares = [deal(24, 2, rank, 5) for rank in range(5)]  # 12 micro-batches on 5 ranks: 3 3 2 2 2
    assert [(share.first, share.real, share.rows) for share in shares] == [
        (0, 6, 6),
        (6, 6, 6),
        (12, 4, 6),
        (16, 4, 6),
        (20, 4, 6),
    ]
    assert shares[2].offsets(np.arange(6)).tolist() == [12, 13, 14, 15, 15, 15]
    idle = deal(3, 4, 1, 2)  # one micro-batch, two ranks: the second runs padding only
    assert (idle.real, idle.rows, idle.num_micro_batches) == (0, 4, 1)
    assert idle.offsets(np.arange(4)).tolist() == [2, 2, 2, 2]
    with pytest.raises(DataError, match="rank 5 is not below"):
        deal(24, 2, 5, 5)


def test_weights_make_the_mean_over_ranks_the_true_mean() -> None:
    order = DataOrder(1003, 3, 24, 4)
    values = np.random.default_rng(0).normal(size=1003)
    for consumed in (0, 1003 - 19):
        step = order.step(consumed)
        truth = values[order.sample_at(np.arange(step.start, step.stop))].mean()
        shares = [order.share(consumed, rank, 5) for rank in range(5)]
        assert np.mean([weights @ values[ids] for ids, weights, _ in shares]) == pytest.approx(truth, rel=1e-12)
        assert sum(weights.sum() for _, weights, _ in shares) == pytest.approx(5)
        assert len({(len(ids), number) for ids, _, number in shares}) == 1


def test_tails() -> None:
    def steps(tail: str, count: int) -> list[tuple[int, int]]:
        order, consumed, found = DataOrder(10, 0, 4, 1, tail), 0, []
        for _ in range(count):
            step = order.step(consumed)
            found.append((step.start, step.stop))
            consumed = step.stop
        return found

    assert steps("short", 4) == [(0, 4), (4, 8), (8, 10), (10, 14)]
    assert steps("wrap", 4) == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert steps("drop", 4) == [(0, 4), (4, 8), (10, 14), (14, 18)]
    assert DataOrder(10, 0, 25, 1).step(0).stop == 10


def test_an_epoch_that_ended_exactly_is_followed_by_the_next() -> None:
    """Case D3."""
    for tail in ("short", "wrap", "drop"):
        step = DataOrder(24, 0, 8, 2, tail).step(24)
        assert (step.start, step.stop) == (24, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_samples": True}, "num_samples=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 2.0}, "global_batch=2.0"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"micro_batch": 9}, "micro_batch=9"),
        ({"tail": "long"}, "short, wrap, drop"),
        ({"algo": "feistel-9"}, "upgrade tenplexrun"),
        ({"fingerprint": 3}, "fingerprint=3"),
        ({"tail": "drop", "global_batch": 11}, "would drop every sample"),
    ],
)
def test_impossible_orders_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataOrder.from_json({"num_samples": 10, "seed": 1, "global_batch": 8, "micro_batch": 2, **fields})


def test_json() -> None:
    order = DataOrder(10, 1, 8, 2, "wrap", fingerprint="xxh3-00")
    assert DataOrder.from_json(order.to_json()) == order
    with pytest.raises(DataError, match="unknown fields \\['dataset'\\]"):
        DataOrder.from_json({**order.to_json(), "dataset": "npy:/x"})
    with pytest.raises(DataError, match="not a data order"):
        DataOrder.from_json({"num_samples": 3})


def test_resume_under_another_order_fails_loudly() -> None:
    saved = DataOrder(10, 1, 8, 2, fingerprint="a")
    DataOrder(10, 1, 4, 2, "wrap", fingerprint="a").check_continues(saved)
    for other, both in (
        (DataOrder(11, 1, 8, 2, fingerprint="a"), "num_samples was 10, is 11"),
        (DataOrder(10, 2, 8, 2, fingerprint="a"), "seed was 1, is 2"),
        (DataOrder(10, 1, 8, 4, fingerprint="a"), "micro_batch was 2, is 4"),
        (DataOrder(10, 1, 8, 2, fingerprint="b"), "fingerprint was 'a', is 'b'"),
        (DataOrder(10, 1, 8, 2, algo="blocks-1:2:2", fingerprint="a"), "algo was 'feistel-1', is 'blocks-1:2:2'"),
    ):
        with pytest.raises(DataError, match=f"not the data the job was reading: {both}. Give the same"):
            other.check_continues(saved)
    with pytest.raises(DataError, match="negative"):
        saved.step(-1)
