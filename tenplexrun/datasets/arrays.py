"""Formats whose samples are all alike: bytes, rows of .npy and .npz arrays."""

from __future__ import annotations

import io
import math
import zipfile
from dataclasses import replace
from typing import IO, Any

import numpy as np

from tenplexrun.datasets.dataset import Dataset, Piece, Pieces
from tenplexrun.datasets.files import Source, open_file, whole
from tenplexrun.errors import DataError

_HEADER_BYTES = 1 << 16
"""An array's header is never longer."""

_Rows = tuple[str, tuple[int, ...], Piece]
"""dtype, shape of all rows, and where they are."""


def open_bytes(source: Source) -> Dataset:
    """The files in sorted order, end to end, cut into records of `sample_bytes`."""
    size = source.positive("sample_bytes", 129)
    pieces = Pieces(source.files())
    return Dataset(source.spec, pieces.num_bytes // size, "|u1", (size,), pieces)


def open_npy(source: Source) -> Dataset:
    """The rows of one .npy file, or of all in a folder, which must be of one type and shape."""
    spec, found = source.spec, []
    for piece in source.files("**/*.npy"):
        with open_file(piece.path, _HEADER_BYTES) as file:
            found.append(_rows(spec, piece, file, 0))
    if len({(dtype, shape[1:]) for dtype, shape, _ in found}) > 1:
        raise DataError(f"dataset {spec}: the arrays differ in type or in the shape of a row; name one kind with glob=")
    return _dataset(spec, found)


def open_npz(source: Source) -> Dataset:
    """The rows of one array of an uncompressed .npz file: the option `key`, or its only one."""
    spec, path = source.spec, source.path
    try:
        with open_file(path, _HEADER_BYTES) as file, zipfile.ZipFile(file) as archive:
            names = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            key = source.option("key", next(iter(names)) if len(names) == 1 else "")
            if key not in names:
                raise DataError(f"dataset {spec}: name an array of the file with key=, one of {', '.join(names)}")
            if names[key].compress_type != zipfile.ZIP_STORED:
                raise DataError(f"dataset {spec}: {key} is compressed, so rows have no place; save it with numpy.savez")
            with archive.open(names[key]) as member:
                header = member.read(_HEADER_BYTES)
            file.seek(names[key].header_offset + 26)
            lengths = np.frombuffer(file.read(4), dtype="<u2")  # of the name and the extra field that follow
            start = names[key].header_offset + 30 + int(lengths.sum())
            return _dataset(spec, [_rows(spec, whole(path), io.BytesIO(header), start)])
    except zipfile.BadZipFile as error:
        raise DataError(f"dataset {spec}: not an .npz file: {error}") from error


def _rows(spec: str, whole: Piece, file: IO[bytes], start: int) -> _Rows:
    """Read the header of an array that begins at byte `start` of the file that is `whole`, from `file` that stands
    there."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError) as error:
        raise DataError(f"dataset {spec}: not a plain .npy array: {error}") from error
    if not shape or dtype.names or dtype.hasobject or (fortran and len(shape) > 1):
        raise DataError(f"dataset {spec}: not a plain array of rows in C order; save one with numpy.save")
    num_bytes = math.prod(shape) * dtype.itemsize
    piece = replace(whole, offset=start + file.tell(), num_bytes=num_bytes)
    if whole.num_bytes < piece.offset + num_bytes:
        raise DataError(f"dataset {spec}: {whole.path} is shorter than its header says; copy it again")
    return dtype.str, shape, piece


def _dataset(spec: str, found: list[_Rows]) -> Dataset:
    if not found:
        raise DataError(f"dataset {spec}: no arrays found; check the path")
    dtype, shape, _ = found[0]
    num_samples = sum(shape[0] for _, shape, _ in found)
    return Dataset(spec, num_samples, dtype, shape[1:], Pieces([piece for _, _, piece in found]))


def decode_npz(raw: bytes, _: int) -> dict[str, Any]:
    """The arrays of an .npz file by name."""
    with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
        return dict(arrays)
