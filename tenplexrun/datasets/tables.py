"""Rows of Parquet and Arrow files, by the library pyarrow (the extra `parquet`).

A row is found by decoding its row group (Arrow: its record batch); the last few of these are kept. So
`order_algo="blocks-1:B:W"` with B near the rows of a group and a small W reads each group about once an epoch, and
"feistel-1" nearly always decodes anew.
"""

from __future__ import annotations

import bisect
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tenplexrun.datasets.dataset import Dataset, Piece, Pieces, Spans
from tenplexrun.datasets.files import Source, open_file
from tenplexrun.datasets.remote import is_url
from tenplexrun.errors import DataError

_KEPT_GROUPS = 32


class RowGroups:
    """Rows by number over the row groups of some files. A copy in another process has decoded nothing yet."""

    def __init__(self, kind: str, paths: list[str], columns: list[str] | None) -> None:
        self._kind, self._paths, self._columns = kind, paths, columns
        lengths, self._read = _KINDS[kind]
        self._groups: list[tuple[str, int]] = []
        self._firsts: list[int] = []
        self._kept: dict[int, Any] = {}
        self.num_rows = 0
        for path in paths:
            for group, length in enumerate(lengths(path)):
                self._groups.append((path, group))
                self._firsts.append(self.num_rows)
                self.num_rows += length

    def __reduce__(self) -> tuple[type[RowGroups], tuple[str, list[str], list[str] | None]]:
        return RowGroups, (self._kind, self._paths, self._columns)

    def place(self, number: int) -> tuple[int, int]:
        """Which group a row is in, and which of that it is."""
        group = bisect.bisect_right(self._firsts, number) - 1
        return group, number - self._firsts[group]

    def where(self, number: int) -> str:
        group, row = self.place(number)
        path, own = self._groups[group]
        return f"{path}, row {row} of row group {own}"

    def row(self, number: int) -> dict[str, Any]:
        group, row = self.place(number)
        if group not in self._kept:
            while len(self._kept) >= _KEPT_GROUPS:
                self._kept.pop(next(iter(self._kept)))
            path, own = self._groups[group]
            self._kept[group] = self._read(path, own, self._columns)
        [found] = self._kept[group].slice(row, 1).to_pylist()
        return dict(found)


def _file(path: str) -> Any:
    """What pyarrow reads from."""
    return open_file(path) if is_url(path) else path


def _parquet_lengths(path: str) -> list[int]:
    from pyarrow import parquet

    metadata = parquet.read_metadata(_file(path))
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _parquet_rows(path: str, group: int, columns: list[str] | None) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(_file(path)) as file:
        return file.read_row_group(group, columns=columns)


def _arrow(path: str) -> Any:
    """A reader of record batches; of a file in the stream format, which has no index, a table as its only group."""
    import pyarrow

    file = open_file(path) if is_url(path) else pyarrow.memory_map(path)
    try:
        return pyarrow.ipc.open_file(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        return pyarrow.ipc.open_stream(file).read_all()


def _arrow_lengths(path: str) -> list[int]:
    found = _arrow(path)
    if not hasattr(found, "num_record_batches"):
        return [found.num_rows]
    return [found.get_batch(group).num_rows for group in range(found.num_record_batches)]


def _arrow_rows(path: str, group: int, columns: list[str] | None) -> Any:
    found = _arrow(path)
    rows = found.get_batch(group) if hasattr(found, "num_record_batches") else found
    return rows if columns is None else rows.select(columns)


_KINDS = {"parquet": (_parquet_lengths, _parquet_rows), "arrow": (_arrow_lengths, _arrow_rows)}


class _Rendered(Pieces):
    """Rows as JSON, end to end, as if they were in a file: row i begins at byte `starts[i]`; then zeros."""

    def __init__(self, rows: RowGroups, starts: npt.NDArray[np.int64], num_bytes: int) -> None:
        super().__init__([])
        self._rows, self._row_starts, self.num_bytes = rows, starts, num_bytes
        self.remote = True  # in that many are better asked for at once

    def __reduce__(self) -> tuple[Any, ...]:
        return _Rendered, (copy.copy(self._rows), self._row_starts, self.num_bytes)

    def padded(self, num_bytes: int) -> Pieces:
        return _Rendered(self._rows, self._row_starts, num_bytes)

    def place(self, offset: int) -> tuple[Piece, int]:
        return Piece(self._rows.where(int(np.searchsorted(self._row_starts, offset, "right")) - 1), 0, 0), 0

    def read_into(self, offset: int, data: memoryview) -> None:
        [data[:]] = self.read_many([(offset, offset + len(data))])

    def read_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        found = [b""] * len(spans)
        for number in sorted(range(len(spans)), key=spans.__getitem__):  # row groups are decoded one after another
            found[number] = self._between(*spans[number])
        return found

    def _between(self, begin: int, end: int) -> bytes:
        stop = min(end, int(self._row_starts[-1]))
        if begin >= stop:
            return bytes(end - begin)
        first = int(np.searchsorted(self._row_starts, begin, "right")) - 1
        last = int(np.searchsorted(self._row_starts, stop))
        data = b"".join(_json(self._rows.row(number)) for number in range(first, last))
        skipped = begin - int(self._row_starts[first])
        return data[skipped : skipped + stop - begin].ljust(end - begin, b"\0")


@dataclass(frozen=True, slots=True)
class Table(Dataset):
    """A dataset whose samples are rows, which have no bytes of their own in the files."""

    rows: RowGroups = field(kw_only=True, repr=False, compare=False)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows.row(range(self.num_samples)[number])

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [self[number] for number in numbers]

    def raw(self, number: int) -> bytes:
        """The row as JSON, since its stored bytes are shared with others."""
        return _json(self.rows.row(number))

    def raw_many(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.raw(number) for number in numbers]

    def where(self, number: int) -> str:
        return self.rows.where(number)

    def rendered(self) -> Dataset:
        """The rows as JSON, in places of their own; each has to be decoded once, to know how long it is."""
        sizes = [len(_json(self.rows.row(number))) for number in range(self.num_samples)]
        starts = np.cumsum([0, *sizes], dtype=np.int64)
        spans = Spans(starts[:-1], starts[1:], _as_json)
        pieces = _Rendered(self.rows, starts, int(starts[-1]))
        return Dataset(self.spec, self.num_samples, "", (), pieces, spans=spans, known=self.fingerprint())


def _json(row: dict[str, Any]) -> bytes:
    return json.dumps(row, default=repr).encode()


def _as_json(raw: bytes, _: int) -> Any:
    return json.loads(raw)


def open_parquet(source: Source) -> Dataset:
    """A sample is a row, {column: value}, of the columns that the option `columns` names (a,b), or of all."""
    return _open("parquet", source)


def open_arrow(source: Source) -> Dataset:
    """The same of Arrow's files, of the file or the stream format."""
    return _open("arrow", source)


def _open(kind: str, source: Source) -> Dataset:
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise DataError(f"{kind} needs pyarrow: pip install 'tenplexrun[parquet]'") from error
    columns = source.option("columns", "").split(",") if "columns" in source.options else None
    files = source.files(f"**/*.{kind}")
    try:
        rows = RowGroups(kind, [piece.path for piece in files], columns)
    except (ArrowException, ValueError) as error:
        raise DataError(f"dataset {source.spec}: not a file of the format {kind}: {error}") from error
    nowhere = np.empty(0, dtype=np.int64)
    pieces, spans = Pieces(files), Spans(nowhere, nowhere, _as_json)
    return Table(source.spec, rows.num_rows, "", (), pieces, spans=spans, note=f"{columns}", rows=rows)
