"""What curl gets of a store, and what it is told instead."""

import io
import json
import math
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tenplexrun.core.arena import arena_map
from tenplexrun.core.dtypes import item_bytes
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Claim
from tenplexrun.store.arena import Arena
from tenplexrun.store.peers import PeerServer
from tenplexrun.store.web import Refusal, parse_region

TOKEN = "secret"
NUMPY = {
    "rows": np.float64, "columns": np.float32, "half": np.uint16, "wide": np.complex128, "mask": np.bool_,
    "count": np.int64, "empty": np.float32, "with/slash": np.uint8,
}  # fmt: skip
LAYOUT = Layout(
    (
        TensorSpec("rows", (1536, 400), "float64", (Shard(0, "tp"),)),  # more than one block
        TensorSpec("columns", (15, 11), "float32", (Shard(1, "tp"),)),
        TensorSpec("half", (33, 7), "bfloat16"),
        TensorSpec("wide", (4, 3), "complex128"),
        TensorSpec("mask", (17,), "bool"),
        TensorSpec("count", (), "int64"),
        TensorSpec("empty", (0, 3), "float32"),
        TensorSpec("with/slash", (2, 2), "float8_e4m3fn"),
    )
)


def values_of(fqn: str) -> npt.NDArray[Any]:
    shape = LAYOUT.spec(fqn).shape
    return np.arange(math.prod(shape)).astype(NUMPY[fqn]).reshape(shape)


class Site:
    def __init__(self, folder: Path) -> None:
        self.arena = Arena.open(folder)
        self.server = PeerServer(self.arena, TOKEN.encode(), timeout_s=5.0)
        self.port = self.server.start("127.0.0.1")

    def hold(self, config: ParallelConfig, ranks: tuple[int, ...], step: int = 7) -> None:
        slots = self.arena.open_round(1, LAYOUT, Claim(config, ranks))
        view = self.arena.file(slots[step % 2].name).view
        for entry in arena_map(LAYOUT, config, ranks).entries:
            data = np.ascontiguousarray(values_of(entry.fqn)[entry.region.slices]).tobytes()
            view[entry.offset : entry.offset + entry.num_bytes] = data
        self.arena.seal(1, step, step % 2, {"step": step, "consumed": 10 * step})

    def curl(self, path: str, *flags: str, token: str | None = TOKEN) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        show = ["-H", f"Authorization: Bearer {token}"] if token is not None else []
        argv = ["curl", "-sS", "-g", "-i", "--max-time", "60", *show, *flags, f"http://127.0.0.1:{self.port}{path}"]
        head, _, body = subprocess.run(argv, capture_output=True, check=True).stdout.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(status.split()[1]), headers, body


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.close()


@pytest.mark.parametrize(
    ("fqn", "region", "slices"),
    [
        ("rows", "", ()),
        ("rows", "?region=0:4,2:8", np.s_[0:4, 2:8]),
        ("rows", "?region=1000:1536", np.s_[1000:1536]),
        ("columns", "?region=:,3:9", np.s_[:, 3:9]),
        ("half", "?region=5:6", np.s_[5:6]),
        ("wide", "", ()),
        ("mask", "?region=2:", np.s_[2:]),
        ("mask", "?region=3:3", np.s_[3:3]),
        ("count", "", ()),
        ("empty", "", ()),
        ("with/slash", "", ()),
        ("with%2Fslash", "?region=:1", np.s_[:1]),
    ],
)
def test_a_region_comes_as_npy(site: Site, fqn: str, region: str, slices: Any) -> None:
    """From two pieces, put together."""
    site.hold(ParallelConfig(tp=2), (0, 1))
    status, headers, body = site.curl(f"/v1/snapshots/newest/{fqn}.npy{region}")
    name = fqn.replace("%2F", "/")
    got = np.load(io.BytesIO(body))
    assert (status, headers["x-tenplex-dtype"]) == (200, LAYOUT.spec(name).dtype)
    assert int(headers["content-length"]) == len(body)
    assert got.dtype == NUMPY[name]
    np.testing.assert_array_equal(got, values_of(name)[slices])


def test_lists_and_metrics(site: Site) -> None:
    assert site.curl("/v1/snapshots")[2] == b"[]\n"
    site.hold(ParallelConfig(tp=2), (0,), step=7)
    site.arena.commit(1, 7)
    site.hold(ParallelConfig(tp=2), (0,), step=8)
    steps = [(one["step"], one["committed"]) for one in json.loads(site.curl("/v1/snapshots")[2])]
    assert steps == [(7, True), (8, False)]
    newest, eighth = (json.loads(site.curl(f"/v1/snapshots/{name}")[2]) for name in ("newest", "8"))
    assert (newest["step"], newest["consumed"], eighth["values"]["step"]) == (7, 70, 8)
    assert {"fqn": "columns", "shape": [15, 11], "dtype": "float32", "held": ["[0:15, 0:6]"]} in newest["tensors"]
    site.curl("/v1/snapshots/8/half.npy")
    status, headers, body = site.curl("/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    values = dict(line.split() for line in body.decode().splitlines() if not line.startswith("#"))
    assert values["tenplex_store_committed_step"] == "7"
    assert not any(name.startswith("tenplex_round") for name in values), "no agent has said anything"
    assert values["tenplex_store_sealed_samples"] == "80"
    assert int(values["tenplex_store_sent_bytes_total"]) == 33 * 7 * item_bytes("bfloat16")


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/", 404, "/v1/snapshots"),
        ("/v1/snapshots/6", 404, "it has those of steps: 7"),
        ("/v1/snapshots/newest/rows", 404, ".npy"),
        ("/v1/snapshots/newest/nobody.npy", 404, "no tensor 'nobody'"),
        ("/v1/snapshots/newest/rows.npy?region=0:4,2:8,0:1", 416, "shape [1536, 400]"),
        ("/v1/snapshots/newest/rows.npy?region=0:1537", 416, "0:1537 does not lie"),
        ("/v1/snapshots/newest/rows.npy?region=4:2", 416, "4:2"),
        ("/v1/snapshots/newest/rows.npy?region=-1:2", 400, "START:STOP"),
        ("/v1/snapshots/newest/rows.npy?region=4", 400, "START:STOP"),
        ("/v1/snapshots/newest/rows.npy?part=4", 400, "the only option"),
        ("/v1/snapshots/newest/rows.npy?region", 400, "not a URL"),
        ("/v1/snapshots/newest/%ff.npy", 400, "not a URL"),
        ("/v1/snapshots/newest/rows.npy?region=700:800", 409, "not [768:800, 0:400]: ranks 1 have it"),
    ],
)
def test_refusals_are_in_words(site: Site, path: str, status: int, words: str) -> None:
    site.hold(ParallelConfig(tp=2), (0,))
    got = site.curl(path)
    assert (got[0], words in got[2].decode()) == (status, True), got


def test_token_and_method(site: Site) -> None:
    site.hold(ParallelConfig(), (0,))
    for token in (None, "", "secreT", "secret2"):
        for path in ("/metrics", "/v1/snapshots/newest/half.npy", "/nowhere"):
            assert site.curl(path, token=token)[0] == 401
    assert site.curl("/v1/snapshots", "-X", "DELETE")[0] == 405
    status, headers, body = site.curl("/v1/snapshots/newest/half.npy", "-I")
    assert (status, int(headers["content-length"]) > 33 * 7 * 2, body) == (200, True, b"")


def test_a_corrupt_copy_is_not_shown(site: Site) -> None:
    site.hold(ParallelConfig(), (0,))
    piece = next(piece for piece in site.arena.snapshots()[0].pieces if piece.fqn == "half")
    site.arena.file(piece.file).view[piece.offset] ^= 1
    status, _, body = site.curl("/v1/snapshots/newest/half.npy?region=9:10")
    assert (status, b"failed its checksum" in body) == (500, True)


def test_a_snapshot_that_is_dropped_meanwhile_ends_short(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.hold(ParallelConfig(), (0,))
    with socket.create_connection(("127.0.0.1", site.port), 30.0) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET /v1/snapshots/newest/rows.npy HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        answers = site.server._web._answer
        monkeypatch.setattr(site.server._web, "_answer", lambda event: _and_drop(answers(event), site))
        sock.sendall(request.encode())
        whole = b""
        while data := sock.recv(1 << 16):
            whole += data
    assert b"200" in whole[:20]
    assert len(whole) < 1536 * 400 * 8


def _and_drop(answer: Any, site: Site) -> Any:
    site.arena.commit(2, 1)
    return answer


def test_any_bytes_are_answered_or_hung_up_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    escaped: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    site.hold(ParallelConfig(), (0,))
    rng = random.Random(1)
    good = f"GET /v1/snapshots/newest/rows.npy?region=0:1 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nHost: x\r\n\r\n"
    tries = [bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200))) for _ in range(60)]
    for _ in range(60):  # a request with some bytes changed
        data = bytearray(good.encode())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        tries.append(bytes(data))
    tries += [
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10000,
        b"A" * 100000,
        b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\n",
    ]
    for data in tries:
        with socket.create_connection(("127.0.0.1", site.port), 30.0) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except OSError:  # it may hang up before it is told all
                pass
    assert site.curl("/v1/snapshots")[0] == 200
    assert escaped == []


def test_regions_in_words() -> None:
    assert parse_region("", (4, 3)) == Region((0, 0), (4, 3))
    assert parse_region("1:", (4, 3)) == Region((1, 0), (3, 3))
    assert parse_region(":2,1:1", (4, 3)) == Region((0, 1), (2, 0))
    assert parse_region("", ()) == Region((), ())
    for text in ("1:2:1", "a:b", "١:٢", " 1:2", "1:2,", ",", "9" * 30 + ":"):
        with pytest.raises(Refusal):
            parse_region(text, (4, 3))
