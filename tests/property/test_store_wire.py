"""The protocol between stores: what goes out comes in; whatever else comes in is a WireError, soon."""

import json
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import SnapshotId
from tenplexrun.errors import StateLostError, StoreError, TenplexError, WireError
from tenplexrun.store import wire

SNAPSHOT = SnapshotId(3, 12, "d" * 32)

regions = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=5).map(
    lambda spans: Region(tuple(offset for offset, _ in spans), tuple(length for _, length in spans))
)
snapshots = st.builds(SnapshotId, st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.text(min_size=1))
requests = st.one_of(
    st.builds(wire.Read, snapshots, st.lists(st.tuples(st.text(min_size=1), regions), max_size=5).map(tuple)),
    st.builds(wire.Describe, snapshots),
    st.builds(wire.GetLayout, st.text(min_size=1)),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def framed(body: bytes) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(body)
    return wire.PREFIX.pack(wire.MAGIC, wire.VERSION, wire.REQUEST, len(body), checksum) + body


def read_frame(data: bytes, kind: int, step: int = 1 << 30) -> tuple[dict[str, Any] | None, int]:
    """Feed `data` in steps. Returns the header, if it came, and how many bytes were taken."""
    reader, position = wire.FrameReader(kind), 0
    while position < len(data):
        chunk = data[position : position + min(step, reader.needed)]
        position += len(chunk)
        header = reader.feed(chunk)
        if header is not None:
            return header, position
    return None, position


@given(requests, st.text(min_size=1), st.integers(1, 50), st.binary(max_size=20))
def test_requests_come_out_as_they_went_in(request: wire.Request, token: str, step: int, behind: bytes) -> None:
    frame = wire.encode_request(token, request)
    header, taken = read_frame(frame + behind, wire.REQUEST, step)
    assert header is not None
    assert taken == len(frame), "what follows the frame belongs to the stream"
    assert wire.parse_request(header) == (token, request)


@given(st.dictionaries(st.text(), json_values), st.integers(1, 50))
def test_answers_come_out_as_they_went_in(ok: dict[str, Any], step: int) -> None:
    header, _ = read_frame(wire.encode_answer(ok), wire.ANSWER, step)
    assert header is not None
    assert json.dumps(wire.parse_answer(header)) == json.dumps(ok)


def test_errors_keep_their_class() -> None:
    header, _ = read_frame(wire.encode_error(StateLostError("gone: w")), wire.ANSWER)
    assert header is not None
    with pytest.raises(StateLostError, match="gone: w"):
        wire.parse_answer(header)


@given(st.binary(max_size=200), st.sampled_from([wire.REQUEST, wire.ANSWER]), st.integers(1, 50))
def test_any_bytes(data: bytes, kind: int, step: int) -> None:
    try:
        header, _ = read_frame(data, kind, step)
    except WireError:
        return
    assert header is None


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_header(body: bytes) -> None:
    frame = framed(body)
    try:
        header, _ = read_frame(frame, wire.REQUEST)
        if header is not None:
            wire.parse_request(header)
    except WireError:
        pass


@given(st.fixed_dictionaries({}, optional={"ok": json_values, "error": json_values}))
def test_any_answer(header: dict[str, Any]) -> None:
    try:
        wire.parse_read_answer(wire.parse_answer(header), [(8, "int64")])
    except TenplexError:
        pass


@given(requests, st.data())
def test_a_changed_byte_is_found_out(request: wire.Request, data: st.DataObject) -> None:
    frame = bytearray(wire.encode_request("t", request))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        header, _ = read_frame(bytes(frame), wire.REQUEST)
    except WireError:
        return
    assert header is None, "a greater length: the rest is waited for"


READ = {"token": "t", "op": "read", "snapshot": SNAPSHOT.to_json(), "regions": [["w", [[0], [4]]]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": ""}, "token"),
        ({"token": None}, "token"),
        ({"op": "erase"}, "unknown op"),
        ({"snapshot": {"round": True, "step": 1, "digest": "d"}}, "round"),
        ({"snapshot": None}, "snapshot"),
        ({"regions": [["w", [[0], [4, 4]]]]}, "as many offsets"),
        ({"regions": [["w", [[-1], [4]]]]}, "whole number"),
        ({"regions": [["w"]]}, "asked for as"),
        ({"regions": [["w", [[0], [1]]]] * (wire.MAX_REGIONS + 1)}, "over the limit"),
    ],
)
def test_malformed_requests(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.parse_request({**READ, **change})


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n", "does not speak"),
        (wire.PREFIX.pack(wire.MAGIC, 1, wire.REQUEST, 10, 0), "protocol 1"),
        (wire.PREFIX.pack(wire.MAGIC, wire.VERSION, wire.ANSWER, 10, 0), "kind 2"),
        (wire.PREFIX.pack(wire.MAGIC, wire.VERSION, wire.REQUEST, 0, 0), "outside the limits"),
        (wire.PREFIX.pack(wire.MAGIC, wire.VERSION, wire.REQUEST, wire.MAX_HEADER_BYTES + 1, 0), "outside the limits"),
    ],
)
def test_bad_prefix(prefix: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        read_frame(prefix, wire.REQUEST)


def test_deeply_nested_header() -> None:
    body = b"[" * 1_000_000
    frame = framed(body)
    with pytest.raises(WireError, match="not JSON"):
        read_frame(frame, wire.REQUEST)


def test_feeding_too_much_is_refused() -> None:
    with pytest.raises(WireError, match="no more than that"):
        wire.FrameReader(wire.REQUEST).feed(bytes(wire.PREFIX.size + 1))


def test_request_over_the_limit_is_not_sent() -> None:
    with pytest.raises(WireError, match="over the limit"):
        wire.encode_request("t", wire.GetLayout("x" * (wire.MAX_HEADER_BYTES + 1)))


def test_unexpected_stream_is_refused() -> None:
    for regions_offered in ([], [[8, "int64"], [8, "int64"]], [[4, "int64"]], [[8, "float64"]], "no list", [8]):
        with pytest.raises(StoreError):
            wire.parse_read_answer({"regions": regions_offered}, [(8, "int64")])
