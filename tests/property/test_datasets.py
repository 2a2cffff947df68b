"""Pieces of files, and lines, against plain bytes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from tenplexrun.datasets import dataset, files, remote
from tenplexrun.datasets.dataset import Dataset, Piece, Pieces
from tenplexrun.formats import open_dataset

quiet = examples(40)


@quiet
@given(st.lists(st.tuples(st.binary(max_size=20), st.integers(0, 5)), min_size=1, max_size=6), st.data())
def test_samples_over_pieces(contents: list[tuple[bytes, int]], data: st.DataObject) -> None:
    """`stride` bytes from sample to sample, which may overlap; each file's first bytes are left out."""
    with tempfile.TemporaryDirectory() as folder:
        pieces, whole = [], b""
        for number, (content, skip) in enumerate(contents):
            path = Path(folder, str(number))
            path.write_bytes(content)
            skip = min(skip, len(content))
            pieces.append(Piece(str(path), skip, len(content) - skip))
            whole += content[skip:]
        size = data.draw(st.integers(1, 7))
        stride = data.draw(st.integers(1, 9))
        samples = [whole[start : start + size] for start in range(0, len(whole) - size + 1, stride)]
        found = Dataset("x", len(samples), "|u1", (size,), Pieces(pieces), stride)
        assert [found.raw(number) for number in range(len(samples))] == samples
        assert [sample.tobytes() for sample in found] == samples
        assert found.gather(np.arange(len(samples))).tobytes() == b"".join(samples)
        end_to_end = b"".join(samples)
        first = data.draw(st.integers(0, len(end_to_end)))
        last = data.draw(st.integers(first, len(end_to_end)))
        assert found.read(first, last - first) == end_to_end[first:last]


@quiet
@given(st.lists(st.sampled_from([b"1", b"[2, 3]", b"\n", b"\r\n", b"\n\n", b'"\\n"']), max_size=30), st.integers(1, 9))
def test_lines(parts: list[bytes], block_bytes: int) -> None:
    text = b"\n".join([*parts, b"[]"])
    with tempfile.TemporaryDirectory() as folder, patch.object(files, "SCAN_BYTES", block_bytes):
        Path(folder, "x.jsonl").write_bytes(text)
        lines = [line.removesuffix(b"\r") for line in text.split(b"\n")]
        for path in (f"{folder}/x.jsonl", f"file://{folder}/x.jsonl"):
            assert list(open_dataset(f"jsonl:{path}")) == [json.loads(line) for line in lines if line]


@quiet
@given(st.data())
def test_many_parts_of_remote_files(data: st.DataObject) -> None:
    contents = data.draw(st.lists(st.binary(max_size=30), min_size=1, max_size=4))
    whole = b"".join(contents)
    place = st.integers(0, len(whole))
    spans = data.draw(st.lists(st.tuples(place, place).map(sorted).map(tuple), max_size=12))
    gap, part = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 9))
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(remote, "PART_BYTES", part),
        patch.object(dataset, "_MAX_GAP", gap),
    ):
        for number, content in enumerate(contents):
            Path(folder, str(number)).write_bytes(content)
        pieces = Pieces([Piece(f"file://{folder}/{number}", 0, len(each)) for number, each in enumerate(contents)])
        assert pieces.read_many(spans) == [whole[begin:end] for begin, end in spans]
