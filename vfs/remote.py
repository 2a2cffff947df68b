"""A dataset's own files, local or remote: where samples come from that no node has."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tenplexrun import places
from tenplexrun.core.order import Ids
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.datasets.tables import Table
from tenplexrun.errors import DataChangedError, DataError, DataModifiedError
from tenplexrun.formats import has_one_size, open_dataset
from tenplexrun.vfs.outage import Tell

THREADS = 16
T = TypeVar("T")


class Remote:
    """Reads dataset `spec`, opened when first needed. May be used by several threads, each with files of its own.

    Files that were written to meanwhile are listed again, and go on to be read if `fingerprint` is still theirs.

    `source` has its samples, `dataset` what extents are made of: the same, or blocks of bytes (`tenplexrun.places`).
    """

    def __init__(self, spec: str, tell: Tell) -> None:
        self.spec, self._tell = spec, tell
        self.fingerprint = ""  # of `dataset`; "": not known yet
        self._local = threading.local()
        self._opened: tuple[Dataset, Dataset] | None = None
        self._opening, self._listing = threading.Lock(), threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "remote")

    @property
    def one_size(self) -> bool:
        """Of the samples. Raises DataError for a name that is none."""
        return has_one_size(self.spec)

    @property
    def source(self) -> Dataset:
        """Raises DataError."""
        return self._both()[0]

    @property
    def dataset(self) -> Dataset:
        """Raises DataError."""
        return self._both()[1]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes of the samples laid end to end. Raises DataError."""
        return self._read(lambda own: own.read(offset, num_bytes))

    def gather(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Samples [n, sample_bytes], many read at once: remote files answer late. Raises DataError."""

        def part(some: Ids) -> npt.NDArray[np.uint8]:
            rows = self._read(lambda own: own.gather(some))
            return np.ascontiguousarray(rows).view(np.uint8).reshape(len(some), -1)

        if self.dataset.pieces.remote:  # it sees to that itself
            return part(ids)
        try:
            return np.concatenate([*self._pool.map(part, np.array_split(ids, min(THREADS, len(ids))))])
        except (CancelledError, RuntimeError) as error:
            raise DataError(f"dataset {self.spec}: the view was told to stop while it read samples") from error

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _both(self) -> tuple[Dataset, Dataset]:
        with self._opening:
            if self._opened is None:
                self._opened = self._list()
            return self._opened

    def _list(self) -> tuple[Dataset, Dataset]:
        source = open_dataset(self.spec)
        if isinstance(source, Table):
            source = source.rendered()
        return source, source if source.spans is None else places.blocks(source)

    def _read(self, read: Callable[[Dataset], T]) -> T:
        opened = self.dataset
        try:
            return read(self._own(opened))
        except DataModifiedError as error:
            self._list_again(opened, error)
        return read(self._own(self.dataset))

    def _list_again(self, before: Dataset, error: DataModifiedError) -> None:
        """Raises DataChangedError where the content has changed, too."""
        with self._listing:
            if self.dataset is not before:
                return  # another thread has done it
            try:
                found = self._list()
                same = self.fingerprint in ("", found[1].fingerprint())
            except DataError:
                same = False
            if not same:
                raise DataChangedError(f"dataset {self.spec} is not what it was: {error}") from error
            self._tell("failed", message=f"{error}; where it was compared it is, and so is read on")
            self._opened = found  # not before: other threads read from it at once

    def _own(self, opened: Dataset) -> Dataset:
        """This thread's."""
        if getattr(self._local, "opened", None) is not opened:
            self._local.opened = opened
            self._local.dataset = dataclasses.replace(opened, pieces=copy.copy(opened.pieces))
        own: Dataset = self._local.dataset
        return own
