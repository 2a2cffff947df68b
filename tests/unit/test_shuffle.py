"""The block shuffle: known answers, an independent definition that lists the whole epoch, locality, statistics."""

from __future__ import annotations

import numpy as np
import pytest

from tenplexrun.core.order import DataOrder
from tenplexrun.core.shuffle import FEISTEL, permute, shuffle
from tenplexrun.errors import DataError

# Order "blocks-1" may never change: jobs that are running depend on it.
KNOWN = [
    (1003, 0, 0, "blocks-1:100:3", [607, 625, 29, 239, 604, 653, 206, 627]),
    (1003, 0, 1, "blocks-1:100:3", [126, 201, 118, 185, 122, 137, 224, 168]),
    (10**9, 12345, 2, "blocks-1:4096:16", [938449181, 160079143, 859521129, 147633214, 160076805, 906176415]),
    (2**40 + 1, 2**64 - 1, 7, "blocks-1:65536:256", [821140108030, 63648561338, 816343993817, 555162514687]),
    (5, 7, 0, "blocks-1:2:1", [2, 3, 4, 0, 1]),
]
SIZES = [(1, 1, 1), (5, 8, 3), (7, 3, 1), (64, 8, 4), (1003, 100, 3), (1003, 17, 1000), (1000, 100, 10), (101, 100, 1)]


def listed_epoch(num_samples: int, block: int, window: int, epoch: int, seed: int) -> list[int]:
    """The definition, with lists: blocks in feistel-1's order, then each window's samples in that of another key."""

    def order(count: int, which: int, key: int) -> list[int]:
        return permute(np.arange(count, dtype=np.uint64), np.full(count, which, dtype=np.uint64), count, key).tolist()

    blocks = [range(first, min(first + block, num_samples)) for first in range(0, num_samples, block)]
    shuffled = [blocks[number] for number in order(len(blocks), epoch, seed)]
    word, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        return x ^ x >> 31

    key = mix(mix(mix(seed + golden & word) + (epoch + 1) * golden & word) + golden & word)
    found = []
    for number, first in enumerate(range(0, len(shuffled), window)):
        samples = [sample for each in shuffled[first : first + window] for sample in each]
        found += [samples[place] for place in order(len(samples), number, key)]
    return found


@pytest.mark.parametrize(("num_samples", "seed", "epoch", "algo", "expected"), KNOWN)
def test_known_answers(num_samples: int, seed: int, epoch: int, algo: str, expected: list[int]) -> None:
    positions = epoch * num_samples + np.arange(len(expected))
    assert DataOrder(num_samples, seed, 1, 1, algo=algo).sample_at(positions).tolist() == expected


@pytest.mark.parametrize(("num_samples", "block", "window"), SIZES)
def test_equals_the_definition_and_is_a_permutation(num_samples: int, block: int, window: int) -> None:
    order = DataOrder(num_samples, 2**63 + 5, 1, 1, algo=f"blocks-1:{block}:{window}")
    epochs = order.sample_at(np.arange(5 * num_samples)).reshape(5, num_samples)
    for epoch, ids in enumerate(epochs):
        assert ids.tolist() == listed_epoch(num_samples, block, window, epoch, 2**63 + 5)
        assert sorted(ids) == list(range(num_samples))
    mixed = np.random.default_rng(0).permutation(5 * num_samples)
    np.testing.assert_array_equal(order.sample_at(mixed), epochs.ravel()[mixed])


def test_a_window_touches_few_blocks() -> None:
    """While a whole window is read, no more than its blocks are: that is what it is for."""
    ids = DataOrder(10**9, 4, 1, 1, algo="blocks-1:4096:16").sample_at(np.arange(10 * 16 * 4096)).reshape(10, -1)
    for window in ids:
        assert len(np.unique(window // 4096)) <= 17  # one more where the short block is among them
    assert len(np.unique(DataOrder(10**9, 4, 1, 1).sample_at(np.arange(16 * 4096)) // 4096)) > 10_000


def test_the_short_block_is_anywhere() -> None:
    """The last samples of the dataset would else always be the last of the epoch, and tail="drop" never read them."""
    order = DataOrder(1003, 9, 1, 1, algo="blocks-1:100:1")
    places = [int(np.flatnonzero(order.sample_at(epoch * 1003 + np.arange(1003)) == 1002)[0]) for epoch in range(50)]
    assert len({place // 100 for place in places}) > 7


def test_every_sample_is_seen_at_every_place_about_as_often() -> None:
    num_samples, epochs = 24, 600
    order = DataOrder(num_samples, 1, 1, 1, algo="blocks-1:3:4")
    ids = order.sample_at(np.arange(num_samples * epochs)).reshape(epochs, num_samples)
    counts = np.stack([np.bincount(place, minlength=num_samples) for place in ids.T])
    expected = epochs / num_samples
    assert abs(counts - expected).max() < 6 * np.sqrt(expected)


@pytest.mark.parametrize("algo", ["blocks-1", "blocks-1:0:4", "blocks-1:4:", "blocks-1:4:4:4", "blocks-2:4:4", ""])
def test_unknown_algorithms_are_refused(algo: str) -> None:
    with pytest.raises(DataError, match="known: feistel-1, blocks-1:BLOCK:WINDOW"):
        shuffle(algo)
    assert shuffle(FEISTEL) is permute
