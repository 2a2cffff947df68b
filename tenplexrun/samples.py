"""Samples in shared memory: extent files of some MB each, immutable, and files of rows that were fetched ahead.

The view writes both; the view, the store (for other nodes) and the loaders of training scripts read them.

    extent-00012.bin    the samples of one extent, end to end; extent-00012.xxh3: checksums (u64) of its blocks
    ahead-….rows        how many rows (i64), their sample ids ascending (i64 each), the rows
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.errors import DataError

BLOCK_BYTES = 64 << 10
MIN_EXTENT_BYTES, MAX_EXTENT_BYTES, EXTENTS = 256 << 10, 32 << 20, 64
Ids = npt.NDArray[np.int64]
FindRows = Callable[[Ids, "int | None"], "list[str]"]
"""Of sample ids, for the step that begins at a position: the files that have their rows. Waits for them."""
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Where samples lie: sample i is record i mod `samples_per_extent` of extent ⌊i / `samples_per_extent`⌋.

    `dtype` (numpy's array-protocol string) and `shape` are those of one sample.
    """

    num_samples: int
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    samples_per_extent: int

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_samples * self.sample_bytes

    @property
    def num_extents(self) -> int:
        return -(-self.num_samples // self.samples_per_extent)

    @property
    def extent_bytes(self) -> int:
        """Of each extent but the last."""
        return self.samples_per_extent * self.sample_bytes

    @property
    def block_bytes(self) -> int:
        """Of each block of an extent that has a checksum of its own, but the last: whole samples."""
        return max(1, BLOCK_BYTES // self.sample_bytes) * self.sample_bytes

    def samples_in(self, extent: int) -> int:
        return min(self.samples_per_extent, self.num_samples - extent * self.samples_per_extent)

    def bytes_of(self, extents: Iterable[int]) -> int:
        return sum(map(self.samples_in, extents)) * self.sample_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Catalogue:
        """Inverse of `to_json`. Raises DataError on missing or unknown fields."""
        if not isinstance(record, Mapping) or set(record) != {field.name for field in fields(cls)}:
            raise DataError(
                f"not a catalogue of samples: {record!r:.200}; run the same version of tenplexrun everywhere"
            )
        return cls(**{**record, "shape": tuple(record["shape"])})


def samples_per_extent(num_samples: int, sample_bytes: int) -> int:
    """So that there are some dozens of extents to share, of a size that is good to move."""
    wanted = min(max(num_samples * sample_bytes // EXTENTS, MIN_EXTENT_BYTES), MAX_EXTENT_BYTES)
    return min(max(1, wanted // sample_bytes), num_samples)


def extent_name(number: int) -> str:
    return f"extent-{number:05d}.bin"


def sums_name(number: int) -> str:
    return f"extent-{number:05d}.xxh3"


def block_sums(data: memoryview, block_bytes: int) -> npt.NDArray[np.uint64]:
    """Checksums (xxh3_64) of the blocks of an extent, or of a run of them."""
    starts = range(0, len(data), block_bytes)
    return np.array([xxhash.xxh3_64_intdigest(data[start : start + block_bytes]) for start in starts], np.uint64)


class Extents:
    """Reads samples: those of the extents in `here` from their files in `directory`, which are mapped when first
    needed, others from files that `find` names; without it every extent is here.
    """

    def __init__(
        self, catalogue: Catalogue, directory: str, here: Container[int] | None = None, find: FindRows | None = None
    ) -> None:
        self.catalogue = catalogue
        self.directory = directory
        self._here = range(catalogue.num_extents) if here is None else here
        self._find = find
        self._maps: dict[int, memoryview] = {}

    @property
    def all_here(self) -> bool:
        return self._find is None

    def gather(self, ids: Ids, begin: int | None = None) -> npt.NDArray[Any]:
        """The samples `ids` [n] as a new array [n, *shape]. `begin`: where the step that reads them begins in the order.

        Raises DataError when an extent is missing, or rows that are not here cannot be had.
        """
        catalogue, size = self.catalogue, self.catalogue.sample_bytes
        rows = np.empty((len(ids), size), dtype=np.uint8)
        data = rows.reshape(-1).data
        numbers, records = np.divmod(ids, catalogue.samples_per_extent)
        absent = []
        # row by row: one copy, whose cost does not grow with the number of extents as that of numpy's indexing does
        places = zip(numbers.tolist(), (records * size).tolist(), strict=True)
        for start, (number, offset) in zip(range(0, len(data), size), places, strict=True):
            extent = self._maps.get(number) or self._map(number)
            if extent is None:
                absent.append(start // size)
            else:
                data[start : start + size] = extent[offset : offset + size]
        if absent:
            rows[absent] = self._fetched(ids[absent], begin)
        return rows.view(catalogue.dtype).reshape(len(ids), *catalogue.shape)

    def forget(self, number: int) -> None:
        self._maps.pop(number, None)

    def _fetched(self, ids: Ids, begin: int | None) -> npt.NDArray[np.uint8]:
        assert self._find is not None
        for attempt in range(_ATTEMPTS):
            try:
                return rows_of(ids, self._find(ids, begin), self.catalogue.sample_bytes)
            except FileNotFoundError:  # dropped since, or with the process that told: ask again
                if attempt == _ATTEMPTS - 1:
                    raise DataError(f"rows that were fetched ahead into {self.directory} vanish again and again") from None
        raise AssertionError

    def _map(self, number: int) -> memoryview | None:
        if number not in self._here:
            return None
        num_bytes = self.catalogue.samples_in(number) * self.catalogue.sample_bytes
        path = os.path.join(self.directory, extent_name(number))
        try:
            self._maps[number] = np.memmap(path, dtype=np.uint8, mode="r", shape=(num_bytes,)).data
        except FileNotFoundError as error:
            if self._find is not None:
                return None  # still being loaded
            raise DataError(f"cannot map {path}: {error}; the dataset view has lost it") from error
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map {path}: {error}; the dataset view has lost it") from error
        return self._maps[number]


def rows_bytes(num_rows: int, sample_bytes: int) -> tuple[int, int]:
    """Of a file of rows: where they begin, and its size."""
    start = 8 * (1 + num_rows)
    return start, start + num_rows * sample_bytes


def read_rows(path: str, sample_bytes: int) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Sample ids [n] of a file of rows, ascending, and the rows [n, sample_bytes], mapped. Raises FileNotFoundError."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    count = int(data[:8].view(np.int64)[0])
    start, stop = rows_bytes(count, sample_bytes)
    return data[8:start].view(np.int64), data[start:stop].reshape(count, sample_bytes)


def found_in(ids: Ids, sorted_ids: Ids) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Which of `ids` are among `sorted_ids`, and where those would be."""
    at = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return sorted_ids[at] == ids, at


def rows_of(ids: Ids, paths: Iterable[str], sample_bytes: int) -> npt.NDArray[np.uint8]:
    """The rows of `ids` [n, sample_bytes] out of files that have all of them. Raises FileNotFoundError, DataError."""
    rows = np.empty((len(ids), sample_bytes), dtype=np.uint8)
    left = np.ones(len(ids), dtype=bool)
    for path in paths:
        there, data = read_rows(path, sample_bytes)
        found, at = found_in(ids, there)
        found &= left
        rows[found] = data[at[found]]
        left &= ~found
    if left.any():
        raise DataError(f"row {ids[left][0]} is in none of the files that should have it; the dataset view has lost it")
    return rows
