"""PURE: what one data-parallel rank reads, as a tree of virtual files.

A view's rows are those of the steps from `consumed` to the end of the epoch, in the rank's reading order, padding
included (see `core.order`): row 0 is the first row of its first step. A directory shows them as

    pack-00000.bin ...   the samples, one after another, some MB a file
    list.txt             names of the packs, a line each, in order
    batch-sizes.txt      rows of each step, a line each
    order.npy            sample id of each row, int64 [rows]
    weights.npy          weight of each row, float64 [rows]; 0 marks padding
    index.json           what a sample is; rows of each pack; where the extents are
    cursor.json          the order, the rank, and `consumed` before and after
    extents/             links to the extent files in shared memory

Nothing is stored: bytes are computed when they are read. Later epochs are there by name, `epoch-<number>/`, but not
listed, since they have no end.
"""

from __future__ import annotations

import functools
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.core.order import DataOrder, Ids, Share, Weights, deal
from tenplexrun.samples import Extents, extent_name

PACK_BYTES = 32 << 20
VERSION = 1
_Rows = Callable[[int, int], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class File:
    """`read(offset, count)` returns the bytes [offset, offset + count) that lie inside. It never waits: where it raises
    BlockingIOError, `wait` does the same, and takes its time."""

    num_bytes: int
    read: Callable[[int, int], bytes]
    wait: Callable[[int, int], bytes] | None = None

    def read_all(self, offset: int, count: int) -> bytes:
        """However long it takes."""
        return (self.wait or self.read)(offset, count)


@dataclass(frozen=True, slots=True)
class Link:
    target: str


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


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of a view, from position `start`: `full_steps` of global_batch rows, then one of `tail_rows` if any."""

    order: DataOrder
    dp_rank: int
    dp_size: int
    start: int
    full_steps: int
    tail_rows: int

    @property
    def end(self) -> int:
        """`consumed` after the last step."""
        return self.start + self.full_steps * self.order.global_batch + self.tail_rows

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Rows of this rank in each of the full steps, and in the last one."""
        return self._deal(self.order.global_batch).rows, self._deal(self.tail_rows).rows

    @property
    def num_rows(self) -> int:
        full, tail = self.batch_sizes
        return full * self.full_steps + tail

    def rows(self, first: int, count: int) -> tuple[Ids, Weights]:
        """Sample ids and weights of the rows [first, first + count)."""
        order = self.order
        full, tail = self._deal(order.global_batch), self._deal(self.tail_rows)
        row = np.arange(first, first + count, dtype=np.int64)
        step = np.minimum(row // full.rows, self.full_steps)
        within = row - step * full.rows
        last = step == self.full_steps
        positions = self.start + step * order.global_batch + np.where(last, tail.offsets(within), full.offsets(within))
        real = within < np.where(last, tail.real, full.real)
        size = np.where(last, max(self.tail_rows, 1), order.global_batch)
        return order.sample_at(positions), np.where(real, self.dp_size / size, 0.0)

    def begin_of(self, row: int) -> int:
        """Where the step of a row begins in the order."""
        return (
            self.start + min(row // self._deal(self.order.global_batch).rows, self.full_steps) * self.order.global_batch
        )

    def at_epoch(self, epoch: int) -> Window:
        """The window of a later epoch, as it will be if the job goes on at this global batch."""
        start = epoch * self.order.num_samples
        if self.order.tail == "wrap":
            start = self.start + -(-(start - self.start) // self.order.global_batch) * self.order.global_batch
        return window(self.order, self.dp_rank, self.dp_size, start)

    def _deal(self, num_rows: int) -> Share:
        return deal(num_rows, self.order.micro_batch, self.dp_rank, self.dp_size)


def window(order: DataOrder, dp_rank: int, dp_size: int, consumed: int, max_rows: int | None = None) -> Window:
    """The steps from `consumed` that begin in its epoch (the next one, if tail="drop" leaves none), in full or, with
    `max_rows`, as many as have no more rows than that, at least one. Raises DataError for impossible arguments."""
    share = deal(order.global_batch, order.micro_batch, dp_rank, dp_size)
    start = order.step(consumed).start
    batch, left = order.global_batch, order.num_samples - start % order.num_samples
    full, tail = divmod(left, batch)
    if order.tail == "wrap":
        full, tail = full + (tail > 0), 0
    elif order.tail == "drop":
        tail = 0
    if max_rows is not None:
        most = max(1, max_rows // share.rows)
        full, tail = (most, 0) if full >= most else (full, tail)
    return Window(order, dp_rank, dp_size, start, full, tail)


def tree(shown: Window, extents: Extents, more: Mapping[str, Any] | None = None) -> Directory:
    """The files of a window over the samples in `extents`. `more`: what else index.json says."""
    packs = _packs(shown, extents)
    entries: dict[str, Node] = {name: file for name, _, _, file in packs}
    entries["list.txt"] = _text("".join(f"{name}\n" for name, _, _, _ in packs))
    entries["batch-sizes.txt"] = _lines(shown.batch_sizes[0], shown.full_steps, shown.batch_sizes[1])
    num_rows = (shown.num_rows,)
    entries["order.npy"] = array_file(num_rows, np.dtype(np.int64), lambda first, count: shown.rows(first, count)[0])
    entries["weights.npy"] = array_file(num_rows, np.dtype(float), lambda first, count: shown.rows(first, count)[1])
    entries["cursor.json"] = json_file(_cursor(shown))
    entries["index.json"] = json_file(
        {
            "version": VERSION,
            "samples": extents.catalogue.to_json(),
            "rows": shown.num_rows,
            "packs": [{"name": name, "first_row": first, "rows": rows} for name, first, rows, _ in packs],
            "extents": "extents",
            "directory": extents.directory,
            **(more or {}),
        }
    )
    names = [extent_name(number) for number in extents.here]
    entries["extents"] = Directory({name: Link(f"{extents.directory}/{name}") for name in names})
    return Directory(entries, lambda name: _later(shown, extents, name))


def _later(shown: Window, extents: Extents, name: str) -> Directory | None:
    match = re.fullmatch(r"epoch-(\d{1,15})", name)
    epoch = int(match[1]) if match else -1
    if epoch <= shown.order.epoch_of(shown.start):
        return None
    return tree(shown.at_epoch(epoch), extents)


def _packs(shown: Window, extents: Extents) -> list[tuple[str, int, int, File]]:
    """Name, first row, rows and content of each pack."""
    size = extents.catalogue.sample_bytes
    most = max(1, PACK_BYTES // size)
    packs = []
    for number, first in enumerate(range(0, shown.num_rows, most)):
        rows = min(most, shown.num_rows - first)
        now, later = (_records(b"", rows, size, _Pack(shown, extents, first, wait)) for wait in (False, True))
        file = replace(now, wait=later.read)
        packs.append((f"pack-{number:05d}.bin", first, rows, file))
    return packs


@dataclass(frozen=True, slots=True)
class _Pack:
    shown: Window
    extents: Extents
    first: int
    wait: bool

    def __call__(self, first: int, count: int) -> npt.NDArray[Any]:
        row = self.first + first
        return self.extents.gather(self.shown.rows(row, count)[0], self.shown.begin_of(row), self.wait)


def _cursor(shown: Window) -> dict[str, Any]:
    return {
        "version": VERSION,
        "order": shown.order.to_json(),
        "dp_rank": shown.dp_rank,
        "dp_size": shown.dp_size,
        "epoch": shown.order.epoch_of(shown.start),
        "consumed": shown.start,
        "consumed_after": shown.end,
        "steps": shown.full_steps + (shown.tail_rows > 0),
    }


def array_file(shape: tuple[int, ...], dtype: np.dtype[Any], elements: _Rows) -> File:
    """A .npy file; `elements(first, count)` computes some of its elements, row-major."""
    return _records(_npy_header(shape, dtype), math.prod(shape), dtype.itemsize, elements)


@functools.lru_cache(maxsize=1024)
def _npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


def json_file(record: dict[str, Any], indent: int | None = 1) -> File:
    return _text(json.dumps(record, indent=indent) + "\n")


def _text(text: str) -> File:
    data = text.encode()
    return File(len(data), lambda offset, count: data[offset : offset + count])


def _lines(number: int, times: int, last: int) -> File:
    """`number` on each of `times` lines, then `last` unless it is 0."""
    line, tail = f"{number}\n".encode(), f"{last}\n".encode() if last else b""

    def read(offset: int, count: int) -> bytes:
        skipped, needed = min(offset // len(line), times), count // len(line) + 2
        text = line * min(times - skipped, needed) + (tail if needed > times - skipped else b"")
        return text[offset - skipped * len(line) :][:count]

    return File(len(line) * times + len(tail), read)


def _records(header: bytes, num_rows: int, row_bytes: int, rows: _Rows) -> File:
    """A header, then `num_rows` records of `row_bytes` each; `rows(first, count)` computes some of them."""

    def read(offset: int, count: int) -> bytes:
        begin = max(0, offset - len(header))
        end = min(max(0, offset + count - len(header)), num_rows * row_bytes)
        part = header[offset : offset + count]
        if begin >= end:
            return part
        first, last = begin // row_bytes, -(-end // row_bytes)
        data = rows(first, last - first).tobytes()
        return part + data[begin - first * row_bytes : end - first * row_bytes]

    return File(len(header) + num_rows * row_bytes, read)
