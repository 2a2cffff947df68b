"""Samples that differ in size, in the view. Their bytes are in extents, as blocks (see `tenplexrun.places`).

Those that are whole files (images) are shown as such,

    files/<class>/<row>-<name>    one for each row; every class has a folder, files in none of them stand outside
    list.txt                      files/..., a line each, in reading order
    paths.txt                     where each is read fastest, in the same order

as links straight into shared memory, which has them as `files/<number><its suffix>`, too, where this node has room for
the dataset twice (`vfs.linked`). The others

    pack-00000.jsonl ...          the samples of the rows, one after another, some MB a file; a file of their format
    list.txt                      names of the packs, a line each, in order
    offsets.npy                   where each row begins in the packs laid end to end, and their end; int64 [rows + 1]
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tenplexrun import places
from tenplexrun.core.order import Ids
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import DataError
from tenplexrun.formats import file_names, format_of
from tenplexrun.samples import Extents, covering
from tenplexrun.vfs.nodes import Directory, File, Link, Node, array_file, text_file
from tenplexrun.vfs.view import PACK_BYTES, pack_index
from tenplexrun.vfs.window import Window

_LINK_BYTES = 1024  # what the kernel keeps of a link
_NAME_BYTES = 240  # a file system takes 255, and the row stands before it

Read = Callable[[Ids, Ids], list[bytes]]
"""First byte and end of each → the bytes."""


@dataclass(frozen=True, slots=True)
class Framing:
    """How samples stand in a file of their format: with so many bytes `before` and `after` each that the file has
    there, and then `ending`. A pack is such a file, and its name ends in `suffix`."""

    suffix: str = ".bin"
    before: int = 0
    after: int = 0
    ending: str = ""


_FRAMINGS = {
    "jsonl": Framing(".jsonl", ending="\n"),
    "parquet": Framing(".jsonl", ending="\n"),  # rows as JSON: they have no bytes of their own
    "arrow": Framing(".jsonl", ending="\n"),
    "tar": Framing(".tar"),
    "tfrecord": Framing(".tfrecord", 12, 4),
}


@dataclass(frozen=True, slots=True)
class MixedCatalogue:
    """`num_bytes` of all samples; `names` where samples are whole files: class (a folder or "") and name of each, else
    nothing, and `classes`, the folders among them."""

    num_samples: int
    fingerprint: str
    num_bytes: int
    framing: Framing
    names: list[tuple[str, str]]
    classes: list[str]

    sample_bytes = 0
    """They differ."""

    @classmethod
    def of(cls, dataset: Dataset) -> MixedCatalogue:
        """Raises DataError for names that a list cannot have."""
        assert dataset.spans is not None
        names = file_names(dataset)
        for name in names:
            if len(name.splitlines()) > 1:
                raise DataError(
                    f"dataset {dataset.spec}: the name {name!r} has more than one line, and list.txt names a file a "
                    "line; rename it, or leave it out with exclude=NAME"
                )
        framing = Framing() if names else _FRAMINGS.get(format_of(dataset.spec), Framing())
        num_bytes = int((dataset.spans.ends - dataset.spans.starts).sum())
        split = [(folder, _end_of(name)) for folder, _, name in (name.rpartition("/") for name in names)]
        classes = sorted({folder for folder, _ in split} - {""})
        return cls(dataset.num_samples, dataset.fingerprint(), num_bytes, framing, split, classes)

    def save(self, home: Path) -> None:
        (home / "mixed.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, home: Path) -> MixedCatalogue:
        """Raises OSError, ValueError, TypeError, KeyError."""
        record = json.loads((home / "mixed.json").read_text())
        return cls(**{**record, "framing": Framing(**record["framing"])})

    def about(self) -> dict[str, Any]:
        """What a view says of them."""
        record = {"num_samples": self.num_samples, "fingerprint": self.fingerprint, "suffix": self.framing.suffix}
        return {**record, "classes": self.classes} if self.names else record


class Mixed:
    """What one reader sees of a dataset: `extents` have its blocks, places are those of its samples in `home`.

    `links`: to its whole files, if this node has them. `root`: where the view will be.
    """

    def __init__(
        self, catalogue: MixedCatalogue, home: Path, extents: Extents, root: Path, links: list[Link] | None = None
    ) -> None:
        self.catalogue, self._extents, self._root, self._links = catalogue, extents, root, links
        self._starts, self._ends = places.load(home)

    def row_bytes(self, ids: Ids) -> Ids:
        if self._links is not None:
            return np.full(len(ids), _LINK_BYTES)
        framing = self.catalogue.framing
        sizes: Ids = self._ends[ids] - self._starts[ids]
        return sizes + framing.before + framing.after + len(framing.ending)

    def about(self) -> dict[str, Any]:
        return {"samples": self.catalogue.about(), "blocks": self._extents.catalogue.to_json(), **self._extents.about}

    def entries(self, shown: Window) -> tuple[dict[str, Node], dict[str, Any]]:
        found, about = self._files(shown) if self.catalogue.names else self._packs(shown)
        return found, {**self.about(), **about}

    # --- whole files ----------------------------------------------------------------------------------------------

    def _files(self, shown: Window) -> tuple[dict[str, Node], dict[str, Any]]:
        folders: dict[str, dict[str, Node]] = {name: {} for name in ("", *self.catalogue.classes)}
        starts = {folder: f"files/{folder}/" if folder else "files/" for folder in folders}
        lines, paths = [], []
        ids = shown.ids(0, shown.num_rows)
        for row, (number, size) in enumerate(zip(ids.tolist(), self.row_bytes(ids).tolist(), strict=True)):
            folder, name = self.catalogue.names[number]
            name = f"{row:08d}-{name}"
            lines.append(starts[folder] + name)
            if self._links is not None:
                folders[folder][name] = link = self._links[number]
                paths.append(link.target)
            else:
                folders[folder][name] = self._waiting(size, partial(self._read_row, shown, row, number))
                paths.append(f"{self._root}/{lines[-1]}")
        files = folders.pop("")
        files.update((name, Directory(links)) for name, links in folders.items())
        entries: dict[str, Node] = {"files": Directory(files), "list.txt": _lines(lines), "paths.txt": _lines(paths)}
        return entries, {"files": "files"}

    def _read_row(self, shown: Window, row: int, number: int, wait: bool, offset: int, count: int) -> bytes:
        begin, end = int(self._starts[number]) + offset, int(self._ends[number])
        starts, ends = np.array([min(begin, end)]), np.array([min(begin + count, end)])
        return self._extents.read(starts, ends, shown.begin_of(row), wait)[0]

    # --- packs ----------------------------------------------------------------------------------------------------

    def _packs(self, shown: Window) -> tuple[dict[str, Node], dict[str, Any]]:
        ids = shown.ids(0, shown.num_rows)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.row_bytes(ids))])
        packs = pack_index(_cut(offsets), self.catalogue.framing.suffix)
        entries: dict[str, Node] = {}
        for pack in packs:
            first, last = pack["first_row"], pack["first_row"] + pack["rows"]
            read = partial(self._read_pack, shown, ids, offsets, int(offsets[first]), int(offsets[last]))
            entries[pack["name"]] = self._waiting(int(offsets[last] - offsets[first]), read)
        entries["list.txt"] = _lines(list(entries))
        entries["offsets.npy"] = array_file(
            offsets.shape, offsets.dtype, lambda first, count: offsets[first : first + count]
        )
        return entries, {"packs": packs, "offsets": "offsets.npy"}

    def _read_pack(
        self, shown: Window, ids: Ids, offsets: Ids, start: int, stop: int, wait: bool, offset: int, count: int
    ) -> bytes:
        begin, end = start + offset, min(start + offset + count, stop)
        if begin >= end:
            return b""
        first, last = int(np.searchsorted(offsets, begin, "right")) - 1, int(np.searchsorted(offsets, end))
        framing = self.catalogue.framing
        ending = framing.ending.encode()
        starts, ends = self._starts[ids[first:last]] - framing.before, self._ends[ids[first:last]] + framing.after
        ends[-1] -= max(0, int(offsets[last]) - end - len(ending))  # no more than is asked for: some are long
        skipped = begin - int(offsets[first])
        unread = min(skipped, int(ends[0] - starts[0]))
        starts[0] += unread
        samples = self._extents.read(starts, ends, shown.begin_of(first), wait)
        data = b"".join(sample + ending for sample in samples) if ending else b"".join(samples)
        return data[skipped - unread :][: end - begin]

    @staticmethod
    def _waiting(num_bytes: int, read: Callable[[bool, int, int], bytes]) -> File:
        return File(num_bytes, partial(read, False), partial(read, True))


def blocks_of(catalogue: MixedCatalogue, home: Path, block_bytes: int) -> Callable[[Ids], Ids]:
    """Of sample ids, the blocks that they lie in, ascending, each once."""
    starts, ends = places.load(home)
    framing = catalogue.framing
    return lambda ids: covering(starts[ids] - framing.before, ends[ids] + framing.after, block_bytes)


def _end_of(name: str) -> str:
    """What of a long name there is room for."""
    return os.fsdecode(os.fsencode(name)[-_NAME_BYTES:])


def _lines(names: list[str]) -> File:
    return text_file("".join(f"{name}\n" for name in names))


def _cut(offsets: Ids) -> Iterator[tuple[int, int]]:
    """First row and number of rows of packs that end where a row does, and are no longer than they should be if their
    rows allow that."""
    first, rows = 0, len(offsets) - 1
    while first < rows:
        last = int(np.searchsorted(offsets, offsets[first] + PACK_BYTES, "right")) - 1
        last = min(max(last, first + 1), rows)
        yield first, last - first
        first = last
