"""What a store gives to other nodes' stores: regions of its snapshots, and layouts. See `wire` for the protocol.

A thread a connection. Whole runs of a file go out by sendfile, anything else is gathered in bounded blocks. The first
byte of a connection tells our protocol from HTTP, which `web` answers.
"""

from __future__ import annotations

import hmac
import logging
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import xxhash

from tenplexrun.core.pieces import Piece
from tenplexrun.core.regions import Region
from tenplexrun.errors import StoreError, TenplexError, WireError
from tenplexrun.store import reading, wire
from tenplexrun.store.arena import Arena
from tenplexrun.store.files import MappedFile
from tenplexrun.store.shelf import Shelf
from tenplexrun.store.sockets import Outbox, receive_frame, tune
from tenplexrun.store.web import Counters, Web

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64


class PeerServer:
    """Serves peers from daemon threads, for as long as the process lives or until `close`."""

    def __init__(
        self,
        arena: Arena,
        token: bytes,
        timeout_s: float = 30.0,
        counters: Counters | None = None,
        tls: ssl.SSLContext | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self._arena, self._token, self._timeout_s, self._tls = arena, token, timeout_s, tls
        self._shelf = shelf
        self._counters = counters or Counters()
        self._web = Web(arena, token, timeout_s, self._counters)
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener: socket.socket | None = None

    def start(self, host: str, port: int = 0) -> int:
        """Listen on `host` alone; port 0 is one of the system's choice. Returns the port. Raises StoreError."""
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise StoreError(f"the store cannot listen on {host}: {error}; give an address of this node") from error
        threading.Thread(target=self._accept, args=(self._listener,), name="peers", daemon=True).start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="peer", daemon=True).start()
            else:
                sock.close()

    def _serve(self, plain: socket.socket) -> None:
        try:
            tune(plain, self._timeout_s)
            with self._tls.wrap_socket(plain, server_side=True) if self._tls else plain as sock:
                first = sock.recv(1)
                if first == wire.MAGIC[:1]:
                    while self._answer_next(sock, first):
                        first = b""
                elif first:
                    self._web.serve(sock, first)
        except (TenplexError, OSError) as error:
            log.info("a peer's connection ended: %s", error)
        finally:
            self._places.release()

    def _answer_next(self, sock: socket.socket, first: bytes) -> bool:
        """Answer one request, of which `first` has been read. False at the connection's end, or after
        nonsense or a wrong token."""
        try:
            header = receive_frame(sock, wire.REQUEST, self._timeout_s, first)
            if header is None:
                return False
            token, request = wire.parse_request(header)
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
                raise WireError("the token is not that of this run; start all nodes with the same secret")
        except WireError as error:
            sock.sendall(wire.encode_error(error))
            return False
        try:
            self._answer(sock, request)
        except TenplexError as error:
            sock.sendall(wire.encode_error(error))
        return True

    def _answer(self, sock: socket.socket, request: wire.Request) -> None:
        if isinstance(request, wire.Read):
            self._send_regions(sock, request)
        elif isinstance(request, wire.Describe):
            described = replace(self._arena.get(request.snapshot), pieces=())
            sock.sendall(wire.encode_answer({"index": described.to_json()}))
        else:
            layout = self._arena.layout(request.digest)
            if layout is None:
                raise StoreError(f"layout {request.digest} is not in this store; ask another node")
            sock.sendall(wire.encode_answer({"layout": layout.to_json()}))

    def _send_regions(self, sock: socket.socket, request: wire.Read) -> None:
        """Errors leave before the first byte of the stream does; what fails later ends the connection."""
        if self._shelf is not None and self._shelf.holds(request.snapshot):
            by_fqn, files = self._shelf.take(request.snapshot, request.regions)
        else:
            by_fqn, files = reading.by_name(self._arena.get(request.snapshot).pieces), {}
        jobs = [(region, _holding(fqn, region, by_fqn)) for fqn, region in request.regions]
        described = [[region.num_elements * reading.item_bytes(pieces[0]), pieces[0].dtype] for region, pieces in jobs]
        for name in {piece.file for _, pieces in jobs for piece in pieces}.difference(files):
            files[name] = self._arena.file(name)
        out = Outbox(sock)
        out.put(wire.encode_answer({"regions": described}))
        try:
            for region, pieces in jobs:
                _send_region(out, region, pieces, files)
                self._counters.sent(region.num_elements * reading.item_bytes(pieces[0]))
            out.flush()
        except (TenplexError, ValueError) as error:
            raise OSError(f"cannot go on with the stream: {error}") from error


def _send_region(out: Outbox, region: Region, pieces: Sequence[Piece], files: Mapping[str, MappedFile]) -> None:
    """The region's bytes and their checksum."""
    start = reading.run_of(region, pieces)
    if start is None:
        digest = xxhash.xxh3_64()
        for block in reading.blocks(region, pieces, files):
            digest.update(block)
            out.put(block)
        checksum = digest.intdigest()
    else:
        piece, num_bytes = pieces[0], region.num_elements * reading.item_bytes(pieces[0])
        out.put_run(files[piece.file], start, num_bytes)
        # a whole piece keeps the checksum of its sealing, so it is proved from memory to memory
        run = files[piece.file].view[start : start + num_bytes]
        checksum = piece.checksum if region == piece.region else xxhash.xxh3_64_intdigest(run)
    out.put(wire.CHECKSUM.pack(checksum))


def _holding(fqn: str, region: Region, by_fqn: Mapping[str, Sequence[Piece]]) -> list[Piece]:
    """See `reading.holding`. Raises LayoutError on a gap."""
    if region.is_empty:
        raise WireError(f"an empty region of {fqn} was asked for: there is nothing to send")
    return reading.holding(region, by_fqn.get(fqn, ()))
