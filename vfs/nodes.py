"""PURE: virtual files, links and directories, whose bytes are computed when they are read."""

from __future__ import annotations

import functools
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_Rows = Callable[[int, int], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class File:
    """`read(offset, count)` returns the bytes [offset, offset + count) that lie inside. It never waits: where it raises
    BlockingIOError, `wait` does the same, and takes its time."""

    num_bytes: int
    read: Callable[[int, int], bytes | memoryview]
    wait: Callable[[int, int], bytes | memoryview] | None = None

    def read_all(self, offset: int, count: int) -> bytes | memoryview:
        """However long it takes."""
        return (self.wait or self.read)(offset, count)


@dataclass(frozen=True, slots=True)
class Link:
    """If it `moves`, it is read anew each time."""

    target: str
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Directory:
    """`hidden` finds entries that are there by name but not listed."""

    entries: Mapping[str, Node]
    hidden: Callable[[str], Directory | None] = lambda name: None


@dataclass(frozen=True, slots=True)
class Live:
    """A directory whose `entries` are asked for each time it is looked at: one that has changed is another object."""

    entries: Callable[[], Mapping[str, Node]]


Node = File | Link | Directory | Live


def array_file(shape: tuple[int, ...], dtype: np.dtype[Any], elements: _Rows) -> File:
    """A .npy file; `elements(first, count)` computes some of its elements, row-major."""
    return record_file(_npy_header(shape, dtype), math.prod(shape), dtype.itemsize, elements)


@functools.lru_cache(maxsize=1024)
def _npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


def json_file(record: dict[str, Any], indent: int | None = 1) -> File:
    return text_file(json.dumps(record, indent=indent) + "\n")


def text_file(text: str) -> File:
    data = os.fsencode(text)  # names of files, whatever bytes they have
    return File(len(data), lambda offset, count: data[offset : offset + count])


def line_file(number: int, times: int, last: int) -> File:
    """`number` on each of `times` lines, then `last` unless it is 0."""
    line, tail = f"{number}\n".encode(), f"{last}\n".encode() if last else b""

    def read(offset: int, count: int) -> bytes:
        skipped, needed = min(offset // len(line), times), count // len(line) + 2
        text = line * min(times - skipped, needed) + (tail if needed > times - skipped else b"")
        return text[offset - skipped * len(line) :][:count]

    return File(len(line) * times + len(tail), read)


def record_file(header: bytes, num_rows: int, row_bytes: int, rows: _Rows) -> File:
    """A header, then `num_rows` records of `row_bytes` each; `rows(first, count)` computes some of them."""

    def read(offset: int, count: int) -> bytes | memoryview:
        begin = max(0, offset - len(header))
        end = min(max(0, offset + count - len(header)), num_rows * row_bytes)
        part = header[offset : offset + count]
        if begin >= end:
            return part
        first, last = begin // row_bytes, -(-end // row_bytes)
        data = np.ascontiguousarray(rows(first, last - first)).reshape(-1).view(np.uint8).data
        found = data[begin - first * row_bytes : end - first * row_bytes]
        return part + found if part else found  # of a pack not one byte is copied for nothing

    return File(len(header) + num_rows * row_bytes, read)
