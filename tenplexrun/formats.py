"""Datasets by name: a format, a path and options, written as a URL.

    bytes:/dir?glob=**/*.py&sample_bytes=129&exclude=test/*   the files in sorted order, end to end, cut into records
    npy:/path.npy  npy:/dir  npz:/path.npz?key=x              the rows of an array
    megatron:/prefix?seq_length=2048                          tokens of Megatron-LM's .bin and .idx
    jsonl:/dir  images:/dir  tar:/dir  tfrecord:/dir          lines, pictures by class, WebDataset's samples, records
    parquet:/dir?columns=a,b  arrow:/dir                      rows of tables
    tenplex:/path/index.txt                                   .npz samples by the index of the system Tenplex

A path may be a URL of any protocol that fsspec knows: npy:http://host/x.npy, bytes:s3://bucket/dir?sample_bytes=129.
The option `index` names what `tenplexctl data index` has stored (nothing: beside the data): then nothing is scanned.

Shared by the view, which keeps them in shared memory, and by training scripts without a launcher, which read the files
themselves. A percent sign and `?` in paths, `&`, `+` and `%` in options are percent-encoded, as in any URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import parse_qs, quote, unquote

from tenplexrun.datasets import arrays, megatron, records, tables
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.datasets.files import Options, Source
from tenplexrun.datasets.index import SUFFIX, SampleIndex
from tenplexrun.datasets.remote import is_url
from tenplexrun.errors import DataError

_FILES = ("glob", "exclude")
_FORMATS: Mapping[str, tuple[Callable[[Source], Dataset], tuple[str, ...]]] = {
    "bytes": (arrays.open_bytes, (*_FILES, "sample_bytes")),
    "npy": (arrays.open_npy, _FILES),
    "npz": (arrays.open_npz, ("key",)),
    "megatron": (megatron.open_megatron, ("seq_length",)),
    "jsonl": (records.open_jsonl, _FILES),
    "images": (records.open_images, (*_FILES, "mode")),
    "tar": (records.open_tar, _FILES),
    "tfrecord": (records.open_tfrecord, _FILES),
    "parquet": (tables.open_parquet, (*_FILES, "columns")),
    "arrow": (tables.open_arrow, (*_FILES, "columns")),
    "tenplex": (records.open_tenplex, ()),
}


def open_dataset(spec: str) -> Dataset:
    """List a dataset's files and count its samples. Raises DataError with what is wrong with `spec` or the files."""
    name, path, options = _parse(spec)
    opener, known = _FORMATS[name]
    if unknown := sorted(set(options) - {*known, "index"}):
        raise DataError(f"dataset {spec}: unknown options {unknown}; {name}: takes {[*known, 'index']}")
    index = SampleIndex.load(index_path(spec)) if "index" in options else None
    try:
        dataset = opener(Source(spec, path, options, index))
    except FileNotFoundError as error:
        raise DataError(f"dataset {spec}: {error.filename or path} does not exist on this node") from error
    except OSError as error:
        raise DataError(f"dataset {spec}: cannot read {error.filename or path}: {error.strerror or error}") from error
    if dataset.num_samples < 1 or (dataset.spans is None and dataset.sample_bytes < 1):
        kind = "sample" if dataset.spans is not None else f"sample of {dataset.sample_bytes}"
        found = (
            f"{dataset.pieces.num_bytes} bytes found"
            if is_url(path) or os.path.exists(path)
            else f"{path} does not exist on this node"
        )
        hint = "; a folder behind http ends with a slash, and its server lists it" if path.startswith("http") else ""
        raise DataError(f"dataset {spec}: {found}, not one {kind}; check the path{hint}")
    if index is None:
        return dataset
    index.check(dataset)
    return replace(dataset, known=index.fingerprint)


def has_one_size(spec: str) -> bool:
    """Whether all samples of the format that `spec` names are of one type and shape. Raises DataError for no name."""
    name, _, options = _parse(spec)
    return name in ("bytes", "npy", "npz") or (name == "megatron" and "seq_length" in options)


def has_bytes(spec: str) -> bool:
    """Whether samples are bytes of the dataset's files, as rows of tables are not. Raises DataError for no name."""
    return _parse(spec)[0] not in ("parquet", "arrow")


def format_of(spec: str) -> str:
    """The format in a dataset's name. Raises DataError for what is none."""
    return _parse(spec)[0]


def file_names(dataset: Dataset) -> list[str]:
    """Where each sample is a whole file: `folder/name` of each, by the first folder below the dataset's path, or the
    name alone. Else nothing."""
    name, path, _ = _parse(dataset.spec)
    root, found = path.rstrip("/") + "/", []
    for number in range(dataset.num_samples if name in ("images", "tenplex") else 0):
        start, end = dataset.span(number)
        piece, offset = dataset.pieces.place(start)
        if offset or piece.num_bytes != end - start:
            return []
        folder, slash, rest = (
            piece.path.removeprefix(root).partition("/") if piece.path.startswith(root) else ("", "", "")
        )
        found.append(f"{folder}/{os.path.basename(rest)}" if slash else os.path.basename(piece.path))
    return found


def index_path(spec: str) -> str:
    """Where the index of the dataset that `spec` names is: what its option `index` says, else beside the data. Raises
    DataError for no name."""
    _, path, options = _parse(spec)
    return options.get("index", [""])[-1] or path.rstrip("/") + SUFFIX


def absolute(spec: str) -> str:
    """`spec` with its paths made absolute, so that processes with other working directories understand it."""
    name, path, options = _parse(spec)
    _, mark, query = spec.partition("?")
    if index := options.get("index", [""])[-1]:
        others = [part for part in query.split("&") if not part.startswith("index=")]
        query = "&".join([*others, f"index={quote(_absolute(index), safe='/:')}"])
    return f"{name}:{quote(_absolute(path), safe='/:')}{mark}{query}"


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


def _parse(spec: str) -> tuple[str, str, Options]:
    name, colon, rest = spec.partition(":")
    path, _, query = rest.partition("?")
    if not colon or name not in _FORMATS or not path:
        raise DataError(f"dataset {spec!r} should be FORMAT:PATH?OPTIONS with FORMAT one of {', '.join(_FORMATS)}")
    try:
        options = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise DataError(f"dataset {spec}: options should be name=value, joined by '&' ({error})") from error
    return name, unquote(path), options
