"""`tenplexctl data`: what is in a dataset, and whether it still is."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from tenplexrun.datasets.dataset import Dataset
from tenplexrun.datasets.index import SampleIndex
from tenplexrun.errors import DataError
from tenplexrun.formats import index_path, open_dataset

_SHOWN = 10


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `tenplexctl data`, whose `run` is set by them."""
    ways = command.add_subparsers(required=True, metavar="index|verify|show")
    index = ways.add_parser("index", help="store each sample's size and checksum", allow_abbrev=False)
    verify = ways.add_parser("verify", help="hold every sample against the index; exit code 69 if any differs")
    show = ways.add_parser("show", help="number, type, shape, fingerprint, and one sample", allow_abbrev=False)
    for way, run in ((index, _index), (verify, _verify), (show, _show)):
        way.add_argument("dataset", metavar="FORMAT:PATH?OPTIONS", help="as job.loader and --data take it")
        way.set_defaults(run=run)
    for way in (index, verify):
        way.add_argument("--index", metavar="FILE", help="(default: the dataset's path with .index.npz)")
    show.add_argument("--sample", type=int, default=0, metavar="I", help="which sample (default 0)")


def _index_path(args: argparse.Namespace) -> str:
    return str(args.index or index_path(args.dataset))


def _index(args: argparse.Namespace) -> int:
    dataset = open_dataset(args.dataset)
    found = SampleIndex.of(dataset)
    found.save(_index_path(args))
    print(f"{len(dataset)} samples, {found.sizes.sum()} bytes, {found.fingerprint}: {_index_path(args)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    index, dataset = SampleIndex.load(_index_path(args)), open_dataset(args.dataset)
    different = 0
    for different, line in enumerate(index.differences(dataset), start=1):
        if different <= _SHOWN:
            print(line)
    if different > _SHOWN:
        print(f"... and {different - _SHOWN} more")
    if different:
        raise DataError(f"{args.dataset} is not what it was when {_index_path(args)} was made; restore the files named")
    print(f"{len(dataset)} samples, each as it was")
    return 0


def _show(args: argparse.Namespace) -> int:
    dataset = open_dataset(args.dataset)
    if not -len(dataset) <= args.sample < len(dataset):
        raise DataError(f"{args.dataset} has {len(dataset)} samples; --sample {args.sample} is none of them")
    number = range(len(dataset))[args.sample]
    kind = "of different sizes" if dataset.spans is not None else f"of {_kind(dataset)}, {dataset.sample_bytes} bytes"
    print(f"{len(dataset)} samples {kind}\nfingerprint {dataset.fingerprint()}")
    print(f"sample {number}: {len(dataset.raw(number))} bytes, {dataset.where(number)}")
    print(_text(dataset[number]))
    return 0


def _kind(dataset: Dataset) -> str:
    return f"{np.dtype(dataset.dtype)} {list(dataset.shape)}"


def _text(sample: Any) -> str:
    """A sample in few lines: of arrays the type and the shape, of those of one dim the first and last elements, too."""
    if isinstance(sample, np.ndarray):
        values = f" {np.array2string(sample, threshold=16, edgeitems=4)}" if sample.ndim <= 1 else ""
        return f"{sample.dtype} {list(sample.shape)}{values}"
    if isinstance(sample, dict):
        return "\n".join(f"{name}: {_text(value)}" for name, value in sample.items())
    if isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[1], int):
        return f"{_text(sample[0])}, label {sample[1]}"
    if isinstance(sample, tuple):
        return "\n".join(map(_text, sample))
    return f"{sample!r:.2000}"
