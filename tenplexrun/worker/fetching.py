"""Samples that are decoded and collated one by one: torch's DataLoader, in the job's order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from tenplexrun.core.order import DataOrder, Ids
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import DataError, UsageError
from tenplexrun.worker.streams import derived_seed

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class Fetcher:
    """One dp rank's micro-batches, fetched by a DataLoader with the given `options`; it may run any distance ahead.

    Raises UsageError for options that would change the order, DataError for a dataset without a length or places.
    """

    def __init__(self, dataset: Any, order: DataOrder, rank: int, size: int, options: Mapping[str, Any]) -> None:
        refused = sorted({name for name in options if name in _OURS or (name == "in_order" and not options[name])})
        if refused:
            raise UsageError(f"job.loader: {', '.join(refused)} would change the order of samples; leave it out")
        streams = isinstance(dataset, IterableDataset)  # torch's has __getitem__, too
        if streams or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(
                f"job.loader: a {type(dataset).__name__} cannot go on in its middle: give a dataset with a length and "
                "samples by number (map-style)"
            )
        self._micro_batches = _MicroBatches(order, rank, size)
        own = torch.Generator().manual_seed(order.seed % (1 << 63))  # or each restart would draw from the job's stream
        options = dict(options)
        ordered = _Ordered(dataset, order, options.pop("collate_fn", None) or default_collate)
        self._make = partial(
            DataLoader[Any],
            ordered,
            batch_sampler=self._micro_batches,
            collate_fn=_as_it_is,
            **{"generator": own, **options},
        )
        self._loader = self._make()
        self._fetched: Iterator[Any] | None = None

    def begin(self, consumed: int) -> None:
        """The step after `consumed` is the next to be taken; what was fetched is forgotten."""
        self._micro_batches.consumed = consumed
        self._fetched = None

    def take(self, ids: Ids, begin: int) -> tuple[Any, ...]:
        """The next step's micro-batches, collated. After an error the same step is the next one again."""
        if self._fetched is None:
            self._fetched = iter(self._loader)
        count = len(ids) // self._micro_batches.order.micro_batch
        try:
            return tuple(next(self._fetched) for _ in range(count))
        except BaseException as error:  # torch's iterator would go on behind the micro-batch that failed
            self.begin(begin)
            self.close()
            if isinstance(error, DataError):
                raise type(error)(_said(error)) from error
            raise

    def close(self) -> None:
        """End the worker processes."""
        self._fetched = None
        self._loader = self._make()  # persistent workers end with the old one


class _MicroBatches:
    """For each micro-batch of a rank from `consumed` on, without end, where its step begins in the order, and then the
    positions of its rows."""

    def __init__(self, order: DataOrder, rank: int, size: int) -> None:
        self.order, self._rank, self._size, self.consumed = order, rank, size, 0

    def __iter__(self) -> Iterator[list[int]]:
        consumed, rows = self.consumed, self.order.micro_batch
        while True:
            positions, _, _ = self.order.positions(consumed, self._rank, self._size)
            for first in range(0, len(positions), rows):
                yield [consumed, *positions[first : first + rows].tolist()]
            consumed = self.order.step(consumed).stop


class _Ordered(TorchDataset[Any]):
    """The samples at positions of the global order, collated.

    While one is made, the random streams of Python, numpy and torch are that position's own: an augmentation is the
    same whatever the number of ranks and workers, also after a restart, and another one in the next epoch. So it is
    while a micro-batch is collated, which is the same one, too.
    """

    def __init__(self, dataset: Sequence[Any], order: DataOrder, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._order, self._collate = dataset, order, collate

    def __getitems__(self, places: list[int]) -> Any:
        begin, *positions = places
        if isinstance(self._dataset, Dataset):
            self._dataset.pieces.reach(begin)
        with _kept_streams():
            samples = self._samples(positions)
            self._seed(positions[0], "collate")
            return self._collate(samples)

    def _samples(self, positions: list[int]) -> list[Any]:
        ids: list[int] = self._order.sample_at(positions).tolist()
        if hasattr(self._dataset, "__getitems__"):
            self._seed(positions[0])
            found: list[Any] = self._dataset.__getitems__(ids)
            return found
        return [self._one(*place) for place in zip(positions, ids, strict=True)]

    def _one(self, position: int, number: int) -> Any:
        self._seed(position)
        return self._dataset[number]

    def _seed(self, *parts: object) -> None:
        seed = derived_seed(self._order.seed, *parts)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(np.array([seed & 0xFFFFFFFF, seed >> 32]))


def _as_it_is(micro_batch: Any) -> Any:
    return micro_batch


def _said(error: DataError) -> str:
    """Its message, which torch puts behind the traceback of a worker process."""
    kind = type(error)
    return str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2].rstrip("\n")


@contextmanager
def _kept_streams() -> Iterator[None]:
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
