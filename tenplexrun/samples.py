"""Samples in shared memory: extent files of some MB each, immutable, and files of rows that were fetched ahead.

The view writes both; the view, the store (for other nodes) and the loaders of training scripts read them.

    extent-00012.bin    the samples of one extent, end to end
    extent-00012.xxh3   checksums (xxh3_64, u64) of its blocks
    ahead-7.rows        number of rows (i64), their sample ids ascending (i64 each), the rows
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.errors import DataError
from tenplexrun.mapping import EndToEnd

BLOCK_BYTES = 64 << 10
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
    def samples_per_block(self) -> int:
        """Each block of an extent has a checksum; the last one may be shorter."""
        return min(max(1, BLOCK_BYTES // self.sample_bytes), self.samples_per_extent)

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


def extent_name(number: int) -> str:
    return f"extent-{number:05d}.bin"


def sums_name(number: int) -> str:
    return f"extent-{number:05d}.xxh3"


def block_sums(data: memoryview, catalogue: Catalogue) -> npt.NDArray[np.uint64]:
    """Checksums of the blocks of an extent, or of some whole ones of it."""
    size = catalogue.samples_per_block * catalogue.sample_bytes
    starts = range(0, len(data), size)
    return np.array([xxhash.xxh3_64_intdigest(data[start : start + size]) for start in starts], np.uint64)


def samples_per_extent(sample_bytes: int, extent_bytes: int) -> int:
    """How many samples fit into an extent; if it can be, so many that extents end where pages do, see `Extents`."""
    fitting = max(1, extent_bytes // sample_bytes)
    unit = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, sample_bytes)
    return fitting // unit * unit or fitting


class Extents:
    """Reads samples: those of the extents in `here` from the files in `directory`, others from files that `find` names.

    Extents are mapped when first needed: end to end, for numpy to gather from all of them at once; where they do not
    end at pages (odd sizes of many KB), one by one, and rows are copied one by one. A block is held against its
    checksum before the first of its samples is read; with `find`, one that fails counts as not here.
    """

    def __init__(
        self, catalogue: Catalogue, directory: str, here: Collection[int] | None = None, find: FindRows | None = None
    ) -> None:
        self.catalogue = catalogue
        self.directory = directory
        self.about: dict[str, Any] = {"directory": directory}  # what a reader in another process has to know
        self._find = find
        self._extent_bytes = catalogue.extent_bytes
        aligned = self._extent_bytes % mmap.PAGESIZE == 0 or catalogue.num_extents == 1
        self._memory = EndToEnd(catalogue.num_extents * self._extent_bytes) if aligned else None
        self._here = np.ones(catalogue.num_extents, dtype=bool)
        if here is not None:
            self._here[:] = False
            self._here[np.fromiter(here, np.int64)] = True
        self._mapped = np.zeros(catalogue.num_extents, dtype=bool)
        self._blocks = -(-catalogue.samples_per_extent // catalogue.samples_per_block)
        self._proved = np.zeros(catalogue.num_extents * self._blocks, dtype=bool)
        self._proved[self._blocks_of(catalogue.num_extents - 1).stop :] = True  # the last extent has fewer
        self._all_proved = False
        self._trusted: set[int] = set()
        self._maps: dict[int, memoryview] = {}
        self._sums: dict[int, list[int]] = {}
        self._lock = threading.Lock()  # what is read must stay mapped

    @property
    def here(self) -> list[int]:
        """The extents in `directory`, or on their way there."""
        return list(np.flatnonzero(self._here).tolist())

    @property
    def all_here(self) -> bool:
        return bool(self._here.all())

    def gather(self, ids: Ids, begin: int | None = None, wait: bool = True) -> npt.NDArray[Any]:
        """The samples `ids` [n] as a new array [n, *shape]. `begin`: position in the order of the step that reads them.

        Raises DataError when an extent is missing or damaged, and its rows cannot be had elsewhere; unless `wait`,
        BlockingIOError for rows that are not here.
        """
        with self._lock:
            if self._all_proved and self._memory is not None:
                return self._take(ids, ids)
            numbers = ids // self.catalogue.samples_per_extent
            unmapped = np.unique(numbers[~self._mapped[numbers] & self._here[numbers]]).tolist()
            for number in unmapped:
                self._map(number)
            records = ids - numbers * self.catalogue.samples_per_extent
            blocks = numbers * self._blocks + records // self.catalogue.samples_per_block
            unproved = np.unique(blocks[~self._proved[blocks] & self._mapped[numbers]]).tolist()
            for block in unproved:
                self._prove(block)
            if unmapped or unproved:
                self._all_proved = bool(self._proved.all())
            there = self._proved[blocks]
            if there.all():
                return self._take(numbers, ids)
            if not wait:
                raise BlockingIOError
            some = self._take(numbers[there], ids[there])
        rows = np.empty((len(ids), *self.catalogue.shape), self.catalogue.dtype)
        rows[there] = some
        rows[~there] = self._fetched(ids[~there], begin)
        return rows

    def trust(self, numbers: Iterable[int]) -> None:
        """Extents that this process has written a moment ago need no proof."""
        self._trusted.update(numbers)

    def forget(self, number: int) -> None:
        """Its file is gone: let its memory go, too."""
        with self._lock:
            if self._mapped[number]:
                self._unmap(number)

    def _take(self, numbers: Ids, ids: Ids) -> npt.NDArray[Any]:
        if self._memory is None:
            return self._take_each(numbers, ids)
        data = self._memory.data[: self.catalogue.num_bytes]
        return data.view(self.catalogue.dtype).reshape(-1, *self.catalogue.shape).take(ids, axis=0)

    def _take_each(self, numbers: Ids, ids: Ids) -> npt.NDArray[Any]:
        catalogue, size = self.catalogue, self.catalogue.sample_bytes
        rows = np.empty((len(ids), size), dtype=np.uint8)
        data = rows.reshape(-1).data
        offsets = (ids - numbers * catalogue.samples_per_extent) * size
        places = zip(numbers.tolist(), offsets.tolist(), strict=True)
        for start, (number, offset) in zip(range(0, len(data), size), places, strict=True):
            data[start : start + size] = self._maps[number][offset : offset + size]
        return rows.view(catalogue.dtype).reshape(len(ids), *catalogue.shape)

    def _map(self, number: int) -> None:
        num_bytes = self.catalogue.bytes_of([number])
        path = os.path.join(self.directory, extent_name(number))
        try:
            if self._memory is not None:
                self._memory.put(path, number * self._extent_bytes, num_bytes)
            else:
                self._maps[number] = np.memmap(path, dtype=np.uint8, mode="r", shape=(num_bytes,)).data
            self._sums[number] = np.fromfile(os.path.join(self.directory, sums_name(number)), np.uint64).tolist()
        except (OSError, ValueError) as error:
            if self._find is None:
                raise DataError(f"cannot map {path}: {error}; the dataset view has lost it") from error
            return  # still being loaded, or loaded anew
        self._mapped[number] = True
        if number in self._trusted:
            self._proved[self._blocks_of(number)] = True

    def _blocks_of(self, number: int) -> slice:
        first = number * self._blocks
        return slice(first, first - (-self.catalogue.samples_in(number) // self.catalogue.samples_per_block))

    def _unmap(self, number: int) -> None:
        self._all_proved = False
        self._mapped[number] = False
        self._proved[self._blocks_of(number)] = False
        self._trusted.discard(number)
        self._maps.pop(number, None)
        if self._memory is not None:
            self._memory.clear(number * self._extent_bytes, self._extent_bytes)

    def _prove(self, block: int) -> None:
        number, place = divmod(block, self._blocks)
        if not self._mapped[number]:
            return  # another block of it was damaged
        size = self.catalogue.samples_per_block * self.catalogue.sample_bytes
        start, stop = place * size, min((place + 1) * size, self.catalogue.bytes_of([number]))
        if self._memory is not None:
            first = number * self._extent_bytes
            data = self._memory.data.data[first + start : first + stop]
        else:
            data = self._maps[number][start:stop]
        sums = self._sums[number]
        if place < len(sums) and xxhash.xxh3_64_intdigest(data) == sums[place]:
            self._proved[block] = True
        elif self._find is None:
            raise DataError(f"extent {number} in {self.directory} is damaged; start the job again")
        else:
            self._unmap(number)  # the view loads it anew

    def _fetched(self, ids: Ids, begin: int | None) -> npt.NDArray[Any]:
        assert self._find is not None
        for _ in range(_ATTEMPTS):
            try:
                rows = rows_of(ids, self._find(ids, begin), self.catalogue.sample_bytes)
            except FileNotFoundError:  # dropped since, or with the process that told: ask again
                continue
            return rows.view(self.catalogue.dtype).reshape(len(ids), *self.catalogue.shape)
        raise DataError(f"rows that were fetched ahead into {self.directory} vanish again and again")


def rows_places(num_rows: int, sample_bytes: int) -> tuple[int, int]:
    """In a file of rows: where they begin, and where they end."""
    start = 8 * (1 + num_rows)
    return start, start + num_rows * sample_bytes


def read_rows(path: str, sample_bytes: int) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Sample ids [n] of a file of rows, ascending, and the rows [n, sample_bytes], mapped. Raises FileNotFoundError."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    count = int(data[:8].view(np.int64)[0])
    start, stop = rows_places(count, sample_bytes)
    return data[8:start].view(np.int64), data[start:stop].reshape(count, sample_bytes)


def found_in(ids: Ids, among: Ids) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Which of `ids` are `among` ascending ones, and where those would be."""
    at = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    return among[at] == ids, at


def rows_of(ids: Ids, paths: Iterable[str], sample_bytes: int) -> npt.NDArray[np.uint8]:
    """The rows of `ids` [n, sample_bytes] out of files that have all of them. Raises FileNotFoundError, DataError."""
    rows = np.empty((len(ids), sample_bytes), dtype=np.uint8)
    left = np.ones(len(ids), dtype=bool)
    for path in paths:
        among, data = read_rows(path, sample_bytes)
        found, at = found_in(ids, among)
        found &= left
        rows[found] = data[at[found]]
        left &= ~found
    if left.any():
        raise DataError(f"row {ids[left][0]} is in none of the files that should have it; the dataset view has lost it")
    return rows
