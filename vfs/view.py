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

Samples of different sizes are shown by `vfs.mixed`, with other packs or with a file each. Nothing is stored: bytes are
computed when they are read. Later epochs are there by name, `epoch-<number>/`, but not listed, since they have no end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tenplexrun.core.order import Ids
from tenplexrun.samples import Extents, extent_name
from tenplexrun.vfs.nodes import Directory, Link, Node, array_file, json_file, line_file, record_file, text_file
from tenplexrun.vfs.window import Window

PACK_BYTES = 32 << 20
VERSION = 1
_ROW_BYTES = 16  # its id and its weight


class Catalogued(Protocol):
    """What is said of samples."""

    @property
    def num_samples(self) -> int: ...
    @property
    def sample_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...


class Content(Protocol):
    """Samples, and the files that show them."""

    @property
    def catalogue(self) -> Catalogued: ...

    def about(self) -> dict[str, Any]:
        """What index.json says of the samples."""

    def row_bytes(self, ids: Ids) -> Ids:
        """What each takes if the files are written."""

    def entries(self, shown: Window) -> tuple[dict[str, Node], dict[str, Any]]:
        """The files with the window's samples, list.txt among them, and all that index.json says."""


Samples = Extents | Content


def tree(shown: Window, samples: Samples, bare: bool = False) -> Directory:
    """The files of a window over `samples`. `bare`: without those that take a while for many samples of different
    sizes, for a reader that needs index.json only."""
    if isinstance(samples, Extents):
        entries, about = _alike(shown, samples)
    else:
        entries, about = ({}, samples.about()) if bare else samples.entries(shown)
    entries["batch-sizes.txt"] = line_file(shown.batch_sizes[0], shown.full_steps, shown.batch_sizes[1])
    num_rows = (shown.num_rows,)
    entries["order.npy"] = array_file(num_rows, np.dtype(np.int64), shown.ids)
    entries["weights.npy"] = array_file(num_rows, np.dtype(float), shown.weights)
    entries["cursor.json"] = json_file(_cursor(shown))
    entries["index.json"] = json_file({"version": VERSION, "rows": shown.num_rows, **about})
    return Directory(entries, lambda name: _later(shown, samples, name))


def fitting(shown: Window, samples: Samples, limit_bytes: int | None) -> Window:
    """As many steps of a window, at least one, as take at most `limit_bytes` if the files are written."""
    if limit_bytes is None:
        return shown
    if isinstance(samples, Extents):
        return shown.cut(limit_bytes // (samples.catalogue.sample_bytes + _ROW_BYTES))
    taken = np.cumsum(samples.row_bytes(shown.ids(0, shown.num_rows)) + _ROW_BYTES)
    return shown.cut(int(np.searchsorted(taken, limit_bytes, "right")))


def _later(shown: Window, samples: Samples, name: str) -> Directory | None:
    match = re.fullmatch(r"epoch-(\d{1,15})", name)
    epoch = int(match[1]) if match else -1
    if epoch <= shown.order.epoch_of(shown.start):
        return None
    return tree(shown.at_epoch(epoch), samples)


def _alike(shown: Window, extents: Extents) -> tuple[dict[str, Node], dict[str, Any]]:
    size = extents.catalogue.sample_bytes
    most = max(1, PACK_BYTES // size)
    packs = pack_index((first, min(most, shown.num_rows - first)) for first in range(0, shown.num_rows, most))
    entries: dict[str, Node] = {}
    for pack in packs:
        now, later = (
            record_file(b"", pack["rows"], size, _Pack(shown, extents, pack["first_row"], wait))
            for wait in (False, True)
        )
        entries[pack["name"]] = replace(now, wait=later.read)
    entries["list.txt"] = text_file("".join(f"{name}\n" for name in entries))
    names = [extent_name(number) for number in extents.here]
    entries["extents"] = Directory({name: Link(f"{extents.directory}/{name}") for name in names})
    return entries, {"samples": extents.catalogue.to_json(), "packs": packs, "extents": "extents", **extents.about}


def pack_index(packs: Iterable[tuple[int, int]], suffix: str = ".bin") -> list[dict[str, Any]]:
    """What index.json says of packs, from first row and rows of each."""
    return [
        {"name": f"pack-{number:05d}{suffix}", "first_row": first, "rows": rows}
        for number, (first, rows) in enumerate(packs)
    ]


@dataclass(frozen=True, slots=True)
class _Pack:
    shown: Window
    extents: Extents
    first: int
    wait: bool

    def __call__(self, first: int, count: int) -> npt.NDArray[Any]:
        row = self.first + first
        return self.extents.gather(self.shown.ids(row, count), self.shown.begin_of(row), self.wait)


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
