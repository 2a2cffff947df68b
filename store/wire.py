"""The protocol between stores, without any IO: bytes in, records out, and back.

    frame    magic "TPXS" · version u16 · kind u16 · length u32 · checksum u64
             · header (`length` bytes of UTF-8 JSON, an object)
    request  (kind 1)  {"token", "op", ...}
               "read"      {"snapshot", "regions": [[fqn, region], ...]}
               "describe"  {"snapshot"}
               "layout"    {"digest"}
    answer   (kind 2)  {"ok": {...}} or {"error": {"kind", "message"}}
               "read"      {"ok": {"regions": [[num_bytes, dtype], ...]}}, then one stream: for each region, in the
                           order asked, its `num_bytes` bytes (row-major, native order) and its checksum (u64)
               "describe"  {"ok": {"index": the index without claims and pieces}}
               "layout"    {"ok": {"layout": ...}}

Numbers of the frame are in network order. A checksum is xxh3_64. A frame's is that of its header. A region's
follows its bytes, so that neither end holds a region twice: the sender hashes what it sends, the receiver what has
come, before it is put in place.
Whatever bytes come in, nothing but WireError comes out, and no more memory is asked for than the limits below.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from tenplexrun.core import records
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import SnapshotId
from tenplexrun.errors import LayoutError, WireError, from_wire, to_wire

MAGIC = b"TPXS"
VERSION = 2
PREFIX = struct.Struct("!4sHHIQ")
CHECKSUM = struct.Struct("!Q")
REQUEST, ANSWER = 1, 2

MAX_HEADER_BYTES = 16 << 20
MAX_REGIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for regions of one snapshot: (fqn, region) each."""

    snapshot: SnapshotId
    regions: tuple[tuple[str, Region], ...]


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for what a snapshot holds besides tensors."""

    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class GetLayout:
    """Asks for the layout of a digest."""

    digest: str


Request = Read | Describe | GetLayout


class FrameReader:
    """Puts one frame of a given kind together. Read `needed` bytes (never more), `feed` them, until a header comes out.

    After the header the stream stands right behind the frame, so raw bytes can be received in place.
    """

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._buffer = bytearray()
        self._length: int | None = None
        self._checksum = 0

    @property
    def needed(self) -> int:
        """Bytes missing to the next decision, at least 1."""
        goal = PREFIX.size if self._length is None else PREFIX.size + self._length
        return goal - len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Record | None:
        """Take at most `needed` bytes. Returns the header once it is whole, else None. Raises WireError."""
        if len(data) > self.needed:
            raise WireError(f"{len(data)} bytes were fed to a frame that needs {self.needed}; feed no more than that")
        self._buffer += data
        if self._length is None and len(self._buffer) >= PREFIX.size:
            self._length, self._checksum = self._parse_prefix()
        if self._length is None or self.needed:
            return None
        body = bytes(self._buffer[PREFIX.size :])
        if xxhash.xxh3_64_intdigest(body) != self._checksum:
            raise WireError("a message of the peer failed its checksum: it was damaged on its way")
        return _parse_object(body)

    def _parse_prefix(self) -> tuple[int, int]:
        """Length and checksum of the header."""
        magic, version, kind, length, checksum = PREFIX.unpack_from(self._buffer)
        if magic != MAGIC:
            raise WireError(f"the peer does not speak tenplexrun's store protocol (it began with {bytes(magic)!r})")
        if version != VERSION:
            raise WireError(f"the peer speaks store protocol {version}, not {VERSION}: run one release everywhere")
        if kind != self._kind:
            raise WireError(f"a frame of kind {kind} came where kind {self._kind} was due")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise WireError(f"a header of {length} bytes is outside the limits (1 to {MAX_HEADER_BYTES})")
        return int(length), int(checksum)


def encode_request(token: str, request: Request) -> bytes:
    """The frame that asks `request`. Raises WireError if it is over the limits."""
    if isinstance(request, Read):
        regions = [[fqn, region.to_json()] for fqn, region in request.regions]
        body: Record = {"op": "read", "snapshot": request.snapshot.to_json(), "regions": regions}
    elif isinstance(request, Describe):
        body = {"op": "describe", "snapshot": request.snapshot.to_json()}
    else:
        body = {"op": "layout", "digest": request.digest}
    return _frame(REQUEST, {"token": token, **body})


def parse_request(header: Mapping[str, Any]) -> tuple[str, Request]:
    """(token, request) of a request's header. The token is not judged here. Raises WireError."""
    try:
        token, op = records.text(header.get("token"), "a token"), records.text(header.get("op"), "an op")
        if op == "read":
            return token, Read(SnapshotId.from_json(header.get("snapshot")), _regions(header.get("regions")))
        if op == "describe":
            return token, Describe(SnapshotId.from_json(header.get("snapshot")))
        if op == "layout":
            return token, GetLayout(records.text(header.get("digest"), "a digest"))
    except LayoutError as error:
        raise WireError(f"malformed request: {error}") from error
    raise WireError(f"unknown op {op[:100]!r}: run one release everywhere")


def encode_answer(ok: Mapping[str, Any]) -> bytes:
    return _frame(ANSWER, {"ok": dict(ok)})


def encode_error(error: BaseException) -> bytes:
    return _frame(ANSWER, {"error": to_wire(error)})


def parse_answer(header: Mapping[str, Any]) -> Record:
    """What the peer answered. Raises the error it reported, or WireError on nonsense."""
    if "error" in header:
        raise from_wire(header["error"])
    ok = header.get("ok")
    if not isinstance(ok, dict):
        raise WireError("an answer needs 'ok' or 'error'")
    return ok


def parse_read_answer(ok: Mapping[str, Any], wanted: Sequence[tuple[int, str]]) -> None:
    """Check that the stream that follows is the one wanted: (num_bytes, dtype) a region. Raises WireError."""
    regions = ok.get("regions")
    if not isinstance(regions, list) or len(regions) != len(wanted):
        raise WireError(f"{len(wanted)} regions were asked for, the answer describes others")
    for given, (num_bytes, dtype) in zip(regions, wanted, strict=True):
        if given != [num_bytes, dtype]:
            raise WireError(f"the peer offers {str(given)[:100]} where [{num_bytes}, {dtype!r}] is needed")


def _frame(kind: int, header: Record) -> bytes:
    body = json.dumps(header, separators=(",", ":")).encode()
    if len(body) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(body)} bytes is over the limit of {MAX_HEADER_BYTES}: ask for less at once")
    return PREFIX.pack(MAGIC, VERSION, kind, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _parse_object(body: bytes) -> Record:
    try:
        header = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is not JSON: {type(error).__name__}") from error
    if not isinstance(header, dict):
        raise WireError("the header is not a JSON object")
    return header


def _regions(value: object) -> tuple[tuple[str, Region], ...]:
    items = records.items(value, "regions")
    if len(items) > MAX_REGIONS:
        raise WireError(f"{len(items)} regions in one request are over the limit of {MAX_REGIONS}")
    regions = []
    for item in items:
        pair = records.items(item, "a region to read")
        if len(pair) != 2:
            raise WireError("a region is asked for as [fqn, [offsets, lengths]]")
        regions.append((records.text(pair[0], "an fqn"), Region.from_json(pair[1])))
    return tuple(regions)
