"""What a store gives to other nodes' stores: regions of its snapshots, and layouts. See `wire` for the protocol.

A thread a connection. Whole runs of a file go out by sendfile, anything else is gathered in bounded blocks.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tenplexrun.core.pieces import Piece, copies, row_blocks, run_start
from tenplexrun.core.regions import Region
from tenplexrun.errors import StoreError, TenplexError, WireError
from tenplexrun.store import wire
from tenplexrun.store.arena import Arena
from tenplexrun.store.files import MappedFile
from tenplexrun.store.sockets import CHUNK_BYTES, Outbox, receive_frame, tune

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
ITEMS: dict[int, str] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""numpy types that carry an element's bits, by size: torch has types that numpy lacks."""


class PeerServer:
    """Serves peers from daemon threads, for as long as the process lives or until `close`."""

    def __init__(self, arena: Arena, token: bytes, timeout_s: float = 30.0) -> None:
        self._arena, self._token, self._timeout_s = arena, token, timeout_s
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

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                tune(sock, self._timeout_s)
                while self._answer_next(sock):
                    pass
        except (TenplexError, OSError) as error:
            log.info("a peer's connection ended: %s", error)
        finally:
            self._places.release()

    def _answer_next(self, sock: socket.socket) -> bool:
        """Answer one request. Returns False at the connection's end; nonsense or a wrong token end it too."""
        try:
            header = receive_frame(sock, wire.REQUEST, self._timeout_s)
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
            described = replace(self._arena.get(request.snapshot), claims=(), pieces=())
            sock.sendall(wire.encode_answer({"index": described.to_json()}))
        else:
            layout = self._arena.layout(request.digest)
            if layout is None:
                raise StoreError(f"layout {request.digest} is not in this store; ask another node")
            sock.sendall(wire.encode_answer({"layout": layout.to_json()}))

    def _send_regions(self, sock: socket.socket, request: wire.Read) -> None:
        """Errors leave before the first byte of the stream does; what fails later ends the connection."""
        by_fqn: dict[str, list[Piece]] = {}
        for piece in self._arena.get(request.snapshot).pieces:
            by_fqn.setdefault(piece.fqn, []).append(piece)
        jobs = [(region, _holding(fqn, region, by_fqn)) for fqn, region in request.regions]
        described = [[region.num_elements * _item_bytes(pieces[0]), pieces[0].dtype] for region, pieces in jobs]
        files = {name: self._arena.file(name) for name in {piece.file for _, pieces in jobs for piece in pieces}}
        out = Outbox(sock)
        out.put(wire.encode_answer({"regions": described}))
        try:
            for region, pieces in jobs:
                _send_region(out, region, pieces, files)
            out.flush()
        except (TenplexError, ValueError) as error:
            raise OSError(f"cannot go on with the stream: {error}") from error


def _send_region(out: Outbox, region: Region, pieces: Sequence[Piece], files: Mapping[str, MappedFile]) -> None:
    """The region's bytes and their checksum."""
    piece, item = pieces[0], _item_bytes(pieces[0])
    start = run_start(region.relative_to(piece.region), piece.region.lengths) if len(pieces) == 1 else None
    if start is None:
        checksum = _gather(out, region, pieces, files)
    else:
        file, begin, num_bytes = files[piece.file], piece.offset + start * item, region.num_elements * item
        out.put_run(file, begin, num_bytes)
        # a whole piece keeps the checksum of its sealing, so it is proved from memory to memory
        run = file.view[begin : begin + num_bytes]
        checksum = piece.checksum if region == piece.region else xxhash.xxh3_64_intdigest(run)
    out.put(wire.CHECKSUM.pack(checksum))


def _gather(out: Outbox, region: Region, pieces: Sequence[Piece], files: Mapping[str, MappedFile]) -> int:
    """Send `region` from the pieces that hold its parts, block by block. Returns its checksum."""
    item = _item_bytes(pieces[0])
    arrays = {piece: _array(piece, files[piece.file].view) for piece in pieces}
    digest = xxhash.xxh3_64()
    for block in row_blocks(region, CHUNK_BYTES // item):
        values = np.empty(block.lengths, ITEMS[item])
        for copy in copies(block, pieces):
            values[copy.dest.slices] = arrays[copy.piece][copy.source.slices]
        data = values.reshape(-1).view(np.uint8).data
        digest.update(data)
        out.put(data)
    return digest.intdigest()


def _array(piece: Piece, view: memoryview) -> npt.NDArray[Any]:
    """The elements of a piece in its file, shaped like its region."""
    flat = np.frombuffer(view, ITEMS[_item_bytes(piece)], piece.region.num_elements, piece.offset)
    return flat.reshape(piece.region.lengths)


def _holding(fqn: str, region: Region, by_fqn: Mapping[str, Sequence[Piece]]) -> list[Piece]:
    """The pieces that `region` can be put together from, one if one will do. Raises LayoutError on a gap."""
    if region.is_empty:
        raise WireError(f"an empty region of {fqn} was asked for: there is nothing to send")
    held = by_fqn.get(fqn, ())
    whole = [piece for piece in held if piece.region.contains(region)]
    if whole:
        return [next((piece for piece in whole if piece.region == region), whole[0])]
    return list(dict.fromkeys(copy.piece for copy in copies(region, held)))


def _item_bytes(piece: Piece) -> int:
    return piece.num_bytes // piece.region.num_elements
