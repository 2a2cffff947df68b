"""Samples in shared memory: extent files of some MB each, immutable, that hold a dataset's samples end to end.

The view writes them once; the view and the loaders of training scripts read them by mmap.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.errors import DataError
from tenplexrun.mapping import EndToEnd


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
    def num_extents(self) -> int:
        return -(-self.num_samples // self.samples_per_extent)

    def samples_in(self, extent: int) -> int:
        return min(self.samples_per_extent, self.num_samples - extent * self.samples_per_extent)

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


def samples_per_extent(sample_bytes: int, extent_bytes: int) -> int:
    """How many samples fit into an extent; if it can be, so many that extents end where pages do, see `Extents`."""
    fitting = max(1, extent_bytes // sample_bytes)
    unit = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, sample_bytes)
    return fitting // unit * unit or fitting


class Extents:
    """Reads samples from the extent files in `directory`, which are mapped when first needed.

    They are mapped end to end, for numpy to gather from all of them at once; where they do not end at pages (odd sizes
    of many KB), one by one, and rows are copied one by one.
    """

    def __init__(self, catalogue: Catalogue, directory: str) -> None:
        self.catalogue = catalogue
        self.directory = directory
        self._extent_bytes = catalogue.samples_per_extent * catalogue.sample_bytes
        aligned = self._extent_bytes % mmap.PAGESIZE == 0 or catalogue.num_extents == 1
        self._memory = EndToEnd(catalogue.num_extents * self._extent_bytes) if aligned else None
        self._mapped = np.zeros(catalogue.num_extents, dtype=bool)
        self._maps: dict[int, memoryview] = {}

    def gather(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The samples `ids` [n] as a new array [n, *shape]. Raises DataError when an extent is missing."""
        numbers = ids // self.catalogue.samples_per_extent
        for number in np.unique(numbers[~self._mapped[numbers]]).tolist():
            self._map(number)
        if self._memory is None:
            return self._gather_each(numbers, ids)
        data = self._memory.data[: self.catalogue.num_samples * self.catalogue.sample_bytes]
        return data.view(self.catalogue.dtype).reshape(-1, *self.catalogue.shape).take(ids, axis=0)

    def _gather_each(self, numbers: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        catalogue, size = self.catalogue, self.catalogue.sample_bytes
        rows = np.empty((len(ids), size), dtype=np.uint8)
        data = rows.reshape(-1).data
        offsets = (ids - numbers * catalogue.samples_per_extent) * size
        places = zip(numbers.tolist(), offsets.tolist(), strict=True)
        for start, (number, offset) in zip(range(0, len(data), size), places, strict=True):
            data[start : start + size] = self._maps[number][offset : offset + size]
        return rows.view(catalogue.dtype).reshape(len(ids), *catalogue.shape)

    def _map(self, number: int) -> None:
        num_bytes = self.catalogue.samples_in(number) * self.catalogue.sample_bytes
        path = os.path.join(self.directory, extent_name(number))
        try:
            if self._memory is not None:
                self._memory.put(path, number * self._extent_bytes, num_bytes)
            else:
                self._maps[number] = np.memmap(path, dtype=np.uint8, mode="r", shape=(num_bytes,)).data
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map {path}: {error}; the dataset view has lost it") from error
        self._mapped[number] = True
