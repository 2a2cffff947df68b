"""A dataset's index: what was in it once, sample by sample, to hold it against what is there now.

One .npz file: `header` (JSON: version, spec, fingerprint, type and shape of the samples, sizes of the files), and of
each sample `starts` (first byte in the files laid end to end, int64), `sizes` (bytes, int64) and `checksums` (xxh3 of
them, uint64). A dataset opened with it is not scanned, and has its fingerprint.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.datasets import remote
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import DataError

VERSION = 2
SUFFIX = ".index.npz"
_TOGETHER = 256
_LOOKED_AT = 16


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """`starts` and `sizes` int64, `checksums` uint64 [num_samples]. Where samples are no bytes of the files, as rows of
    tables, there are no starts."""

    spec: str
    fingerprint: str
    dtype: str
    shape: tuple[int, ...]
    files: tuple[int, ...]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, dataset: Dataset) -> SampleIndex:
        """Read every sample. Raises DataError for one that cannot be read."""
        sizes = np.empty(len(dataset), dtype=np.int64)
        checksums = np.empty(len(dataset), dtype=np.uint64)
        for numbers in _groups(len(dataset)):
            for number, raw in zip(numbers, dataset.raw_many(numbers), strict=True):
                sizes[number], checksums[number] = len(raw), xxhash.xxh3_64_intdigest(raw)
        starts = dataset.spans.starts if dataset.spans is not None else np.empty(0, dtype=np.int64)
        kind = dataset.fingerprint(), dataset.dtype, tuple(dataset.shape), tuple(dataset.pieces.sizes)
        return cls(dataset.spec, *kind, starts, sizes, checksums)

    def save(self, path: str) -> None:
        """Appears by rename, so that a reader finds a whole one or none. Raises DataError when it cannot be written."""
        names = ("spec", "fingerprint", "dtype", "shape", "files")
        header = json.dumps({"version": VERSION, **{name: getattr(self, name) for name in names}})
        content = io.BytesIO()
        np.savez(content, header=np.array(header), starts=self.starts, sizes=self.sizes, checksums=self.checksums)
        if remote.is_url(path):
            try:
                remote.write_file(path, content.getvalue())
            except DataError as error:
                raise DataError(
                    f"cannot write the index {path}: {error}; where its server takes no files, name a local one with "
                    "--index FILE, and give index=FILE with the dataset"
                ) from error
            return
        new = f"{path}.{os.getpid()}.new"
        try:
            Path(new).write_bytes(content.getbuffer())
            os.replace(new, path)
        except OSError as error:
            raise DataError(
                f"cannot write the index {path}: {error.strerror}; name another file with --index"
            ) from error

    @classmethod
    def load(cls, path: str) -> SampleIndex:
        """Raises DataError for a file that is none."""
        try:
            content = remote.read_file(path) if remote.is_url(path) else Path(path).read_bytes()
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                header: dict[str, Any] = json.loads(str(arrays["header"]))
                if header.pop("version") != VERSION:
                    raise ValueError("of another version")
                header.update({name: tuple(header[name]) for name in ("shape", "files")})
                return cls(**header, **{name: arrays[name] for name in ("starts", "sizes", "checksums")})
        except FileNotFoundError:
            raise DataError(f"there is no index {path}: make one with `tenplexctl data index`") from None
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise DataError(
                f"{path} is no index of a dataset ({error}); make one with `tenplexctl data index`"
            ) from error

    def check(self, dataset: Dataset) -> None:
        """Raise DataError unless the files are as long as they were, and some samples what they were: `differences`
        looks at each."""
        numbers = sorted({number * (len(dataset) - 1) // (_LOOKED_AT - 1) for number in range(_LOOKED_AT)})
        kind = (self.dtype, self.shape, self.files, len(self.sizes))
        same = kind == (dataset.dtype, tuple(dataset.shape), tuple(dataset.pieces.sizes), len(dataset))
        if same:
            found = [xxhash.xxh3_64_intdigest(raw) for raw in dataset.raw_many(numbers)]
            same = found == self.checksums[numbers].tolist()
        if not same:
            raise DataError(
                f"dataset {dataset.spec} is not what it was when its index was made: restore it, or make the index "
                "anew with `tenplexctl data index`"
            )

    def _behind(self, dataset: Dataset) -> int | None:
        """The first sample behind the first file that had another length: from there on numbers may have moved."""
        pairs = enumerate(zip(self.files, dataset.pieces.sizes, strict=False))
        changed = next((number for number, (had, has) in pairs if had != has), len(self.files) - 1)
        behind = int(np.searchsorted(self.starts, sum(self.files[: changed + 1]))) if len(self.starts) else len(dataset)
        return behind if behind < len(dataset) else None

    def differences(self, dataset: Dataset) -> Iterator[str]:
        """What is not as it was, a line each: first of the whole, then of every sample."""
        there, here = ((each.dtype, tuple(each.shape)) for each in (self, dataset))
        if there != here:
            yield f"samples were of {there[0]} {list(there[1])}, are of {here[0]} {list(here[1])}"
        count = min(len(self.sizes), len(dataset))
        if len(self.sizes) != len(dataset):
            yield f"there were {len(self.sizes)} samples, there are {len(dataset)}"
            if (behind := self._behind(dataset)) is not None:
                count = min(count, behind)
                yield f"samples from {behind} on are not compared: the file before them has another length than it had"
        for numbers in _groups(count):
            for number, raw in zip(numbers, _readable(dataset, numbers), strict=True):
                if isinstance(raw, DataError):
                    if dataset.pieces.remote:
                        raise raw  # a server's fault: of its files nothing is known by that
                    yield f"sample {number}: {raw}"
                elif len(raw) != self.sizes[number]:
                    yield f"sample {number}: {dataset.where(number)} had {self.sizes[number]} bytes, has {len(raw)}"
                elif xxhash.xxh3_64_intdigest(raw) != self.checksums[number]:
                    yield f"sample {number}: {dataset.where(number)}: its {len(raw)} bytes are others"


def _groups(count: int) -> Iterator[range]:
    for first in range(0, count, _TOGETHER):
        yield range(first, min(first + _TOGETHER, count))


def _readable(dataset: Dataset, numbers: Sequence[int]) -> list[bytes | DataError]:
    """The bytes of each sample, or why it cannot be read."""
    try:
        return list(dataset.raw_many(numbers))
    except DataError as error:
        if len(numbers) == 1:
            return [error]
        return [raw for number in numbers for raw in _readable(dataset, [number])]
