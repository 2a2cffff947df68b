"""Samples that differ in size, in shared memory and in the view.

`<directory>/<key of the spec>/` holds, for samples that are whole files (images), each as `files/<number><its suffix>`;
for others the samples end to end in extents, framed as their format has them in a file: lines end, records have their
lengths and checksums. `starts.npy` (int64 [samples + 1]) has the byte at which each begins, all laid end to end, and
`catalogue.json` the rest.

The view of the first is links, straight into shared memory,

    files/<class>/<row>-<name>    one for each row; every class has a folder, files in none of them stand outside
    list.txt                      files/..., a line each, in reading order
    paths.txt                     where they are in shared memory, in the same order: the fast way to many small files

and that of the others

    pack-00000.jsonl ...          the samples of the rows, one after another, some MB a file
    list.txt                      names of the packs, a line each, in order
    offsets.npy                   where each row begins in the packs laid end to end, and their end; int64 [rows + 1]
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tenplexrun.core.order import Ids
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import DataError
from tenplexrun.formats import file_names, format_of, open_dataset
from tenplexrun.mapping import EndToEnd
from tenplexrun.samples import extent_name
from tenplexrun.vfs.homes import appearing, full, home_of
from tenplexrun.vfs.nodes import Directory, File, Link, Node, array_file, text_file
from tenplexrun.vfs.view import PACK_BYTES, pack_index
from tenplexrun.vfs.window import Window

EXTENT_BYTES = 32 << 20
_COPY_BYTES = 4 << 20
_LINK_BYTES = 1024  # what the kernel keeps of a link


@dataclass(frozen=True, slots=True)
class Framing:
    """How samples stand in a file of their format: with so many bytes `before` and `after` each that the file has
    there, and then `ending`. A pack is such a file, and its name ends in `suffix`."""

    suffix: str = ".bin"
    before: int = 0
    after: int = 0
    ending: bytes = b""


_FRAMINGS = {
    "jsonl": Framing(".jsonl", ending=b"\n"),
    "parquet": Framing(".jsonl", ending=b"\n"),  # rows as JSON: they have no bytes of their own
    "tar": Framing(".tar"),
    "tfrecord": Framing(".tfrecord", 12, 4),
}


@dataclass(frozen=True, slots=True)
class MixedCatalogue:
    """`classes`: folders of whole files; None where samples are not whole files."""

    num_samples: int
    fingerprint: str
    suffix: str
    classes: list[str] | None

    sample_bytes = 0
    """They differ."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Files:
    """Samples that are files of their own."""

    def __init__(self, catalogue: MixedCatalogue, home: Path) -> None:
        self.catalogue = catalogue
        self._names = [name.rpartition("/") for name in json.loads((home / "names.json").read_text())]
        self._links = [
            Link(f"{home}/files/{_stored_name(number, name)}") for number, (_, _, name) in enumerate(self._names)
        ]

    def row_bytes(self, ids: Ids) -> Ids:
        return np.full(len(ids), _LINK_BYTES)

    def entries(self, shown: Window) -> tuple[dict[str, Node], dict[str, Any]]:
        folders: dict[str, dict[str, Node]] = {name: {} for name in ("", *(self.catalogue.classes or ()))}
        lines = []
        ids = shown.ids(0, shown.num_rows).tolist()
        for row, number in enumerate(ids):
            folder, slash, name = self._names[number]
            name = f"{row:08d}-{name}"
            folders[folder][name] = self._links[number]
            lines.append(f"files/{folder}{slash}{name}\n")
        files = folders.pop("")
        files.update((name, Directory(links)) for name, links in folders.items())
        entries: dict[str, Node] = {"files": Directory(files), "list.txt": text_file("".join(lines))}
        entries["paths.txt"] = text_file("".join(f"{self._links[number].target}\n" for number in ids))
        return entries, {"samples": self.catalogue.to_json(), "files": "files"}


class Packs:
    """Samples end to end."""

    def __init__(self, catalogue: MixedCatalogue, home: Path) -> None:
        self.catalogue, self._home = catalogue, home
        self._starts: Ids = np.load(home / "starts.npy", mmap_mode="r")
        self._memory: EndToEnd | None = None

    def row_bytes(self, ids: Ids) -> Ids:
        return self._starts[ids + 1] - self._starts[ids]

    def entries(self, shown: Window) -> tuple[dict[str, Node], dict[str, Any]]:
        ids = shown.ids(0, shown.num_rows)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.row_bytes(ids))])
        packs = pack_index(_cut(offsets), self.catalogue.suffix)
        entries: dict[str, Node] = {
            pack["name"]: self._pack(ids, offsets, pack["first_row"], pack["rows"]) for pack in packs
        }
        entries["list.txt"] = text_file("".join(f"{name}\n" for name in entries))
        entries["offsets.npy"] = array_file(
            offsets.shape, offsets.dtype, lambda first, count: offsets[first : first + count]
        )
        return entries, {"samples": self.catalogue.to_json(), "packs": packs, "offsets": "offsets.npy"}

    def _pack(self, ids: Ids, offsets: Ids, first_row: int, rows: int) -> File:
        start, stop = int(offsets[first_row]), int(offsets[first_row + rows])

        def read(offset: int, count: int) -> bytes:
            begin, end = start + offset, min(start + offset + count, stop)
            if begin >= end:
                return b""
            first, last = int(np.searchsorted(offsets, begin, "right")) - 1, int(np.searchsorted(offsets, end))
            skipped = begin - int(offsets[first])
            return self._bytes(ids[first:last])[skipped : skipped + end - begin]

        return File(stop - start, read)

    def _bytes(self, ids: Ids) -> bytes:
        """The samples `ids` end to end. Raises DataError when an extent is missing."""
        data = self._mapped().data.data
        return b"".join(
            data[begin:end]
            for begin, end in zip(self._starts[ids].tolist(), self._starts[ids + 1].tolist(), strict=True)
        )

    def _mapped(self) -> EndToEnd:
        if self._memory is None:
            num_bytes = int(self._starts[-1])
            memory = EndToEnd(num_bytes)
            for number, offset in enumerate(range(0, num_bytes, EXTENT_BYTES)):
                path = str(self._home / extent_name(number))
                try:
                    memory.put(path, offset, min(EXTENT_BYTES, num_bytes - offset))
                except (OSError, ValueError) as error:
                    raise DataError(f"cannot map {path}: {error}; the dataset view has lost it") from error
            self._memory = memory
        return self._memory


def _cut(offsets: Ids) -> Iterator[tuple[int, int]]:
    """First row and number of rows of packs that end where a row does, and are no longer than they should be if their
    rows allow that."""
    first, rows = 0, len(offsets) - 1
    while first < rows:
        last = int(np.searchsorted(offsets, offsets[first] + PACK_BYTES, "right")) - 1
        last = min(max(last, first + 1), rows)
        yield first, last - first
        first = last


def load(spec: str, directory: Path, stop: threading.Event) -> Files | Packs:
    """The samples of dataset `spec` below `directory`, copied there unless they are already.

    Raises DataError for a bad dataset or when `stop` is set, ArenaFullError with the bytes needed and free.
    """
    home = home_of(spec, directory)
    if not (home / "catalogue.json").exists():
        _copy(open_dataset(spec), home, stop)
    catalogue = MixedCatalogue(**json.loads((home / "catalogue.json").read_text()))
    return Packs(catalogue, home) if catalogue.classes is None else Files(catalogue, home)


def _copy(dataset: Dataset, home: Path, stop: threading.Event) -> None:
    names = file_names(dataset)
    for name in names:
        if len(name.splitlines()) > 1:
            raise DataError(
                f"dataset {dataset.spec}: the name {name!r} has more than one line, and list.txt names a file a line; "
                "rename it, or leave it out with exclude=NAME"
            )
    framing = Framing() if names else _FRAMINGS.get(format_of(dataset.spec), Framing())
    with appearing(home) as partial:
        blocks = _read(dataset, framing, stop)
        try:
            sizes = _write_files(blocks, names, partial) if names else _write_extents(blocks, partial)
            np.save(partial / "starts.npy", np.cumsum([0, *sizes], dtype=np.int64))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise full(dataset.spec, dataset.pieces.num_bytes, partial) from error
            raise DataError(f"cannot write {partial}: {error.strerror}") from error
        classes = sorted({name.rpartition("/")[0] for name in names} - {""}) if names else None
        catalogue = MixedCatalogue(dataset.num_samples, dataset.fingerprint(), framing.suffix, classes)
        (partial / "catalogue.json").write_text(json.dumps(catalogue.to_json()))


def _read(dataset: Dataset, framing: Framing, stop: threading.Event) -> Iterator[list[bytes]]:
    """The samples in their frames, some MB at a time."""
    for numbers in _groups(dataset):
        if stop.is_set():
            raise DataError(f"dataset {dataset.spec}: the view was told to stop while it copied the samples")
        if _has_places(dataset):
            places = [(begin - framing.before, end + framing.after) for begin, end in map(dataset.span, numbers)]
            found = dataset.pieces.read_many(places)
        else:
            found = dataset.raw_many(numbers)
        yield [raw + framing.ending for raw in found]


def _write_files(blocks: Iterable[list[bytes]], names: list[str], folder: Path) -> list[int]:
    """Returns how long they are."""
    (folder / "files").mkdir()
    (folder / "names.json").write_text(json.dumps(names))
    sizes = []
    for number, (name, data) in enumerate(zip(names, chain.from_iterable(blocks), strict=True)):
        with open(folder / "files" / _stored_name(number, name), "xb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o400)
        sizes.append(len(data))
    return sizes


def _write_extents(blocks: Iterable[list[bytes]], folder: Path) -> list[int]:
    """Returns how long the samples are."""
    sizes: list[int] = []
    offset = 0
    for block in blocks:
        sizes += map(len, block)
        rest = memoryview(b"".join(block))
        while len(rest):
            number, begun = divmod(offset, EXTENT_BYTES)
            with open(folder / extent_name(number), "ab") as file:
                written = file.write(rest[: EXTENT_BYTES - begun])
            rest, offset = rest[written:], offset + written
    for path in folder.glob("extent-*.bin"):
        path.chmod(0o400)
    return sizes


def _groups(dataset: Dataset) -> Iterator[range]:
    """Numbers of consecutive samples, some MB together."""
    first, num_bytes = 0, 0
    for number in range(dataset.num_samples):
        begin, end = dataset.span(number) if _has_places(dataset) else (0, _COPY_BYTES // 1024)
        num_bytes += end - begin
        if num_bytes >= _COPY_BYTES:
            yield range(first, number + 1)
            first, num_bytes = number + 1, 0
    yield range(first, dataset.num_samples)


def _has_places(dataset: Dataset) -> bool:
    """Rows of tables have none."""
    return dataset.spans is not None and len(dataset.spans.starts) > 0


def _stored_name(number: int, name: str) -> str:
    return f"{number:08d}{os.path.splitext(name)[1]}"
