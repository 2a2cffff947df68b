"""Samples that differ in size: where each lies in the bytes that nodes keep of their dataset.

These are its files end to end, cut into blocks of one size: `blocks` are the samples of the extents, as if the dataset
were an array of them. Beside its extents a node has, written once,

    places.npy      int64 [2, samples]: the first byte of each sample, and the one after its last
    decode.pickle   what makes a sample of its bytes (`datasets.dataset.Decode`)
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from tenplexrun.datasets.dataset import Dataset, Decode, Ids, Spans
from tenplexrun.errors import DataError

_BLOCKS_A_SAMPLE = 8
_LEAST_BLOCK, _MOST_BLOCK = 512, 64 << 10


def blocks(dataset: Dataset) -> Dataset:
    """The bytes of a dataset as samples of one size, uint8 [size], the last one filled up with zeros.

    `size` is a power of two, about an eighth of a sample: those of few samples need not be fetched with much else.
    """
    mean = dataset.pieces.num_bytes // dataset.num_samples // _BLOCKS_A_SAMPLE
    size = min(max(1 << mean.bit_length() >> 1, _LEAST_BLOCK), _MOST_BLOCK)
    count = max(1, -(-dataset.pieces.num_bytes // size))
    padded = dataset.pieces.padded(count * size)
    return Dataset(dataset.spec, count, "|u1", (size,), padded, known=dataset.fingerprint())


def save(dataset: Dataset, home: Path) -> None:
    """Write where its samples are. Raises OSError."""
    assert dataset.spans is not None
    np.save(home / "places.npy", np.stack([dataset.spans.starts, dataset.spans.ends]))
    (home / "decode.pickle").write_bytes(pickle.dumps(dataset.spans.decode, pickle.HIGHEST_PROTOCOL))


def load(home: Path) -> tuple[Ids, Ids]:
    """First byte and end of each sample, mapped. Raises DataError."""
    try:
        starts, ends = np.load(home / "places.npy", mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {home}/places.npy: {error}; the dataset view has lost it") from error
    return starts, ends


def load_spans(home: Path) -> Spans:
    """The same with what decodes samples. Raises DataError."""
    starts, ends = load(home)
    try:
        decode: Decode = pickle.loads((home / "decode.pickle").read_bytes())
    except (OSError, ValueError, pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise DataError(f"cannot read {home}/decode.pickle: {error!r}; is one version of tenplexrun in use?") from error
    return Spans(starts, ends, decode)
