"""The port that serves other nodes' stores, and what they may be sent by it: nonsense, and people without the token."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tenplexrun.errors import StateLostError, StoreError, WireError
from tenplexrun.store import wire
from tenplexrun.store.peers import PeerServer
from tenplexrun.store.sockets import receive_frame
from tenplexrun.store.transfer import Peers

from .test_store_transfer import LAYOUT, ONE, TOKEN, WHOLE, Nodes, nodes

__all__ = ["nodes"]  # a fixture


@contextlib.contextmanager
def source_that_sends(reply: bytes) -> Iterator[str]:
    """A peer that answers the first request of each connection with `reply` and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock, contextlib.suppress(WireError):
                        receive_frame(sock, wire.REQUEST, 5.0)
                        sock.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


OFFER = wire.encode_answer({"regions": [[8, "int64"]]})


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        wire.encode_answer({}),
        wire.encode_answer({"regions": []}),
        wire.encode_answer({"regions": [[9, "int64"]]}),
        OFFER,
        OFFER + b"1234",
        OFFER + b"12345678",
        OFFER + b"1234567812345678",
        OFFER[:-1],
        wire.encode_error(StateLostError("gone")),
    ],
)
def test_nonsense_from_a_source_is_one_error(nodes: Nodes, reply: bytes) -> None:
    joiner = nodes.add("c")
    holder = nodes.add("a")
    snapshot = holder.hold(ONE, (0,))
    joiner.hold(ONE, (0,))
    fetch = {"fqn": "count", "source": "x", "region": [[], []], "num_bytes": 8}
    with source_that_sends(reply) as address:
        with pytest.raises(WireError, match="1 of 1 regions did not arrive, the first is count"):
            joiner.pull(snapshot, WHOLE, [{**fetch, "address": address}])
        joiner.pull(snapshot, WHOLE, [{**fetch, "address": address, "alternatives": [holder.address]}])
    joiner.check(snapshot, WHOLE)


def test_wrong_token_is_refused(nodes: Nodes) -> None:
    node = nodes.add("a")
    snapshot = node.hold(ONE, (0,))
    for token in ("", "secreT", "secret2", "\u00e9", "\ud800"):
        with pytest.raises(WireError, match="token"):
            Peers(token or " ", 5.0).ask([node.address], wire.Describe(snapshot), dict)


def test_layouts_come_from_peers(nodes: Nodes) -> None:
    nodes.add("a").hold(ONE, (0,))
    empty = nodes.add("b")
    addresses = ["127.0.0.1:1", empty.address, nodes.all["a"].address]
    assert Peers(TOKEN, 5.0).layout(LAYOUT.digest, addresses) == LAYOUT
    with pytest.raises(WireError, match="not in this store"):
        Peers(TOKEN, 5.0).layout("unknown", addresses)


def test_server_outlives_nonsense(nodes: Nodes) -> None:
    node = nodes.add("a")
    snapshot = node.hold(ONE, (0,))
    host, port = node.address.split(":")
    for nonsense in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100,
        wire.PREFIX.pack(wire.MAGIC, wire.VERSION, 1, 5, 0) + b"[1,2]",
        b"T",
    ):
        # It may hang up before it is told all.
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5.0) as sock:
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    asked = {"token": TOKEN, "op": "read", "snapshot": snapshot.to_json()}
    for fqn, region in (("count", [[0], [1]]), ("rows", [[0, 0], [9999, 9]]), ("x", [[], []]), ("mask", [[3], [0]])):
        _, request = wire.parse_request({**asked, "regions": [[fqn, region]]})
        with pytest.raises(WireError, match=node.address):
            Peers(TOKEN, 5.0).ask([node.address], request, dict)
    assert Peers(TOKEN, 5.0).ask([node.address], wire.Describe(snapshot), dict)["index"]["consumed"] == 70


def test_listens_on_the_given_address_only(nodes: Nodes) -> None:
    node = nodes.add("a")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", int(node.address.split(":")[1])), 5.0)
    with pytest.raises(StoreError, match="cannot listen"):
        PeerServer(node.arena, b"t").start("192.0.2.1")
