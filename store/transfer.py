"""Pulls regions from peers' stores into a file of the arena, from all of them at once.

Each source gets up to two streams. A region that a source did not deliver whole and with the right checksum is asked
of its next holder. When all have been asked, they are asked again, for what came may have been damaged on its way; and
those that went away or stalled in mid-stream for a while longer: a store that was killed is started again by its agent.
Then the pull fails, and says what each of them did.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import xxhash

from tenplexrun.channel import split_host_port
from tenplexrun.core.layout import Layout
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import SnapshotId
from tenplexrun.errors import ArenaFullError, PeerLostError, TenplexError, WireError
from tenplexrun.store import wire
from tenplexrun.store.files import MappedFile
from tenplexrun.store.sockets import CHUNK_BYTES, failure, receive_frame, receive_into, tune

STREAMS_PER_SOURCE = 2
MAX_STREAMS = 32
BATCH_REGIONS = 4096
BATCH_BYTES = 256 << 20
CONNECT_TIMEOUT_S = 5.0
AGAIN_S = 0.2
TRIES = 3
"""So often each holder is asked, whatever it sends: bytes may be damaged on their way."""


Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Part:
    """A region of `num_bytes`, to be put at `offset`, from the first of its holders' `addresses` that delivers it."""

    fqn: str
    region: Region
    dtype: str
    num_bytes: int
    offset: int
    addresses: tuple[str, ...]


@dataclass(slots=True)
class Progress:
    """What has arrived so far; what had to come twice counts twice. `cancelled` ends the pull at its next chunk."""

    total_bytes: int
    num_bytes: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, num_bytes: int) -> None:
        """Count arrived bytes. Raises WireError once cancelled."""
        with self._lock:
            self.num_bytes += num_bytes
        if self.cancelled.is_set():
            raise WireError("the pull was cancelled")


@dataclass(frozen=True, slots=True)
class Peers:
    """How to talk to peers' stores: the run's token, the longest wait for any progress of one, and by TLS or not."""

    token: str
    timeout_s: float = 20.0
    tls: ssl.SSLContext | None = None

    def ask(self, addresses: Iterable[str], request: wire.Request, read: Callable[[Record], Answer]) -> Answer:
        """What `read` makes of the first good answer of one of `addresses`. Raises WireError with all reasons,
        PeerLostError where one of them may still answer."""
        reasons: dict[str, TenplexError] = {}
        for address in list(dict.fromkeys(addresses)) * TRIES:
            if isinstance(reasons.get(address), PeerLostError):
                continue  # whoever asks knows for how long it is worth it
            try:
                with self.connect(address) as sock:
                    return read(self.request(sock, request))
            except TenplexError as error:
                reasons[address] = error
        away = any(isinstance(error, PeerLostError) for error in reasons.values())
        raise (PeerLostError if away else WireError)(f"no peer's store could answer: {_listed(reasons)}")

    def layout(self, digest: str, addresses: Iterable[str]) -> Layout:
        """The layout of this digest. Raises WireError with all reasons."""

        def read(answer: Record) -> Layout:
            layout = Layout.from_json(answer.get("layout"))
            if layout.digest != digest:
                raise WireError(f"the layout that came is {layout.digest}, not {digest}")
            return layout

        return self.ask(addresses, wire.GetLayout(digest), read)

    def connect(self, address: str) -> socket.socket:
        """Raises PeerLostError when nothing listens there, WireError where TLS fails."""
        try:
            host, port = split_host_port(address)
            sock = socket.create_connection((host, port), min(self.timeout_s, CONNECT_TIMEOUT_S))
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_hostname=host)
            tune(sock, self.timeout_s)
        except OSError as error:
            raise failure(f"cannot reach the store at {address}", error) from error
        return sock

    def request(self, sock: socket.socket, request: wire.Request) -> Record:
        """Ask, and wait for the answer's header. Raises what the peer reported, PeerLostError when it is gone."""
        try:
            sock.sendall(wire.encode_request(self.token, request))
        except ConnectionError:
            pass  # what it said before it hung up is still to be read
        except OSError as error:
            raise failure("lost the peer while asking", error) from error
        header = receive_frame(sock, wire.ANSWER, self.timeout_s)
        if header is None:
            raise PeerLostError("the peer closed the connection without an answer")
        return wire.parse_answer(header)


class Pull:
    """One pull of `parts` of one snapshot, by up to `streams` a source. `run` it once; `cancel` from another thread.

    `patience_s`: for how long sources that went away are asked again, counted from the last region that arrived.
    """

    def __init__(
        self,
        peers: Peers,
        snapshot: SnapshotId,
        parts: Sequence[Part],
        streams: int = STREAMS_PER_SOURCE,
        patience_s: float = 0.0,
    ) -> None:
        self._peers, self._snapshot, self._parts, self._num_streams = peers, snapshot, parts, streams
        self._patience_s = patience_s
        self.away: set[str] = set()
        """Sources that could not be reached, or went away in mid-stream, when they were asked last."""
        self._open: set[socket.socket] = set()
        self.progress = Progress(sum(part.num_bytes for part in parts))
        self._checksums: dict[Part, int] = {}
        self._reasons: dict[str, str] = {}

    def run(self, into: MappedFile) -> list[int]:
        """Fetch everything into `into`; blocks. Returns the checksums in the order of the parts.

        Raises WireError, ArenaFullError when the pages of a promised file run out.
        """
        attempt, arrived, until = 0, 0, time.monotonic()
        while missing := [part for part in self._parts if part not in self._checksums]:
            sources = [self._source(part, attempt) for part in missing]
            again = any(attempt >= len(part.addresses) for part in missing)
            if None in sources or self.progress.cancelled.is_set() or (again and time.monotonic() >= until):
                first = missing[sources.index(None) if None in sources else 0]
                raise WireError(
                    f"{len(missing)} of {len(self._parts)} regions did not arrive, the first is "
                    f"{first.fqn} {first.region}: {_listed(self._reasons)}"
                )
            if again:
                self.progress.cancelled.wait(AGAIN_S)
            self._fetch(into, missing, sources)
            if not again or len(self._checksums) > arrived:
                arrived, until = len(self._checksums), time.monotonic() + self._patience_s
            attempt += 1
        return [self._checksums[part] for part in self._parts]

    def has(self, part: Part) -> bool:
        """Whether it has arrived."""
        return part in self._checksums

    def _source(self, part: Part, attempt: int) -> str | None:
        """Who is asked for it next: all holders in turn, then again those that went away; None if there are none."""
        if attempt < len(part.addresses) * TRIES:
            return part.addresses[attempt % len(part.addresses)]
        away = [address for address in part.addresses if address in self.away]
        return away[attempt % len(away)] if away else None

    def cancel(self) -> None:
        """End it with a WireError now, whatever a peer does."""
        self.progress.cancelled.set()
        for sock in [*self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _fetch(self, into: MappedFile, missing: Sequence[Part], sources: Sequence[str | None]) -> None:
        """One attempt at each part, at its source."""
        by_address: dict[str, list[Part]] = {}
        for part, source in zip(missing, sources, strict=True):
            by_address.setdefault(str(source), []).append(part)
        queues = [(address, deque(_batches(parts))) for address, parts in by_address.items()]
        with ThreadPoolExecutor(min(MAX_STREAMS, self._num_streams * len(queues)), "pull") as pool:
            streams = [
                pool.submit(self._stream, into, address, batches)
                for address, batches in queues
                for _ in range(min(self._num_streams, len(batches)))
            ]
            for stream in streams:
                stream.result()

    def _stream(self, into: MappedFile, address: str, batches: deque[list[Part]]) -> None:
        """Take batches until none is left. What fails is noted, and its parts stay missing."""
        try:
            with self._peers.connect(address) as sock:
                self._open.add(sock)
                try:
                    while not self.progress.cancelled.is_set() and (batch := _next(batches)) is not None:
                        self._receive(sock, into, address, batch)
                finally:
                    self._open.discard(sock)
        except ArenaFullError:  # no other holder can help
            self.cancel()
            raise
        except TenplexError as error:
            self._reasons[address] = str(error)
            (self.away.add if isinstance(error, PeerLostError) else self.away.discard)(address)

    def _receive(self, sock: socket.socket, into: MappedFile, address: str, batch: Sequence[Part]) -> None:
        request = wire.Read(self._snapshot, tuple((part.fqn, part.region) for part in batch))
        answer = self._peers.request(sock, request)
        wire.parse_read_answer(answer, [(part.num_bytes, part.dtype) for part in batch])
        sent, buffer = bytearray(wire.CHECKSUM.size), memoryview(bytearray(CHUNK_BYTES))
        for part in batch:
            digest, position, stop = xxhash.xxh3_64(), part.offset, part.offset + part.num_bytes
            mapped = into.mapped(position, part.num_bytes)
            while position < stop:
                block = buffer[: stop - position] if mapped is None else mapped
                for arrived in receive_into(sock, block):
                    digest.update(arrived)
                    self.progress.add(len(arrived))
                if mapped is None:
                    into.write(block, position)
                position += len(block)
            for _ in receive_into(sock, memoryview(sent)):
                pass
            if wire.CHECKSUM.unpack(sent)[0] == digest.intdigest():
                self._checksums[part] = digest.intdigest()
            else:
                self._reasons[address] = f"{part.fqn} {part.region} failed its checksum"


def _batches(parts: Sequence[Part]) -> list[list[Part]]:
    """Requests of bounded count and about equal size, as many for each stream of a source: none is left over at the
    end, for which the others would wait."""
    total = sum(part.num_bytes for part in parts)
    turns = -(-total // (STREAMS_PER_SOURCE * BATCH_BYTES))
    share = total / (STREAMS_PER_SOURCE * turns if total > CHUNK_BYTES else 1)
    batches: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        full = size + part.num_bytes / 2 > share * len(batches)
        if batches[-1] and (full or len(batches[-1]) == BATCH_REGIONS):
            batches.append([])
        batches[-1].append(part)
        size += part.num_bytes
    return batches


def _next(batches: deque[list[Part]]) -> list[Part] | None:
    try:
        return batches.popleft()
    except IndexError:  # the source's other stream took the last one
        return None


def _listed(reasons: Mapping[str, object]) -> str:
    return "; ".join(f"{address}: {reason}" for address, reason in reasons.items()) or "no holder is known"
