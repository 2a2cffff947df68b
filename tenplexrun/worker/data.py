"""The loader: a dp rank's share of the global order, step by step.

Samples of one size are gathered into numpy arrays, without torch; others go through torch's DataLoader (`fetching`).
"""

from __future__ import annotations

import errno
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tenplexrun.core.order import DataOrder, Ids, Weights
from tenplexrun.core.shuffle import FEISTEL
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import DataError
from tenplexrun.formats import absolute, has_bytes, has_one_size, open_dataset
from tenplexrun.worker.shared import open_extents, open_shared

Record = dict[str, Any]
_RETRY_S = 0.02


class Source(Protocol):
    """Where a rank's rows come from, step after step."""

    def begin(self, consumed: int) -> None: ...
    def take(self, ids: Ids, begin: int) -> Any: ...
    def close(self) -> None: ...


class Gathered:
    """The source that makes one array of a step's rows when it is asked for them. `gather(ids, begin)` has them, from
    the extents behind a view or from the dataset's own files."""

    def __init__(self, gather: Callable[[Ids, int], npt.NDArray[Any]]) -> None:
        self.take = gather

    def begin(self, consumed: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows of this dp rank: `num_micro_batches` · `micro_batch` of them, as many on every rank.

    `ids` int64 [rows], `rows` [rows, *sample shape] or a tuple of collated micro-batches, `weights` float64 [rows]: a
    step's gradient is the mean over dp ranks of the sum of weight · row's gradient; padding rows weigh 0.
    `consumed_after`: positions once it is committed.
    """

    ids: npt.NDArray[np.int64]
    rows: Any
    weights: npt.NDArray[np.float64]
    num_micro_batches: int
    micro_batch: int
    consumed_after: int

    def micro_batches(self) -> Iterator[tuple[Any, npt.NDArray[np.float64]]]:
        """Rows and weights of each micro-batch: views of `micro_batch` rows, or what collating them made."""
        for number in range(self.num_micro_batches):
            part = slice(number * self.micro_batch, (number + 1) * self.micro_batch)
            yield self.rows[number if isinstance(self.rows, tuple) else part], self.weights[part]


class Loader:
    """Batches of one dp rank from `consumed` committed positions on, without end: epoch follows epoch.

    Batches may be taken ahead; only `commit` advances `consumed`, one batch at a time, so nothing that was prefetched
    is ever counted. Raises DataError for a rank that cannot be.
    """

    def __init__(self, source: Source, order: DataOrder, dp_rank: int, dp_size: int, consumed: int = 0) -> None:
        self.order, self.dp_rank, self.dp_size = order, dp_rank, dp_size
        self._source = source
        self._ahead: deque[int] = deque()
        self._shares: dict[int, tuple[Ids, Weights, int]] = {}
        order.positions(consumed, dp_rank, dp_size)
        self.begin(consumed)

    @property
    def consumed(self) -> int:
        """Positions of the global order that committed steps have read: the loader's whole state."""
        return self._consumed

    def next_batch(self) -> Batch:
        """The batch after the last one taken. Raises DataError when its samples cannot be read."""
        begin = self._ahead[-1] if self._ahead else self._consumed
        if begin not in self._shares:
            self._shares = self.order.shares(begin, self.dp_rank, self.dp_size)
        ids, weights, num_micro_batches = self._shares[begin]
        rows = self._source.take(ids, begin)
        self._ahead.append(self.order.step(begin).stop)
        return Batch(ids, rows, weights, num_micro_batches, self.order.micro_batch, self._ahead[-1])

    def commit(self) -> None:
        """The step of the oldest batch taken is done."""
        if not self._ahead:
            raise DataError("no batch to commit: take one with next_batch() first, commit it once")
        self._consumed = self._ahead.popleft()

    def begin(self, consumed: int, saved: Mapping[str, Any] | None = None) -> None:
        """Go on after `consumed` positions; batches taken ahead are forgotten. Raises DataError if the order `saved`
        with that number is of another dataset or shuffle."""
        if saved is not None:
            self.order.check_continues(DataOrder.from_json(saved))
        self.order.step(consumed)
        self._consumed = consumed
        self._ahead.clear()
        self._source.begin(consumed)

    def close(self) -> None:
        """End the processes that fetch samples, if there are any; batches may still be taken, with new ones."""
        self.begin(self._consumed)
        self._source.close()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()


def open_loader(
    dataset: Any,
    *,
    global_batch: int,
    micro_batch: int,
    seed: int = 0,
    tail: str = "short",
    order_algo: str = FEISTEL,
    fingerprint: str = "",
    dp_rank: int = 0,
    dp_size: int = 1,
    consumed: int = 0,
    show: Callable[[Record], str] | None = None,
    **options: Any,
) -> Loader:
    """A loader of `dataset`: a name as in `tenplexrun.formats`, or samples by number (a map-style dataset of torch's).

    With a name of samples of one size, and without `options`, rows are arrays; all else goes through torch's DataLoader
    with these `options`, micro-batch by micro-batch. `show` asks the node's agent to show the order of a named dataset
    and returns the view's directory: samples are read from the nodes' memory then; None, no launcher, or rows of
    tables: the files are read directly, in the same order. `fingerprint` names the content of a dataset given by
    itself. Raises DataError for a bad dataset or order.
    """
    record: Record = {
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "seed": seed,
        "tail": tail,
        "algo": order_algo,
    }
    samples: Any = dataset
    named = isinstance(dataset, str)
    as_arrays = named and not options and has_one_size(dataset)
    if named and show is not None and has_bytes(dataset):
        spec = absolute(dataset)
        index, order = open_view(show({**record, "dataset": spec, "bare": True}))
        if as_arrays:
            return Loader(Gathered(open_extents(index).gather), order, dp_rank, dp_size, consumed)
        samples = open_shared(spec, index)
    else:
        samples = open_dataset(absolute(dataset)) if named else dataset
        if isinstance(samples, Dataset):
            fingerprint = fingerprint or samples.fingerprint()
        count = len(samples) if hasattr(samples, "__len__") else 1  # Fetcher refuses one without
        order = DataOrder.from_json({**record, "num_samples": count, "fingerprint": fingerprint})
    if as_arrays:
        return Loader(Gathered(lambda ids, begin: samples.gather(ids)), order, dp_rank, dp_size, consumed)
    from tenplexrun.worker.fetching import Fetcher  # needs torch

    return Loader(Fetcher(samples, order, dp_rank, dp_size, options), order, dp_rank, dp_size, consumed)


def open_view(directory: str, patience_s: float = 10.0) -> tuple[Record, DataOrder]:
    """What a view's index.json says, and the order that it shows. Raises DataError when it is no view, or a lost one.

    A view whose process has died is waited for. Afterwards the view is not needed: the extents behind it are.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _open_view(Path(directory))
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.ENOENT) or time.monotonic() > deadline:
                raise DataError(f"cannot read the dataset view {directory}: {error}; is its process alive?") from error
            time.sleep(_RETRY_S)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{directory} is no dataset view of this version: {error!r}") from error


def _open_view(home: Path) -> tuple[Record, DataOrder]:
    index = json.loads((home / "index.json").read_text())
    cursor = json.loads((home / "cursor.json").read_text())
    if not {"samples", "directory"} <= set(index):
        raise KeyError("samples")
    return index, DataOrder.from_json(cursor["order"])
