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


class Proved:
    """What this process has mapped of a dataset's extents, and held against checksums; readers of one dataset share it.

    Extents are mapped end to end, for numpy to gather from all of them at once; where they do not end at pages (odd
    sizes of many KB), one by one, and rows are copied one by one. `trusted`: those that it has written itself.
    """

    def __init__(self, catalogue: Catalogue, trusted: Collection[int] = ()) -> None:
        self.trusted = trusted
        extent_bytes, num_extents = catalogue.extent_bytes, catalogue.num_extents
        aligned = extent_bytes % mmap.PAGESIZE == 0 or num_extents == 1
        self.memory = EndToEnd(num_extents * extent_bytes) if aligned else None
        self.maps: dict[int, memoryview] = {}
        self.sums: dict[int, list[int]] = {}
        self.mapped = np.zeros(num_extents, dtype=bool)
        self.blocks = -(-catalogue.samples_per_extent // catalogue.samples_per_block)
        """Of each extent but the last, which may have fewer."""
        self.proved = np.zeros(num_extents * self.blocks, dtype=bool)
        last = -(-catalogue.samples_in(num_extents - 1) // catalogue.samples_per_block)
        self.unproved = (num_extents - 1) * self.blocks + last
        self.lock = threading.Lock()  # what is read must stay mapped


class Extents:
    """Reads samples: those of the extents in `here` from the files in `directory`, others from files that `find` names.

    A block is held against its checksum before the first of its samples is read; with `find`, one that fails counts as
    not here. `proved`: what other readers of this dataset have done of that.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        directory: str,
        here: Collection[int] | None = None,
        find: FindRows | None = None,
        proved: Proved | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.directory = directory
        self.about: dict[str, Any] = {"directory": directory}  # what a reader in another process has to know
        self._find = find
        self._shared = Proved(catalogue) if proved is None else proved
        self._here = np.ones(catalogue.num_extents, dtype=bool)
        if here is not None:
            self._here[:] = False
            self._here[np.fromiter(here, np.int64)] = True

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
        with self._shared.lock:
            there = self._there(ids)
            if there is None:
                return self._take(ids)
            if not wait:
                raise BlockingIOError
            some = self._take(ids[there])
        rows = np.empty((len(ids), *self.catalogue.shape), self.catalogue.dtype)
        rows[there] = some
        rows[~there] = self._fetched(ids[~there], begin)
        return rows

    def read(self, starts: Ids, ends: Ids, begin: int | None = None, wait: bool = True) -> list[bytes]:
        """Bytes [start, end) each, of all samples laid end to end. Raises as `gather`."""
        size, shared = self.catalogue.sample_bytes, self._shared
        places = list(zip(starts.tolist(), ends.tolist(), strict=True))
        with shared.lock:
            ids = covering(starts, ends, size) if shared.unproved or shared.memory is None else starts[:0]
            if shared.memory is not None and self._there(ids) is None:
                data = shared.memory.data.data
                return [bytes(data[start:end]) for start, end in places]
        data = np.ascontiguousarray(self.gather(ids, begin, wait)).reshape(-1).view(np.uint8).data
        firsts = np.searchsorted(ids, starts // size) * size
        return [
            bytes(data[first + start % size :][: end - start])
            for first, (start, end) in zip(firsts.tolist(), places, strict=True)
        ]

    def forget(self, number: int) -> None:
        """Its file is gone: let its memory go, too."""
        with self._shared.lock:
            if self._shared.mapped[number]:
                self._unmap(number)

    def _there(self, ids: Ids) -> npt.NDArray[np.bool_] | None:
        """Which of `ids` can be read from extents; None: all."""
        if not self._shared.unproved:  # as always after the first epoch: then numpy is all that it takes
            return None
        numbers = ids // self.catalogue.samples_per_extent
        for number in np.unique(numbers[~self._shared.mapped[numbers] & self._here[numbers]]).tolist():
            self._map(number)
        records = ids - numbers * self.catalogue.samples_per_extent
        blocks = numbers * self._shared.blocks + records // self.catalogue.samples_per_block
        for block in np.unique(blocks[~self._shared.proved[blocks] & self._shared.mapped[numbers]]).tolist():
            self._prove(block)
        there: npt.NDArray[np.bool_] = self._shared.proved[blocks]
        return None if there.all() else there

    def _take(self, ids: Ids) -> npt.NDArray[Any]:
        if self._shared.memory is None:
            return self._take_each(ids)
        data = self._shared.memory.data[: self.catalogue.num_bytes]
        return data.view(self.catalogue.dtype).reshape(-1, *self.catalogue.shape).take(ids, axis=0)

    def _take_each(self, ids: Ids) -> npt.NDArray[Any]:
        catalogue, size = self.catalogue, self.catalogue.sample_bytes
        numbers = ids // catalogue.samples_per_extent
        rows = np.empty((len(ids), size), dtype=np.uint8)
        data = rows.reshape(-1).data
        offsets = (ids - numbers * catalogue.samples_per_extent) * size
        places = zip(numbers.tolist(), offsets.tolist(), strict=True)
        for start, (number, offset) in zip(range(0, len(data), size), places, strict=True):
            data[start : start + size] = self._shared.maps[number][offset : offset + size]
        return rows.view(catalogue.dtype).reshape(len(ids), *catalogue.shape)

    def _map(self, number: int) -> None:
        num_bytes = self.catalogue.bytes_of([number])
        path = os.path.join(self.directory, extent_name(number))
        try:
            if self._shared.memory is not None:
                self._shared.memory.put(path, number * self.catalogue.extent_bytes, num_bytes)
            else:
                self._shared.maps[number] = np.memmap(path, dtype=np.uint8, mode="r", shape=(num_bytes,)).data
            sums = np.fromfile(os.path.join(self.directory, sums_name(number)), np.uint64)
        except (OSError, ValueError) as error:
            if self._find is None:
                raise DataError(f"cannot map {path}: {error}; the dataset view has lost it") from error
            return  # still being loaded, or loaded anew
        self._shared.mapped[number], self._shared.sums[number] = True, sums.tolist()
        if number in self._shared.trusted:
            first = number * self._shared.blocks
            self._shared.proved[first : first + len(sums)] = True
            self._shared.unproved -= len(sums)

    def _unmap(self, number: int) -> None:
        self._shared.mapped[number] = False
        proved = self._shared.proved[number * self._shared.blocks : (number + 1) * self._shared.blocks]
        self._shared.unproved += int(np.count_nonzero(proved))
        proved[:] = False
        self._shared.maps.pop(number, None)
        if self._shared.memory is not None:
            self._shared.memory.clear(number * self.catalogue.extent_bytes, self.catalogue.extent_bytes)

    def _prove(self, block: int) -> None:
        number, place = divmod(block, self._shared.blocks)
        if not self._shared.mapped[number]:
            return  # another block of it was damaged
        size = self.catalogue.samples_per_block * self.catalogue.sample_bytes
        start, stop = place * size, min((place + 1) * size, self.catalogue.bytes_of([number]))
        if self._shared.memory is not None:
            first = number * self.catalogue.extent_bytes
            data = self._shared.memory.data.data[first + start : first + stop]
        else:
            data = self._shared.maps[number][start:stop]
        if self._shared.sums[number][place : place + 1] == [xxhash.xxh3_64_intdigest(data)]:
            self._shared.proved[block] = True
            self._shared.unproved -= 1
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


def covering(starts: Ids, ends: Ids, size: int) -> Ids:
    """The numbers of the records of `size` bytes that bytes [start, end) lie in, ascending, each once."""
    firsts = starts // size
    counts = np.maximum(-(-ends // size) - firsts, 0)
    counts[ends <= starts] = 0
    skipped = np.cumsum(counts) - counts
    return np.unique(np.repeat(firsts - skipped, counts) + np.arange(counts.sum()))


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
