"""Megatron-LM's indexed dataset: tokens in PREFIX.bin, where they lie in PREFIX.idx.

The .idx file, little-endian: `MMIDIDX\\0\\0`, version 1 (u64), code of the tokens' type (u8), number of sequences and
of document boundaries (u64 each); then of each sequence its length in tokens (i32) and its first byte (i64), and the
boundaries of the documents, in sequences, from 0 on (i64); maybe modes (i8), which are left alone. As written by
`megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.datasets.dataset import Dataset, Ids, Pieces, Spans
from tenplexrun.datasets.files import Source, read_file, whole
from tenplexrun.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class Index:
    """Sequence i has `lengths[i]` tokens of `dtype` from byte `pointers[i]` on; document d is the sequences
    [documents[d], documents[d + 1])."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: Ids
    documents: Ids

    @classmethod
    def read(cls, path: str) -> Index:
        """Raises DataError when the file is none, or cut off."""
        data = read_file(path)
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise DataError(f"{path} is no index of Megatron-LM's; give the prefix of a .bin and .idx pair")
        _, version, code, num_sequences, num_documents = _HEADER.unpack_from(data)
        if version != 1 or code not in _TYPES:
            raise DataError(f"{path} has version {version} and type {code}; version 1 and types 1 to 8 are known")
        fields = []
        offset = _HEADER.size
        for dtype, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_documents)):
            if len(data) - offset < count * np.dtype(dtype).itemsize:
                raise DataError(f"{path} is cut off: {len(data)} bytes; copy it again")
            fields.append(np.frombuffer(data, dtype, count, offset))
            offset += fields[-1].nbytes
        return cls(np.dtype(_TYPES[code]), *fields)

    def write(self, path: str) -> None:
        header = _HEADER.pack(_MAGIC, 1, _CODES[self.dtype], len(self.lengths), len(self.documents))
        fields = (self.lengths.astype("<i4"), self.pointers.astype("<i8"), self.documents.astype("<i8"))
        Path(path).write_bytes(header + b"".join(field.tobytes() for field in fields))


class Writer:
    """Writes PREFIX.bin as documents come, and PREFIX.idx at the end of the `with` block, unless it raised."""

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self._prefix, self._dtype = os.fspath(prefix), np.dtype(dtype)
        if self._dtype not in _CODES:
            raise DataError(
                f"Megatron-LM's indexed datasets have no type {self._dtype}; take one of {list(_TYPES.values())}"
            )
        self._lengths: list[int] = []
        self._documents = [0]

    def __enter__(self) -> Writer:
        self._file = open(f"{self._prefix}.bin", "wb")
        return self

    def add(self, *sequences: Sequence[int] | npt.NDArray[Any]) -> None:
        """One document, of one or more sequences of tokens. Raises DataError for tokens that do not fit the type."""
        for sequence in sequences:
            tokens = np.asarray(sequence)
            stored = tokens.astype(self._dtype)
            if not np.array_equal(stored, tokens):
                raise DataError(
                    f"tokens from {tokens.min()} to {tokens.max()} do not fit {self._dtype}; take a wider type"
                )
            self._file.write(stored.tobytes())
            self._lengths.append(len(tokens))
        self._documents.append(len(self._lengths))

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None:
            lengths = np.array(self._lengths, dtype=np.int64)
            pointers = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
            index = Index(self._dtype, lengths.astype(np.int32), pointers, np.array(self._documents, dtype=np.int64))
            index.write(f"{self._prefix}.idx")


@dataclass(frozen=True, slots=True)
class _Tokens:
    dtype: np.dtype[Any]

    def __call__(self, raw: bytes, _: int) -> npt.NDArray[Any]:
        return np.frombuffer(bytearray(raw), dtype=self.dtype)


def open_megatron(source: Source) -> Dataset:
    """With `seq_length` S, samples of S + 1 tokens that cross documents, each beginning with the last token of the one
    before, as Megatron-LM's GPT dataset cuts them from its documents in order; without, a sample is a sequence."""
    spec, prefix = source.spec, source.path.removesuffix(".idx").removesuffix(".bin")
    index = Index.read(f"{prefix}.idx")
    size, all_ = index.dtype.itemsize, whole(f"{prefix}.bin")
    ends = index.pointers + index.lengths.astype(np.int64) * size
    if len(ends) and int(ends.max()) > all_.num_bytes:
        raise DataError(
            f"dataset {spec}: {prefix}.bin has {all_.num_bytes} bytes, its index speaks of {ends.max()}; copy it again"
        )
    if "seq_length" not in source.options:
        pieces, note = Pieces([all_]), f"tokens {index.dtype.str}"
        return Dataset(
            spec, len(ends), "", (), pieces, spans=Spans(index.pointers, ends, _Tokens(index.dtype)), note=note
        )
    length = source.positive("seq_length", 2048)
    if not (index.pointers[1:] == ends[:-1]).all():
        raise DataError(
            f"dataset {spec}: its sequences are not end to end in the .bin file; read them without seq_length"
        )
    tokens = int(index.lengths.sum(dtype=np.int64))
    piece = replace(all_, offset=int(index.pointers[0]) if len(ends) else 0, num_bytes=tokens * size)
    num_samples = max(0, tokens - 1) // length
    return Dataset(spec, num_samples, index.dtype.str, (length + 1,), Pieces([piece]), stride=length * size)
