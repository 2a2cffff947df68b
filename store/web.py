"""What people and their tools may ask of a store over HTTP, on the port that serves its peers.

    GET /v1/snapshots                          what this node holds, as JSON, the newest last
    GET /v1/snapshots/STEP|newest              one of them: its tensors, and the regions held here
    GET /v1/snapshots/STEP|newest/FQN.npy      a tensor; ?region=0:4,2:8 for a part of it (dims left out are whole)
    GET /metrics                               for Prometheus

"newest" is the newest committed one, else the newest sealed. Each request needs `Authorization: Bearer TOKEN`.
Elements of types that numpy lacks come as unsigned integers of their size (bfloat16 as uint16); the header
`X-Tenplex-Dtype` has the name. A snapshot that is dropped in mid-answer ends the connection short of its length.
"""

from __future__ import annotations

import hmac
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

import h11
import numpy as np

from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout
from tenplexrun.core.metrics import Metric, exposition
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.snapshots import Claim
from tenplexrun.errors import TenplexError
from tenplexrun.store import reading
from tenplexrun.store.arena import Arena, checksum_of
from tenplexrun.store.files import MappedFile

MAX_HEAD_BYTES = 16 << 10
RECV_BYTES = 16 << 10
_BOUND = re.compile(r"(\d{0,18}):(\d{0,18})", re.ASCII)


@dataclass(slots=True)
class Counters:
    """Bytes of tensors that have crossed the network, since the process began."""

    sent_bytes: int = 0
    received_bytes: int = 0
    agents: str = ""  # the agent's metrics, served with ours
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def sent(self, num_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += num_bytes

    def received(self, num_bytes: int) -> None:
        with self._lock:
            self.received_bytes += num_bytes


class Refusal(Exception):
    """An answer other than 200, with its reason in words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is taken only where it is sent; together it has `num_bytes`."""

    kind: str
    num_bytes: int
    body: Iterable[bytes | memoryview]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def text(cls, text: str, kind: str = "text/plain; charset=utf-8", status: int = 200) -> Answer:
        body = text.encode()
        return cls(kind, len(body), [body], status)

    @classmethod
    def json(cls, record: object) -> Answer:
        return cls.text(json.dumps(record, indent=1) + "\n", "application/json")


class Web:
    """Answers one request a connection."""

    def __init__(self, arena: Arena, token: bytes, timeout_s: float, counters: Counters) -> None:
        self._arena, self._token, self._timeout_s, self._counters = arena, token, timeout_s, counters

    def serve(self, sock: socket.socket, first: bytes) -> None:
        """Answer the request that begins with `first`. Raises OSError when the peer goes away, or is too slow."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        head = False
        try:
            request = _request(http, sock, first, time.monotonic() + self._timeout_s)
            if request is None:
                return
            head = request.method == b"HEAD"
            answer = self._answer(request)
        except h11.RemoteProtocolError as error:
            answer = Answer.text(f"not HTTP: {error}\n", status=400)
        except Refusal as refusal:
            answer = Answer.text(f"{refusal}\n", status=refusal.status)
        except TenplexError as error:
            answer = Answer.text(f"{error}\n", status=500)
        _send(http, sock, answer, head)

    def _answer(self, request: h11.Request) -> Answer:
        if request.method not in (b"GET", b"HEAD"):
            raise Refusal(405, "this is for reading: use GET")
        given = next((value for name, value in request.headers if name == b"authorization"), b"")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise Refusal(401, "this run's token is missing or wrong: send 'Authorization: Bearer TOKEN'")
        try:
            url = urlsplit(request.target.decode("ascii"))
            path = [unquote(part, errors="strict") for part in url.path.split("/")[1:]]
            options = parse_qs(url.query, keep_blank_values=True, strict_parsing=bool(url.query), errors="strict")
        except ValueError:
            raise Refusal(400, "this is not a URL of this store: see /v1/snapshots") from None
        if path == ["metrics"]:
            return Answer.text(self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
        if path[:2] == ["v1", "snapshots"]:
            if len(path) == 2:
                return Answer.json([_summary(index) for index in self._arena.snapshots()])
            index = self._find(path[2])
            layout = self._arena.known_layout(index.snapshot.digest)
            if len(path) == 3:
                return Answer.json(_contents(index, layout))
            name = "/".join(path[3:])
            if name.endswith(".npy"):
                return self._tensor(index, layout, name.removesuffix(".npy"), options)
        raise Refusal(404, "there are /v1/snapshots, /v1/snapshots/STEP|newest, …/FQN.npy and /metrics")

    def _find(self, name: str) -> Index:
        known = self._arena.snapshots()
        if name == "newest" and known:
            return next((index for index in reversed(known) if index.committed), known[-1])
        found = [index for index in known if str(index.snapshot.step) == name]
        if not found:
            steps = ", ".join(str(index.snapshot.step) for index in known) or "none"
            raise Refusal(404, f"there is no snapshot {name!r} on this node; it has those of steps: {steps}")
        return found[-1]

    def _tensor(self, index: Index, layout: Layout, fqn: str, options: dict[str, list[str]]) -> Answer:
        spec = next((spec for spec in layout.tensors if spec.fqn == fqn), None)
        if spec is None:
            raise Refusal(404, f"step {index.snapshot.step} has no tensor {fqn!r}; /v1/snapshots/STEP lists them")
        if set(options) - {"region"}:
            raise Refusal(400, "the only option is region=START:STOP,…")
        region = parse_region(options.get("region", [""])[-1], spec.shape)
        held = reading.by_name(index.pieces).get(fqn, [])
        missing = subtract(region, [piece.region for piece in held])
        if missing and not region.is_empty:
            raise Refusal(409, _elsewhere(index, layout, fqn, missing, [piece.region for piece in held]))
        header = _npy_header(spec.dtype, region.lengths)
        num_bytes = len(header) + region.num_elements * item_bytes(spec.dtype)
        pieces = [] if region.is_empty else reading.holding(region, held)
        files = {piece.file: self._arena.file(piece.file) for piece in pieces}
        for piece in pieces:
            if checksum_of(files[piece.file].view, piece) != piece.checksum:
                raise Refusal(500, f"the copy of {fqn} {piece.region} on this node failed its checksum")
        body = self._body(index, header, region, pieces, files)
        return Answer("application/octet-stream", num_bytes, body, headers=(("X-Tenplex-Dtype", spec.dtype),))

    def _body(
        self, index: Index, header: bytes, region: Region, pieces: Sequence[Piece], files: Mapping[str, MappedFile]
    ) -> Iterable[bytes | memoryview]:
        yield header
        for block in reading.blocks(region, pieces, files) if pieces else ():
            if not self._arena.has(index.snapshot):  # its slot may be written over from now on
                raise OSError(f"the snapshot of {index.snapshot} was dropped")
            yield block
            self._counters.sent(len(block))

    def _metrics(self) -> str:
        known = self._arena.snapshots()
        committed = [index for index in known if index.committed]
        slots = self._arena.sizes()
        found: list[Metric] = [
            ("sent_bytes_total", "counter", "Bytes of tensors sent to others.", self._counters.sent_bytes),
            ("received_bytes_total", "counter", "Bytes of tensors fetched.", self._counters.received_bytes),
            ("snapshots", "gauge", "Snapshots held here.", len(known)),
            ("slot_bytes", "gauge", "Size of one of the two slots of the round.", sum(slots.values())),
        ]
        for name, some in (("sealed", known), ("committed", committed)):
            if some:
                newest = some[-1]
                found += [
                    (f"{name}_step", "gauge", f"Step of the newest {name} snapshot.", newest.snapshot.step),
                    (f"{name}_samples", "gauge", f"Samples consumed up to the newest {name} one.", newest.consumed),
                ]
        return exposition("tenplex_store", found) + self._counters.agents


def parse_region(text: str, shape: Sequence[int]) -> Region:
    """ "0:4,2:8" of a tensor of this shape; bounds and dims that are left out are whole. Raises Refusal."""
    bounds = text.split(",") if text else []
    if len(bounds) > len(shape):
        raise Refusal(416, f"a region of {len(bounds)} dims was asked of a tensor of shape {list(shape)}")
    offsets, lengths = [], []
    for bound, size in zip([*bounds, *[":"] * (len(shape) - len(bounds))], shape, strict=True):
        found = _BOUND.fullmatch(bound)
        if found is None:
            raise Refusal(400, f"a region is START:STOP for each dim, as in region=0:4,2:8; got {bound[:100]!r}")
        start, stop = int(found[1] or 0), int(found[2] or size)
        if not start <= stop <= size:
            raise Refusal(416, f"{bound} does not lie in a tensor of shape {list(shape)}")
        offsets.append(start)
        lengths.append(stop - start)
    return Region(tuple(offsets), tuple(lengths))


def _request(http: h11.Connection, sock: socket.socket, first: bytes, deadline: float) -> h11.Request | None:
    """None where the peer ended before. Raises h11.RemoteProtocolError, OSError."""
    data = first
    while True:
        http.receive_data(data)
        event = http.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        if time.monotonic() > deadline:
            raise TimeoutError("the request did not become whole in time")
        data = sock.recv(RECV_BYTES)


def _send(http: h11.Connection, sock: socket.socket, answer: Answer, head: bool) -> None:
    headers = [("Content-Type", answer.kind), ("Content-Length", str(answer.num_bytes)), ("Connection", "close")]
    if answer.status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    headers += answer.headers
    sock.sendall(http.send(h11.Response(status_code=answer.status, headers=headers)) or b"")
    if not head:
        for block in answer.body:
            sock.sendall(block)
    sock.shutdown(socket.SHUT_WR)


def _summary(index: Index) -> dict[str, object]:
    return {**index.snapshot.to_json(), "committed": index.committed, "consumed": index.consumed}


def _contents(index: Index, layout: Layout) -> dict[str, object]:
    held = reading.by_name(index.pieces)
    tensors = [
        {
            "fqn": spec.fqn,
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "held": [str(piece.region) for piece in held.get(spec.fqn, ())],
        }
        for spec in layout.tensors
    ]
    return {**_summary(index), "values": index.values, "tensors": tensors}


def _elsewhere(index: Index, layout: Layout, fqn: str, missing: Sequence[Region], held: Sequence[Region]) -> str:
    """What this node lacks, and which ranks of the round have it."""
    ranks = set()
    for config in {claim.config for claim in index.claims if isinstance(claim, Claim)}:
        for rank in range(config.world_size):
            regions = layout.regions_of(config, rank).get(fqn, ())
            if any(region.intersect(gap) for region in regions for gap in missing):
                ranks.add(rank)
    have = ", ".join(map(str, held)) or "nothing"
    gaps = ", ".join(map(str, missing[:5])) + (" …" if len(missing) > 5 else "")
    where = f"ranks {', '.join(map(str, sorted(ranks)))} have it" if ranks else "other nodes may have it"
    return f"of {fqn} this node has {have}, not {gaps}: {where} ('tenplexctl status' shows each node's store)"


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The head of a .npy file. numpy's own name of the type, else unsigned integers of its size."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(f"u{item_bytes(dtype)}")
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    )
    return head.getvalue()
