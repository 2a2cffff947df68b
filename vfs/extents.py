"""Copies a dataset's samples, once, into extent files in the node's shared memory.

`<directory>/<key of the spec>/` holds the extents and, last, `catalogue.json`. It appears by rename when complete, so
that a view process that was killed in the middle starts over, and one that was killed later does not.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import DataError
from tenplexrun.formats import open_dataset
from tenplexrun.samples import Catalogue, Extents, extent_name, samples_per_extent
from tenplexrun.vfs.homes import appearing, full, home_of

EXTENT_BYTES = 32 << 20
_COPY_BYTES = 4 << 20


def load(spec: str, directory: Path, stop: threading.Event) -> Extents:
    """The extents of dataset `spec` below `directory`, copied there unless they are already.

    Raises DataError for a bad dataset or when `stop` is set, ArenaFullError with the bytes needed and free.
    """
    home = home_of(spec, directory)
    try:
        record = json.loads((home / "catalogue.json").read_text())
    except FileNotFoundError:
        return Extents(_copy(open_dataset(spec), home, stop), str(home))
    return Extents(Catalogue.from_json(record), str(home))


def _copy(dataset: Dataset, home: Path, stop: threading.Event) -> Catalogue:
    per_extent = samples_per_extent(dataset.sample_bytes, EXTENT_BYTES)
    catalogue = Catalogue(
        dataset.num_samples, dataset.dtype, dataset.shape, dataset.fingerprint(), min(per_extent, dataset.num_samples)
    )
    with appearing(home) as partial:
        if shutil.disk_usage(partial).free < dataset.num_bytes:
            raise full(dataset.spec, dataset.num_bytes, partial)
        for number in range(catalogue.num_extents):
            _copy_extent(dataset, catalogue, number, partial / extent_name(number), stop)
        (partial / "catalogue.json").write_text(json.dumps(catalogue.to_json()))
    return catalogue


def _copy_extent(dataset: Dataset, catalogue: Catalogue, number: int, path: Path, stop: threading.Event) -> None:
    offset = number * catalogue.samples_per_extent * catalogue.sample_bytes
    end = offset + catalogue.samples_in(number) * catalogue.sample_bytes
    with open(path, "xb") as file:
        try:
            # Reserved first: a write to a full tmpfs through a mapping would be a SIGBUS, not an error.
            os.posix_fallocate(file.fileno(), 0, end - offset)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise full(dataset.spec, dataset.num_bytes, path.parent) from error
            raise DataError(f"cannot write {path}: {error.strerror}") from error
        while offset < end:
            if stop.is_set():
                raise DataError(f"dataset {dataset.spec}: the view was told to stop while it copied the samples")
            block = dataset.read(offset, min(_COPY_BYTES, end - offset))
            file.write(block)
            offset += len(block)
    path.chmod(0o400)
