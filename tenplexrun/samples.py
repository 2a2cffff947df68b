"""Samples in shared memory: extent files of some MB each, immutable, that hold a dataset's samples end to end.

The view writes them once; the view and the loaders of training scripts read them by mmap.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.errors import DataError


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


class Extents:
    """Reads samples from the extent files in `directory`, which are mapped when first needed."""

    def __init__(self, catalogue: Catalogue, directory: str) -> None:
        self.catalogue = catalogue
        self.directory = directory
        self._maps: dict[int, memoryview] = {}

    def gather(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The samples `ids` [n] as a new array [n, *shape]. Raises DataError when an extent is missing."""
        catalogue, size = self.catalogue, self.catalogue.sample_bytes
        rows = np.empty((len(ids), size), dtype=np.uint8)
        data = rows.reshape(-1).data
        numbers, records = np.divmod(ids, catalogue.samples_per_extent)
        # row by row: one copy, whose cost does not grow with the number of extents as that of numpy's indexing does
        places = zip(numbers.tolist(), (records * size).tolist(), strict=True)
        for start, (number, offset) in zip(range(0, len(data), size), places, strict=True):
            data[start : start + size] = (self._maps.get(number) or self._map(number))[offset : offset + size]
        return rows.view(catalogue.dtype).reshape(len(ids), *catalogue.shape)

    def _map(self, number: int) -> memoryview:
        num_bytes = self.catalogue.samples_in(number) * self.catalogue.sample_bytes
        path = os.path.join(self.directory, extent_name(number))
        try:
            self._maps[number] = np.memmap(path, dtype=np.uint8, mode="r", shape=(num_bytes,)).data
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map {path}: {error}; the dataset view has lost it") from error
        return self._maps[number]
