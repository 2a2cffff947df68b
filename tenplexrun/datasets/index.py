"""A dataset's index: what was in it once, sample by sample, to hold it against what is there now.

One .npz file: `header` (JSON: version, spec, fingerprint, number, type and shape of the samples), and of each sample
`sizes` (bytes, int64) and `checksums` (xxh3 of them, uint64).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import DataError

VERSION = 1


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """`sizes` int64 and `checksums` uint64 [num_samples]."""

    spec: str
    fingerprint: str
    dtype: str
    shape: tuple[int, ...]
    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, dataset: Dataset) -> SampleIndex:
        """Read every sample. Raises DataError for one that cannot be read."""
        sizes = np.empty(len(dataset), dtype=np.int64)
        checksums = np.empty(len(dataset), dtype=np.uint64)
        for number in range(len(dataset)):
            raw = dataset.raw(number)
            sizes[number], checksums[number] = len(raw), xxhash.xxh3_64_intdigest(raw)
        return cls(dataset.spec, dataset.fingerprint(), dataset.dtype, dataset.shape, sizes, checksums)

    def save(self, path: str) -> None:
        """Appears by rename, so that a reader finds a whole one or none. Raises DataError when it cannot be written."""
        names = ("spec", "fingerprint", "dtype", "shape")
        header = json.dumps({"version": VERSION, **{name: getattr(self, name) for name in names}})
        new = f"{path}.{os.getpid()}.new"
        try:
            with open(new, "wb") as file:
                np.savez(file, header=np.array(header), sizes=self.sizes, checksums=self.checksums)
            os.replace(new, path)
        except OSError as error:
            raise DataError(
                f"cannot write the index {path}: {error.strerror}; name another file with --index"
            ) from error

    @classmethod
    def load(cls, path: str) -> SampleIndex:
        """Raises DataError for a file that is none."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                header: dict[str, Any] = json.loads(str(arrays["header"]))
                if header.pop("version") != VERSION:
                    raise ValueError("of another version")
                shape = tuple(header.pop("shape"))
                return cls(**header, shape=shape, sizes=arrays["sizes"], checksums=arrays["checksums"])
        except FileNotFoundError:
            raise DataError(f"there is no index {path}: make one with `tenplexctl data index`") from None
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise DataError(
                f"{path} is no index of a dataset ({error}); make one with `tenplexctl data index`"
            ) from error

    def differences(self, dataset: Dataset) -> Iterator[str]:
        """What is not as it was, a line each: first of the whole, then of every sample."""
        there, here = ((each.dtype, tuple(each.shape)) for each in (self, dataset))
        if there != here:
            yield f"samples were of {there[0]} {list(there[1])}, are of {here[0]} {list(here[1])}"
        if len(self.sizes) != len(dataset):
            yield f"there were {len(self.sizes)} samples, there are {len(dataset)}"
        for number in range(min(len(self.sizes), len(dataset))):
            try:
                raw = dataset.raw(number)
            except DataError as error:
                yield f"sample {number}: {error}"
                continue
            if len(raw) != self.sizes[number]:
                yield f"sample {number}: {dataset.where(number)} had {self.sizes[number]} bytes, has {len(raw)}"
            elif xxhash.xxh3_64_intdigest(raw) != self.checksums[number]:
                yield f"sample {number}: {dataset.where(number)}: its {len(raw)} bytes are others"
