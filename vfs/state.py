"""The job's tensors as files: what this node's store holds of the newest committed snapshot, read only.

    state/current         link to the newest
    state/<step>/<fqn>.npy    what the node holds of a tensor, put together: all of it or one box of it
    state/<step>/<fqn>.json   its name, element type and whole shape, and which region each of its files has
    state/<step>/snapshot     JSON: which snapshot this is, samples consumed, values that are no tensors

Where a node's parts of a tensor make no single box, each is a file of its own, `<fqn>.<number>.npy`: no gap is ever
filled. Element types that numpy lacks are shown as unsigned integers of the same size; the .json has the real one.
"/", "%" and NUL in names are percent-encoded.

Bytes come straight from the store's slots when they are read. The job goes on meanwhile, and writes over a slot once a
newer snapshot is committed; its index is gone before that, so bytes that were read while it is still there are whole.
A file whose snapshot has gone answers ESTALE from then on (a mapping of it: SIGBUS): open it again below `current`.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.pieces import Index, Piece, copies, index_name, layout_name, row_major_boxes
from tenplexrun.core.regions import Region, subtract
from tenplexrun.vfs.nodes import Link, Live, Node, array_file, json_file

_SAME_SIZE = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class Snapshots:
    """The entries of `state/`, from the store's folder `arena`. Several threads may ask."""

    def __init__(self, arena: Path) -> None:
        self._arena, self._lock = arena, threading.Lock()
        self._shown: tuple[Path, int] | None = None
        self._entries: dict[str, Node] = {}

    def __call__(self) -> Mapping[str, Node]:
        """What is there now; objects stay the same as long as their snapshot is the newest."""
        with self._lock:
            for path in self._newest_first():
                try:
                    found = path, path.stat().st_ino
                    if found == self._shown:
                        return self._entries
                    record = json.loads(path.read_bytes())
                except (OSError, ValueError):
                    continue  # gone: there is a newer one, or none
                if record["committed"]:
                    name = str(record["snapshot"]["step"])
                    self._shown, self._entries = (
                        found,
                        {name: Live(_Once(self._arena, record)), "current": Link(name, moves=True)},
                    )
                    return self._entries
            self._shown, self._entries = None, {}
            return self._entries

    def _newest_first(self) -> list[Path]:
        def age(path: Path) -> tuple[int, int]:
            _, round_number, step, _ = path.name.split("-", 3)
            return int(round_number), int(step)

        return sorted(self._arena.glob("snapshot-*-*-*.json"), key=age, reverse=True)


class _Once:
    """The entries of a snapshot's directory, made when somebody looks for the first time: there may be thousands."""

    def __init__(self, arena: Path, record: dict[str, Any]) -> None:
        self._arena, self._record, self._lock = arena, record, threading.Lock()
        self._entries: Mapping[str, Node] | None = None

    def __call__(self) -> Mapping[str, Node]:
        with self._lock:
            if self._entries is None:
                index = Index.from_json(self._record)
                try:
                    content = (self._arena / layout_name(index.snapshot.digest)).read_bytes()
                except FileNotFoundError:
                    raise _stale(self._arena) from None
                self._entries = snapshot_files(index, Layout.from_json(json.loads(content)), self._arena)
            return self._entries


def snapshot_files(index: Index, layout: Layout, arena: Path) -> dict[str, Node]:
    """The files of one snapshot, whose pieces lie in `arena`."""
    pieces: dict[str, list[Piece]] = {}
    for piece in index.pieces:
        if not piece.region.is_empty:
            pieces.setdefault(piece.fqn, []).append(piece)
    about = {**index.to_json()}
    del about["pieces"], about["claims"]
    entries: dict[str, Node] = {"snapshot": json_file(about)}
    for fqn, held in sorted(pieces.items()):
        spec, name, boxes = layout.spec(fqn), file_name(fqn), _boxes([piece.region for piece in held])
        names = [f"{name}.npy"] if len(boxes) == 1 else [f"{name}.{number}.npy" for number in range(len(boxes))]
        for each, box in zip(names, boxes, strict=True):
            rows = _Elements(box, tuple(held), arena, arena / index_name(index.snapshot))
            entries[each] = array_file(box.lengths, numpy_type(spec.dtype), rows)
        parts = [
            {"name": each, "offsets": list(box.offsets), "lengths": list(box.lengths)}
            for each, box in zip(names, boxes, strict=True)
        ]
        whole = boxes == [Region.whole(spec.shape)]
        facts = {"fqn": fqn, "dtype": spec.dtype, "shape": list(spec.shape), "whole": whole, "files": parts}
        entries[f"{name}.json"] = json_file(facts, indent=None)  # many times faster
    return entries


def file_name(fqn: str) -> str:
    return fqn.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")


def numpy_type(dtype: str) -> np.dtype[Any]:
    """numpy's type for one of torch's by name; unsigned integers of the same size where it has none."""
    try:
        return np.dtype(dtype)
    except TypeError:
        return np.dtype(_SAME_SIZE[item_bytes(dtype)])


def _boxes(regions: list[Region]) -> list[Region]:
    """Their bounding box if they fill it, else those of them that lie in no other one."""
    if len(set(regions)) == 1:
        return regions[:1]
    offsets = tuple(map(min, zip(*(region.offsets for region in regions), strict=True)))
    stops = map(max, zip(*(region.stops for region in regions), strict=True))
    bounds = Region(offsets, tuple(stop - offset for stop, offset in zip(stops, offsets, strict=True)))
    if not subtract(bounds, regions):
        return [bounds]
    distinct = sorted(set(regions))
    return [one for one in distinct if not any(other != one and other.contains(one) for other in distinct)]


@dataclass(frozen=True, slots=True)
class _Elements:
    """`(first, count)` → those elements of `region`, row-major [count]. Raises ESTALE once the snapshot has gone."""

    region: Region
    pieces: tuple[Piece, ...]
    arena: Path
    index: Path

    def __call__(self, first: int, count: int) -> npt.NDArray[Any]:
        item = self.pieces[0].num_bytes // self.pieces[0].region.num_elements
        found = np.empty(count, f"V{item}")
        try:
            for box, part in self._parts(first, first + count, found):
                for copy in copies(box, self.pieces):
                    part[copy.dest.slices] = self._map(copy.piece, found.dtype)[copy.source.slices]
        except FileNotFoundError:
            raise _stale(self.index) from None
        if not self.index.exists():
            raise _stale(self.index)
        return found

    def _parts(self, first: int, last: int, found: npt.NDArray[Any]) -> Iterator[tuple[Region, npt.NDArray[Any]]]:
        """Each box of the elements, in the tensor's coordinates, with its place in `found`."""
        done = 0
        for box in row_major_boxes(self.region.lengths, first, last):
            offsets = tuple(map(sum, zip(box.offsets, self.region.offsets, strict=True)))
            yield Region(offsets, box.lengths), found[done : done + box.num_elements].reshape(box.lengths)
            done += box.num_elements

    def _map(self, piece: Piece, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        flat = np.memmap(self.arena / piece.file, dtype, "r", piece.offset, (piece.region.num_elements,))
        return flat.view(np.ndarray).reshape(piece.region.lengths)


def _stale(index: Path) -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(index))
