"""A named dataset whose samples the node's dataset view keeps, read one by one: what torch's DataLoader takes.

It pickles as the record that it was opened by, and a forked process has a connection of its own, so processes that
fetch samples share nothing but the memory that the samples are in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tenplexrun import places
from tenplexrun.channel import BlockingChannel
from tenplexrun.core.extents import numbers_in
from tenplexrun.core.order import Ids
from tenplexrun.datasets.dataset import Dataset, Piece, Pieces
from tenplexrun.errors import DataError, WireError
from tenplexrun.formats import open_dataset
from tenplexrun.samples import Catalogue, Extents

Record = Mapping[str, Any]
_RETRY_S = 0.02
_PATIENCE_S = 30.0  # with a view whose process has died


class Asking:
    """Has the view's process find rows that are not in this node's extents: in files that it fetches them into."""

    def __init__(self, socket: str, view: str) -> None:
        self._socket, self._view = socket, view
        self._channel: BlockingChannel | None = None
        self._process = 0

    def __call__(self, ids: Ids, begin: int | None) -> list[str]:
        """Waits for them. Raises DataError where they cannot be had, or the view stays away."""
        deadline = None
        while True:
            try:
                answer = self._connected().request("rows", view=self._view, ids=ids.tolist(), begin=begin)
                return [str(path) for path in answer["files"]]
            except WireError as error:
                if self._channel is not None:
                    self._channel.close()
                self._channel, now = None, time.monotonic()
                deadline = now + _PATIENCE_S if deadline is None else deadline  # an answer may take longer
                if now > deadline:
                    raise DataError(f"the dataset view does not answer: {error}; is its process alive?") from error
                time.sleep(_RETRY_S)

    def _connected(self) -> BlockingChannel:
        if self._channel is None or self._process != os.getpid():  # a fork would mix its answers with its parent's
            self._channel, self._process = BlockingChannel(f"unix:{self._socket}"), os.getpid()
        return self._channel


def open_extents(index: Record) -> Extents:
    """What a view's index.json says where they are. Raises KeyError, TypeError, DataError."""
    find = Asking(index["socket"], index["view"]) if "socket" in index else None
    here = frozenset(numbers_in(index["here"])) if "here" in index else None
    return Extents(Catalogue.from_json(index.get("blocks", index["samples"])), index["directory"], here, find)


class _Bytes(Pieces):
    """The bytes that extents hold, end to end. `spec` names the dataset."""

    def __init__(self, extents: Extents, spec: str) -> None:
        super().__init__([])
        self._extents, self._spec, self._begin = extents, spec, None  # type: Extents, str, int | None
        self.num_bytes = extents.catalogue.num_bytes

    def reach(self, begin: int) -> None:
        self._begin = begin

    def read_into(self, offset: int, data: memoryview) -> None:
        [data[:]] = self.read_many([(offset, offset + len(data))])

    def read_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        return self._extents.read(starts, ends, self._begin)

    def place(self, offset: int) -> tuple[Piece, int]:
        return open_dataset(self._spec).pieces.place(offset)  # only for messages


@dataclass(frozen=True, slots=True)
class Shared(Dataset):
    """The samples of the dataset `spec` that a view with `index` keeps."""

    index: Record = field(kw_only=True, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_shared, (self.spec, self.index)


def open_shared(spec: str, index: Record) -> Shared:
    """Raises KeyError, TypeError, DataError."""
    extents, samples = open_extents(index), index["samples"]
    pieces = _Bytes(extents, spec)
    count, fingerprint = int(samples["num_samples"]), str(samples["fingerprint"])
    if "blocks" not in index:
        kind = extents.catalogue.dtype, extents.catalogue.shape
        return Shared(spec, count, *kind, pieces, known=fingerprint, index=index)
    spans = places.load_spans(Path(index["directory"]))
    return Shared(spec, count, "", (), pieces, spans=spans, known=fingerprint, index=index)
