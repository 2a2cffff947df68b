"""Pieces of files, and lines, against plain bytes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplexrun.datasets.dataset import Dataset, Piece, Pieces
from tenplexrun.datasets.records import open_jsonl

quiet = settings(deadline=None, max_examples=40)


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
        dataset = Dataset("x", len(samples), "|u1", (size,), Pieces(pieces), stride)
        assert [dataset.raw(number) for number in range(len(samples))] == samples
        assert [sample.tobytes() for sample in dataset] == samples
        assert dataset.gather(np.arange(len(samples))).tobytes() == b"".join(samples)
        end_to_end = b"".join(samples)
        first = data.draw(st.integers(0, len(end_to_end)))
        last = data.draw(st.integers(first, len(end_to_end)))
        assert dataset.read(first, last - first) == end_to_end[first:last]


@quiet
@given(st.lists(st.sampled_from([b"1", b"[2, 3]", b"\n", b"\r\n", b"\n\n", b'"\\n"']), max_size=30))
def test_lines(parts: list[bytes]) -> None:
    text = b"\n".join(parts) if len(parts) % 2 else b"\n".join(parts) + b"\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.jsonl").write_bytes(text)
        lines = [line.removesuffix(b"\r") for line in text.split(b"\n")]
        assert list(open_jsonl("x", f"{folder}/x.jsonl", {})) == [json.loads(line) for line in lines if line]
