"""A dataset is parts of files laid end to end, and where in them its samples lie."""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.datasets import remote
from tenplexrun.errors import DataError, DataModifiedError

Ids = npt.NDArray[np.int64]
Decode = Callable[[bytes, int], Any]
"""A sample's bytes and its number → the sample."""

_HASHED_BLOCKS = 256
_HASHED_BLOCK_BYTES = 1 << 20
_HASHED_TOGETHER = 32
_MAX_OPEN_FILES = 64
_MAX_GAP = 64 << 10  # bytes of a remote file that are read for nothing rather than asked around


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + num_bytes) of a file. `path` may be a URL. `modified_ns`: when the file was modified last
    as it was listed; None where nobody looked."""

    path: str
    offset: int
    num_bytes: int
    modified_ns: int | None = None


class Pieces:
    """Pieces of files end to end. Files stay open, up to 64; a copy in another process opens its own.

    `remote`: some are behind URLs. Those are read by range, many side by side: ask for many at once.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if piece.num_bytes]
        *self._starts, self.num_bytes = itertools.accumulate((p.num_bytes for p in self._pieces), initial=0)
        self._files: dict[str, tuple[FileIO, Piece]] = {}
        self._unchecked: set[str] = set()  # files read since `check`
        self.remote = any(remote.is_url(piece.path) for piece in self._pieces)

    @property
    def sizes(self) -> list[int]:
        return [piece.num_bytes for piece in self._pieces]

    def __reduce__(self) -> tuple[type[Pieces], tuple[list[Piece]]]:
        return Pieces, (self._pieces,)

    def padded(self, num_bytes: int) -> Pieces:
        """The same with zeros behind them, up to so many bytes."""
        return Pieces([*self._pieces, Piece("/dev/zero", 0, num_bytes - self.num_bytes)])

    def reach(self, begin: int) -> None:
        """Their reader is at the step that begins at position `begin` of the order, which is nothing to files."""

    def place(self, offset: int) -> tuple[Piece, int]:
        """The piece that byte `offset` of all lies in, and its offset in that file."""
        number = bisect.bisect_right(self._starts, offset) - 1
        piece = self._pieces[number]
        return piece, piece.offset + offset - self._starts[number]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Raises DataChangedError when a file has gone or shrunk since it was listed, DataModifiedError when it was
        written to, DataError when it cannot be read now."""
        data = self._read(offset, num_bytes)
        self.check()
        return data

    def check(self) -> None:
        """Raises DataModifiedError when a file that was read since the last check is not as it was listed."""
        paths, self._unchecked = self._unchecked, set()
        for file, piece in filter(None, map(self._files.get, paths)):
            if piece.modified_ns not in (None, os.fstat(file.fileno()).st_mtime_ns):
                what = f"{piece.path} was written to since the job began"
                raise DataModifiedError(f"{what}; if it is not what it was, restore it, and start the job again")

    def _read(self, offset: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, data: memoryview) -> None:
        """Fill `data` with the bytes from `offset` on. Raises DataError as `read`, but for what `check` does."""
        if self.remote:
            [data[:]] = self._fetch([(offset, offset + len(data))])
            return
        number = bisect.bisect_right(self._starts, offset) - 1
        while len(data):
            piece, skip = self._pieces[number], offset - self._starts[number]
            part = min(len(data), piece.num_bytes - skip)
            self._read_piece(piece, skip, data[:part])
            data, offset, number = data[part:], offset + part, number + 1

    def read_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes [begin, end) of each. Raises DataError as `read`."""
        if not self.remote:
            found = [self._read(begin, end - begin) for begin, end in spans]
            self.check()
            return found
        joined = merged(spans)
        fetched = self._fetch([(begin, end) for begin, end, _ in joined])
        parts = [b""] * len(spans)
        for (first, _, members), data in zip(joined, fetched, strict=True):
            for member in members:
                begin, end = spans[member]
                parts[member] = data[begin - first : end - first]
        return parts

    def _fetch(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        ranges = [list(self._ranges(begin, end)) for begin, end in spans]
        found = iter(remote.fetch([each for of_span in ranges for each in of_span]))
        return [b"".join(itertools.islice(found, len(of_span))) for of_span in ranges]

    def _ranges(self, begin: int, end: int) -> Iterator[remote.Range]:
        while begin < end:
            piece, offset = self.place(begin)
            stop = min(piece.offset + piece.num_bytes, offset + end - begin)
            yield piece.path, offset, stop
            begin += stop - offset

    def _read_piece(self, piece: Piece, skip: int, data: memoryview) -> None:
        try:
            file, _ = self._files.get(piece.path) or self._open(piece)
            self._unchecked.add(piece.path)
            found = os.preadv(file.fileno(), [data], piece.offset + skip)
            while 0 < found < len(data):
                more = os.preadv(file.fileno(), [data[found:]], piece.offset + skip + found)
                found = found + more if more else -1
        except OSError as error:
            if isinstance(error, FileNotFoundError) and os.path.isdir(os.path.dirname(piece.path)):
                raise remote.changed(piece.path, "has gone") from error  # else what it lies on may be away
            raise DataError(f"cannot read {piece.path}: {error.strerror}; is it there on this node?") from error
        if found != len(data):
            raise remote.changed(piece.path, "has shrunk")

    def _open(self, piece: Piece) -> tuple[FileIO, Piece]:
        while len(self._files) >= _MAX_OPEN_FILES:
            self.check()
            self._files.pop(next(iter(self._files)))[0].close()
        self._files[piece.path] = opened = FileIO(piece.path), piece
        return opened


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[int]]]:
    """Spans that touch, or nearly, as one, of at most 8 MiB where they do not overlap: begin, end, and the numbers of
    those in it."""
    found: list[tuple[int, int, list[int]]] = []
    first = last = -1 - _MAX_GAP
    for number in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[number]
        if begin < last or (begin <= last + _MAX_GAP and end <= first + remote.PART_BYTES):
            members = found.pop()[2]
            last = max(last, end)
        else:
            members, first, last = [], begin, end
        members.append(number)
        found.append((first, last, members))
    return found


@dataclass(frozen=True, slots=True)
class Spans:
    """Samples of different sizes: bytes [starts[i], ends[i]) of the pieces; int64 [num_samples] both."""

    starts: Ids
    ends: Ids
    decode: Decode


@dataclass(frozen=True, slots=True)
class Dataset:
    """`num_samples` samples in `pieces`.

    Either all of numpy type `dtype` and of `shape`, one every `stride` bytes (0: end to end); or `spans` says where
    each is, and `dtype` is "". `note` is what the fingerprint covers besides the bytes, such as the names of classes;
    `known` is the fingerprint that a stored index has of it. As a sequence it has the decoded samples, and pickles:
    torch's DataLoader takes it.
    """

    spec: str
    num_samples: int
    dtype: str
    shape: tuple[int, ...]
    pieces: Pieces = field(repr=False, compare=False)
    stride: int = 0
    spans: Spans | None = field(default=None, repr=False, compare=False)
    note: str = ""
    known: str = ""

    @property
    def sample_bytes(self) -> int:
        """Raises DataError where samples differ in size."""
        if self.spans is not None:
            raise DataError(f"dataset {self.spec} has samples of different sizes; ask for the size of each")
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_samples * self.sample_bytes

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> Any:
        """Sample `number`, decoded: an array [*shape], or what the format makes of its bytes.

        Raises DataError for bytes that cannot be decoded, IndexError for a number out of range."""
        number = range(self.num_samples)[number]
        return self._decoded(number, self.raw(number))

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Several samples, which are read together. Raises as `__getitem__`."""
        numbers = [range(self.num_samples)[number] for number in numbers]
        return [self._decoded(*each) for each in zip(numbers, self.raw_many(numbers), strict=True)]

    def _decoded(self, number: int, raw: bytes) -> Any:
        if self.spans is None:
            return np.frombuffer(bytearray(raw), dtype=self.dtype).reshape(self.shape)
        try:
            return self.spans.decode(raw, number)
        except DataError:
            raise
        except Exception as error:  # each format's library has its own
            raise DataError(f"dataset {self.spec}: sample {number} of {self.where(number)}: {error}") from error

    def span(self, number: int) -> tuple[int, int]:
        """Begin and end of a sample's bytes in the pieces."""
        if self.spans is not None:
            return int(self.spans.starts[number]), int(self.spans.ends[number])
        start = number * (self.stride or self.sample_bytes)
        return start, start + self.sample_bytes

    def where(self, number: int) -> str:
        """For people: the file a sample begins in, and at which byte."""
        piece, offset = self.pieces.place(self.span(number)[0])
        return f"{piece.path} at byte {offset}"

    def raw(self, number: int) -> bytes:
        """A sample's bytes as they are stored."""
        start, end = self.span(number)
        return self.pieces.read(start, end - start)

    def raw_many(self, numbers: Sequence[int]) -> list[bytes]:
        """The bytes of several samples, which are read together."""
        return self.pieces.read_many([self.span(number) for number in numbers])

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes of the samples laid end to end. Raises DataError when a file has gone or shrunk since it was listed."""
        size = self.sample_bytes
        if self.stride in (0, size):
            return self.pieces.read(offset, num_bytes)
        first, last = offset // size, min(-(-(offset + num_bytes) // size), self.num_samples)
        found = b"".join(self.raw_many(range(first, last)))
        return found[offset - first * size :][:num_bytes]

    def gather(self, ids: Ids) -> npt.NDArray[Any]:
        """The samples `ids` [n], which have one size, as an array [n, *shape], read from the files one by one."""
        size = self.sample_bytes
        rows = np.empty((len(ids), size), dtype=np.uint8)
        if self.pieces.remote:
            rows.reshape(-1).data[:] = b"".join(self.raw_many(ids.tolist()))
        else:
            for row, start in zip(rows, (ids * (self.stride or size)).tolist(), strict=True):
                self.pieces.read_into(start, row.data)
            self.pieces.check()
        return (
            rows.view(self.dtype).reshape(len(ids), *self.shape) if len(ids) else np.empty((0, *self.shape), self.dtype)
        )

    def fingerprint(self) -> str:
        """Names the content: xxh3 over type, shape, places and bytes; beyond 256 MiB over 256 evenly spaced MiB."""
        if self.known:
            return self.known
        digest = xxhash.xxh3_128(f"{self.num_samples} {self.dtype} {self.shape}".encode())
        digest.update(self.note.encode())
        if self.spans is not None:
            digest.update(self.spans.starts.tobytes() + self.spans.ends.tobytes())
        num_bytes = self.pieces.num_bytes if self.spans is not None else self.span(self.num_samples - 1)[1]
        blocks = -(-num_bytes // _HASHED_BLOCK_BYTES)
        count = min(blocks, _HASHED_BLOCKS)
        starts = [number * blocks // count * _HASHED_BLOCK_BYTES for number in range(count)]
        for first in range(0, count, _HASHED_TOGETHER):
            some = starts[first : first + _HASHED_TOGETHER]
            for data in self.pieces.read_many([(at, min(at + _HASHED_BLOCK_BYTES, num_bytes)) for at in some]):
                digest.update(data)
        return f"xxh3-{digest.hexdigest()}"
