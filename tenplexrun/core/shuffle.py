"""Keyed permutations of [0, n): any place of any epoch in O(1) memory, the same in every release.

"feistel-1" is an unbalanced Feistel network of 8 rounds over b = max(6, bits of n - 1) bits, walked along its cycle
until the value is below n (format-preserving encryption: Black and Rogaway, CT-RSA 2002). Its round keys come from
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), its round function is two of that generator's products. No table, no
stream of a library's generator.

"blocks-1:B:W", for storage that likes to be read in sequence, permutes blocks of B consecutive samples, then the
samples within each window of W blocks that have become neighbours, both by "feistel-1": W · B samples are in play at a
time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tenplexrun.errors import DataError

Words = npt.NDArray[np.uint64]

FEISTEL = "feistel-1"
_BLOCKS = re.compile(r"blocks-1:([1-9]\d{0,17}):([1-9]\d{0,17})")
_ROUNDS = 8
_MIN_BITS = 6  # tiny domains shuffle badly; walking a cycle of at most 64 costs nothing
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


class Shuffle(Protocol):
    """`places` [n] within their `epochs` [n], each below `num_samples` → sample ids [n]."""

    def __call__(self, places: Words, epochs: Words, num_samples: int, seed: int) -> Words: ...


def shuffle(algo: str) -> Shuffle:
    """The permutation that `algo` names. Raises DataError for one that is unknown here."""
    if algo == FEISTEL:
        return permute
    if match := _BLOCKS.fullmatch(algo):
        return Blocks(int(match[1]), int(match[2]))
    raise DataError(
        f"data order: algorithm {algo!r} is unknown here (known: {FEISTEL}, blocks-1:BLOCK:WINDOW as in "
        "blocks-1:4096:16); correct it or upgrade tenplexrun"
    )


def permute(places: Words, epochs: Words, num_samples: int, seed: int) -> Words:
    """Walk each place along the cycle of the network of its epoch until it is below `num_samples`."""
    if places.size and (epochs == epochs[0]).all():
        return _walk(places, _keys_of_one(seed, int(epochs[0])), num_samples)
    return _walk(places, _round_keys(seed, epochs), num_samples)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of `block` samples, the dataset's last one maybe shorter; `window` blocks are shuffled together."""

    block: int
    window: int

    def __call__(self, places: Words, epochs: Words, num_samples: int, seed: int) -> Words:
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            found[mine] = self._epoch(places[mine], epoch, num_samples, seed)
        return found

    def _epoch(self, places: Words, epoch: np.uint64, num_samples: int, seed: int) -> Words:
        """The short block, wherever it has got to, leaves a hole of `missing` behind it: all after it move up."""
        size, num_blocks = np.uint64(self.block), -(-num_samples // self.block)
        missing = np.uint64(num_blocks * self.block - num_samples)
        keys = _keys_of_one(seed, int(epoch))
        last = _walk(np.array([num_blocks - 1], dtype=np.uint64), keys[::-1], num_blocks, odd_first=True)[0]
        hole = (last + np.uint64(1)) * size - missing
        slots = places + np.where(places < hole, np.uint64(0), missing)
        window_keys = int(keys[0, 0])
        span = np.uint64(self.window * self.block) if self.window < num_blocks else np.uint64(num_blocks * self.block)
        for window in np.unique(slots // span):
            mine = slots // span == window
            first, end = window * span, min((window + np.uint64(1)) * span, np.uint64(num_blocks) * size)
            first, end = (edge - missing if edge > hole else edge for edge in (first, end))
            within = _walk(places[mine] - first, _keys_of_one(window_keys, int(window)), int(end - first))
            moved = within + first
            slots[mine] = moved + np.where(moved < hole, np.uint64(0), missing)
        return _walk(slots // size, keys, num_blocks) * size + slots % size


def _walk(values: Words, keys: Words, limit: int, odd_first: bool = False) -> Words:
    """Pass values [n] below `limit` through the network until they are below it again; keys [rounds, n or 1].

    With the keys in reverse and `odd_first` it is the inverse."""
    bits = max(_MIN_BITS, (limit - 1).bit_length())
    low = bits // 2
    done = _network(values, keys, low, bits - low, odd_first)
    outside = np.flatnonzero(done >= np.uint64(limit))
    while outside.size:
        own = keys if keys.shape[1] == 1 else keys[:, outside]
        walked = _network(done[outside], own, low, bits - low, odd_first)
        done[outside] = walked
        outside = outside[walked >= np.uint64(limit)]
    return done


def _network(values: Words, keys: Words, low: int, high: int, odd_first: bool) -> Words:
    """One pass of all rounds over values [n] below 2**(low + high)."""
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for number, key in enumerate(keys, start=odd_first):
        if number % 2:
            right ^= _top_bits(left + key, low)
        else:
            left ^= _top_bits(right + key, high)
    left <<= np.uint64(low)
    left |= right
    return left


def _top_bits(words: Words, bits: int) -> Words:
    """The round function: `bits` well mixed bits of each word. Works in place; products are modulo 2**64."""
    words *= _MULTIPLY_1
    words ^= words >> np.uint64(32)
    words *= _MULTIPLY_2
    words >>= np.uint64(64 - bits)
    return words


@lru_cache(maxsize=64)  # steps go by epochs; to make the keys takes as long as to permute a step
def _keys_of_one(seed: int, epoch: int) -> Words:
    return _round_keys(seed, np.array([epoch], dtype=np.uint64))


def _round_keys(seed: int, epochs: Words) -> Words:
    """Keys [rounds, n] for epochs [n]."""
    base = _mix(np.array([seed], dtype=np.uint64) + _GOLDEN)
    of_epoch = _mix(base + (epochs + np.uint64(1)) * _GOLDEN)
    number = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
    return _mix(of_epoch[None, :] + number * _GOLDEN)


def _mix(words: Words) -> Words:
    """The finaliser of SplitMix64, element by element, modulo 2**64."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLY_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLY_2
    return words ^ (words >> np.uint64(31))
