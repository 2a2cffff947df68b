"""What a node keeps of datasets, for other nodes' stores: whole extents, and samples of them.

The dataset view writes extents and checksums of their blocks (`tenplexrun.samples`); here they are only read. A read is
that of a snapshot (`wire.Read`) with the number 0, the step 0 and the digest "dataset-<key>"; an extent is a tensor of
bytes [samples, sample size] by the name of its file. What goes out has passed its checksums, and a damaged extent is
removed: the view fetches it anew.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from tenplexrun.core import records
from tenplexrun.core.pieces import Piece
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import SnapshotId
from tenplexrun.errors import DataError, StoreError, WireError
from tenplexrun.samples import Catalogue, block_sums, extent_name, sums_name
from tenplexrun.store.files import MappedFile
from tenplexrun.store.transfer import Part, Peers, Pull

_DIGEST = re.compile(r"dataset-([0-9a-f]{1,64})")
_NAME = re.compile(r"extent-(\d{1,12})\.bin")


def dataset_id(key: str) -> SnapshotId:
    return SnapshotId(0, 0, f"dataset-{key}")


class Shelf:
    """The extents below `folder`, which may come and go at any time: nothing of them is kept open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def holds(self, snapshot: SnapshotId) -> bool:
        return _DIGEST.fullmatch(snapshot.digest) is not None

    def take(
        self, snapshot: SnapshotId, regions: Iterable[tuple[str, Region]]
    ) -> tuple[dict[str, list[Piece]], dict[str, MappedFile]]:
        """The extents with `regions`, by name, and their open files. Raises StoreError for one that is not here."""
        match = _DIGEST.fullmatch(snapshot.digest)
        assert match is not None
        home = self._folder / match[1]
        try:
            catalogue = Catalogue.from_json(json.loads((home / "catalogue.json").read_text()))
        except (OSError, ValueError, DataError) as error:
            raise StoreError(f"this node has nothing of that dataset: {error}") from error
        pieces: dict[str, list[Piece]] = {}
        files: dict[str, MappedFile] = {}
        for name, region in regions:
            if name not in files:
                pieces[name], files[name] = _open(home, catalogue, name)
            _prove(home, catalogue, pieces[name][0], region, files[name])
            if region == pieces[name][0].region:
                whole = xxhash.xxh3_64_intdigest(files[name].view)
                pieces[name] = [Piece(name, region, "uint8", name, 0, len(files[name].view), whole)]
        return pieces, files


def _open(home: Path, catalogue: Catalogue, name: str) -> tuple[list[Piece], MappedFile]:
    match = _NAME.fullmatch(name)
    number = int(match[1]) if match else -1
    if not 0 <= number < catalogue.num_extents:
        raise WireError(f"{name[:100]!r} names no extent of that dataset")
    try:
        file = MappedFile(home / extent_name(number), read_only=True)
    except OSError as error:
        raise StoreError(f"extent {number} is not on this node") from error
    region = Region((0, 0), (catalogue.samples_in(number), catalogue.sample_bytes))
    return [Piece(name, region, "uint8", name, 0, region.num_elements, 0)], file


def _prove(home: Path, catalogue: Catalogue, piece: Piece, region: Region, file: MappedFile) -> None:
    """The blocks that `region` lies in against their checksums. Raises StoreError; then the extent is gone."""
    inside = region.relative_to(piece.region)  # raises LayoutError where it does not
    number, per_block = int(piece.fqn[7:-4]), catalogue.samples_per_block
    first, last = inside.offsets[0] // per_block, -(-inside.stops[0] // per_block)
    size = per_block * catalogue.sample_bytes
    try:
        sums = np.fromfile(home / sums_name(number), np.uint64)[first:last]
    except OSError:
        sums = np.empty(0, np.uint64)
    if not np.array_equal(block_sums(file.view[first * size : last * size], catalogue), sums):
        for name in (extent_name(number), sums_name(number)):
            with contextlib.suppress(FileNotFoundError):
                (home / name).unlink()
        raise StoreError(f"extent {number} failed its checksums on this node")


class RowsJob:
    """Samples of a dataset from other nodes, into a file: what the view asks for. `run` blocks."""

    def __init__(self, peers: Peers, record: Record) -> None:
        """From {"dataset", "path", "sample_bytes", "addresses", "runs": [[extent, first sample, count, offset in the
        file, [index of an address, ...]], ...]}. Raises LayoutError."""
        self._peers = peers
        self._snapshot = dataset_id(records.text(record["dataset"], "a dataset"))
        self._path = Path(records.text(record["path"], "a path"))
        size = records.whole(record["sample_bytes"], "the size of a sample")
        addresses = [records.text(address, "an address") for address in records.items(record["addresses"], "addresses")]
        self._parts = [_part(items, size, addresses) for items in records.items(record["runs"], "runs")]

    def run(self) -> Record:
        """{"missing": indexes of the runs that nobody delivered, "num_bytes"}. Raises StoreError for a bad path."""
        try:
            file = MappedFile(self._path)
        except OSError as error:
            raise StoreError(f"cannot open {self._path}: {error}") from error
        arrived: set[int] = set()
        most = max((len(part.addresses) for part in self._parts), default=0)
        for attempt in range(most):
            left = [i for i, part in enumerate(self._parts) if i not in arrived and len(part.addresses) > attempt]
            if left:
                arrived.update(self._attempt(file, left, attempt))
        missing = [index for index in range(len(self._parts)) if index not in arrived]
        return {"missing": missing, "num_bytes": sum(self._parts[index].num_bytes for index in arrived)}

    def _attempt(self, file: MappedFile, left: Sequence[int], attempt: int) -> set[int]:
        """Which of the parts `left` come from the holder whose turn it is.

        A store that lacks one extent refuses a whole request; then it is asked for each extent by itself."""
        arrived, away = self._pull(file, left, attempt)
        by_extent: dict[str, list[int]] = {}
        for index in left:
            if index not in arrived and self._parts[index].addresses[attempt] not in away:
                by_extent.setdefault(self._parts[index].fqn, []).append(index)
        if len(by_extent) > 1:
            for some in by_extent.values():
                arrived |= self._pull(file, some, attempt)[0]
        return arrived

    def _pull(self, file: MappedFile, left: Sequence[int], attempt: int) -> tuple[set[int], Collection[str]]:
        """Those that come, and the stores that cannot be reached."""
        parts = [
            Part(p.fqn, p.region, p.dtype, p.num_bytes, p.offset, p.addresses[attempt : attempt + 1])
            for p in (self._parts[index] for index in left)
        ]
        pull = Pull(self._peers, self._snapshot, parts, streams=1)
        with contextlib.suppress(WireError):
            pull.run(file)
        return {index for index, part in zip(left, parts, strict=True) if pull.has(part)}, pull.away


def _part(record: object, size: int, addresses: Sequence[str]) -> Part:
    items = records.items(record, "a run of samples")
    extent, first, count, offset = (records.whole(item, "a number of a run") for item in items[:4])
    region = Region((first, 0), (count, size))
    known = tuple(addresses[records.whole(i, "an address's index")] for i in records.items(items[4], "holders"))
    return Part(extent_name(extent), region, "uint8", count * size, offset, known)
