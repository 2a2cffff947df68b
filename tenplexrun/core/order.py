"""The global order of samples, and how a step's samples are dealt to the data-parallel ranks.

One integer is the state: `consumed`, the positions committed so far. Position P belongs to epoch P // N; its sample is
a keyed permutation of P % N. Step k covers the positions [consumed, consumed + G). Nothing here depends on how many
ranks there are, except which of them reads a row: the step's sequence over all ranks is the same for every number.

The permutation is one of `core.shuffle`: no table, no stream of a library's generator, any position in O(1) memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.core.shuffle import FEISTEL, shuffle
from tenplexrun.errors import DataError

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

TAILS = ("short", "wrap", "drop")
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's rows of a step: the step's rows [first, first + real), then padding up to `rows`.

    `rows` is `num_micro_batches` · micro_batch and the same on every rank. Padding repeats the rank's last row (the
    step's last row where it has none).
    """

    first: int
    real: int
    rows: int
    num_micro_batches: int

    def offsets(self, row: Ids) -> Ids:
        """Offset within the step of each of this rank's rows; padding included."""
        return np.minimum(row + self.first, self.first + self.real - 1 if self.real else self.first - 1)


def deal(num_rows: int, micro_batch: int, rank: int, size: int) -> Share:
    """Deal the ⌈num_rows / micro_batch⌉ micro-batches of a step: ⌊M/R⌋ contiguous ones to each of `size` ranks,
    the first M mod R ranks one more; all run ⌈M/R⌉. Raises DataError for a rank outside [0, size)."""
    if not 0 <= rank < size:
        raise DataError(f"data-parallel rank {rank} is not below the degree {size}; pass the rank of this round's mesh")
    total = -(-num_rows // micro_batch)
    each, more = divmod(total, size)
    begin = min((rank * each + min(rank, more)) * micro_batch, num_rows)
    end = min(begin + (each + (rank < more)) * micro_batch, num_rows)
    most = each + (more > 0)
    return Share(begin, end - begin, most * micro_batch, most)


@dataclass(frozen=True, slots=True)
class Step:
    """Positions [start, stop) of one step. `stop` is `consumed` once it is committed."""

    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class DataOrder:
    """The order of a dataset's samples in a job. Raises DataError for values that cannot be.

    `global_batch` (G) samples a step, dealt in micro-batches of `micro_batch` (m) rows. `tail`: at an epoch's end the
    last step is `short` (all samples exactly once), `wrap`s into the next epoch, or is `drop`ped. `algo` names the
    permutation (`core.shuffle`), `fingerprint` the dataset's content; "" where it is not known.
    """

    num_samples: int
    seed: int
    global_batch: int
    micro_batch: int
    tail: str = "short"
    algo: str = FEISTEL
    fingerprint: str = ""

    def __post_init__(self) -> None:
        limits = {
            "num_samples": (1, 1 << 62),
            "seed": (0, 1 << 64),
            "global_batch": (1, 1 << 62),
            "micro_batch": (1, 1 << 62),
        }
        for name, (least, below) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value < below:
                raise DataError(f"data order: {name}={value!r} should be a whole number from {least} to {below - 1}")
        if self.micro_batch > self.global_batch:
            raise DataError(f"data order: micro_batch={self.micro_batch} is more than global_batch={self.global_batch}")
        if self.tail not in TAILS:
            raise DataError(f"data order: tail={self.tail!r} should be one of {', '.join(TAILS)}")
        shuffle(self.algo)
        if self.tail == "drop" and self.global_batch > self.num_samples:
            raise DataError(
                f"data order: tail='drop' would drop every sample: a batch of {self.global_batch} is larger than "
                f"the dataset of {self.num_samples}; take a smaller batch or tail='short'"
            )
        if not isinstance(self.fingerprint, str):
            raise DataError(f"data order: fingerprint={self.fingerprint!r} should be a string")

    def epoch_of(self, position: int) -> int:
        return position // self.num_samples

    def step(self, consumed: int) -> Step:
        """The step that follows `consumed` committed positions. Raises DataError when that is negative."""
        if consumed < 0:
            raise DataError(f"consumed={consumed} should not be negative")
        epoch_end = (self.epoch_of(consumed) + 1) * self.num_samples
        stop = consumed + self.global_batch
        if self.tail == "wrap" or stop <= epoch_end:
            return Step(consumed, stop)
        if self.tail == "short":
            return Step(consumed, epoch_end)
        return Step(epoch_end, epoch_end + self.global_batch)

    def positions(self, consumed: int, rank: int, size: int) -> tuple[Ids, Weights, int]:
        """The rows of data-parallel rank `rank` of `size` in the step after `consumed`.

        Returns their positions [rows], weights [rows] and the number of micro-batches; rows = that · micro_batch on
        every rank. Each real row weighs size / (rows of the step), so that weights of a step sum to `size` and the mean
        over ranks of the weighted sums is the true mean; padding rows weigh 0.
        """
        step = self.step(consumed)
        share = deal(step.num_rows, self.micro_batch, rank, size)
        row = np.arange(share.rows, dtype=np.int64)
        weights = np.where(row < share.real, size / step.num_rows, 0.0)
        return step.start + share.offsets(row), weights, share.num_micro_batches

    def share(self, consumed: int, rank: int, size: int) -> tuple[Ids, Weights, int]:
        """As `positions`, with the sample ids at them in their place."""
        positions, weights, num_micro_batches = self.positions(consumed, rank, size)
        return self.sample_at(positions), weights, num_micro_batches

    def shares(self, consumed: int, rank: int, size: int) -> dict[int, tuple[Ids, Weights, int]]:
        """`share` of the step after `consumed` and of as many more of its epoch as make some thousand rows, by
        `consumed` before each: to permute few positions takes nearly as long as to permute thousands."""
        found: dict[int, tuple[Ids, Weights, int]] = {}
        rows, epoch = 0, self.epoch_of(self.step(consumed).start)
        while not found or (rows < _ROWS_AT_ONCE and self.epoch_of(self.step(consumed).start) == epoch):
            found[consumed] = self.positions(consumed, rank, size)
            rows += len(found[consumed][0])
            consumed = self.step(consumed).stop
        ids = self.sample_at(np.concatenate([positions for positions, _, _ in found.values()]))
        for begin, (positions, weights, num_micro_batches) in found.items():
            found[begin], ids = (ids[: len(positions)], weights, num_micro_batches), ids[len(positions) :]
        return found

    def sample_at(self, positions: npt.ArrayLike) -> Ids:
        """Sample ids in [0, num_samples) at `positions` (any shape, each at least 0, of any epochs)."""
        flat = np.asarray(positions, dtype=np.int64)
        if flat.size and int(flat.min()) < 0:
            raise DataError(f"position {int(flat.min())} should not be negative")
        epoch, within = np.divmod(flat.ravel(), np.int64(self.num_samples))
        ids = shuffle(self.algo)(within.view(np.uint64), epoch.view(np.uint64), self.num_samples, self.seed)
        return ids.view(np.int64).reshape(flat.shape)

    def check_continues(self, saved: DataOrder) -> None:
        """Raise DataError unless a job saved under `saved` can go on under this order: same dataset, same shuffle, same
        micro-batches. The global batch and the tail may change at a step boundary."""
        changed = [
            f"{name} was {getattr(saved, name)!r}, is {getattr(self, name)!r}"
            for name in ("fingerprint", "num_samples", "seed", "algo", "micro_batch")
            if getattr(saved, name) != getattr(self, name)
        ]
        if changed:
            raise DataError(
                f"this is not the data the job was reading: {'; '.join(changed)}. Give the same dataset, seed, order "
                "and micro_batch as before, or start a new run (with another --checkpoint-dir, if there is one)"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DataOrder:
        """Inverse of `to_json`. Raises DataError on missing or unknown fields."""
        known = {field.name for field in fields(cls)}
        if not isinstance(record, Mapping) or not {"num_samples", "seed", "global_batch", "micro_batch"} <= set(record):
            raise DataError(f"not a data order: {record!r:.200}; do all nodes run the same version of tenplexrun?")
        if unknown := sorted(set(record) - known):
            raise DataError(
                f"a data order has unknown fields {unknown}; run the same version of tenplexrun on all nodes"
            )
        return cls(**record)
