"""Pieces, indexes and copy lists: against numpy, on tensors whose values are their own indices."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import Index, Piece, copies, row_blocks, run_start
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Claim, SnapshotId
from tenplexrun.errors import LayoutError

PIECE = Piece("w", Region((0, 2), (3, 4)), "float32", "slot-1-0.bin", 64, 48, 0x0123456789ABCDEF)
INDEX = Index(SnapshotId(1, 5, "d"), True, 640, {"step": 5}, (Claim(ParallelConfig(dp=2), (0,)),), (PIECE,))


@st.composite
def boxes(draw: st.DrawFn, max_dims: int = 3) -> tuple[tuple[int, ...], Region]:
    """A shape, and a non-empty box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=max_dims)))
    spans = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    starts = tuple(low for low, _ in spans)
    return shape, Region(starts, tuple(max(1, high - low) for low, high in spans))


def test_index_survives_json() -> None:
    record = json.loads(json.dumps(INDEX.to_json()))
    assert Index.from_json(record) == INDEX
    assert record["pieces"][0]["checksum"] == "0123456789abcdef"


@pytest.mark.parametrize(
    "damage",
    [{"v": 2}, {"pieces": [{}]}, {"claims": 3}, {"values": []}, {"snapshot": None}, {"extra": 1}],
    ids=lambda damage: next(iter(damage)),
)
def test_malformed_index_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        Index.from_json({**INDEX.to_json(), **damage})


def test_bad_checksum_text_is_refused() -> None:
    with pytest.raises(LayoutError, match="16 hex digits"):
        Piece.from_json({**PIECE.to_json(), "checksum": "xyz"})


@given(boxes())
def test_run_start_agrees_with_numpy(case: tuple[tuple[int, ...], Region]) -> None:
    shape, box = case
    values = np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel()
    is_run = bool(np.all(np.diff(values) == 1))
    assert run_start(box, shape) == (values[0] if is_run else None)


@given(boxes(), st.integers(1, 40))
def test_row_blocks_are_runs_in_order(case: tuple[tuple[int, ...], Region], max_elements: int) -> None:
    _, region = case
    position = 0
    for block in row_blocks(region, max_elements):
        assert block.num_elements <= max_elements
        assert run_start(block.relative_to(region), region.lengths) == position
        position += block.num_elements
    assert position == region.num_elements


@given(boxes(), st.data())
def test_copies_put_a_region_together(case: tuple[tuple[int, ...], Region], data: st.DataObject) -> None:
    shape, region = case
    dim = data.draw(st.integers(0, len(shape) - 1)) if shape else None
    parts = [Region.whole(shape)]
    if dim is not None:
        cut = data.draw(st.integers(0, shape[dim]))
        low, high = list(shape), list(shape)
        low[dim], high[dim] = min(shape[dim], cut + 1), shape[dim] - cut  # the two overlap in one row
        parts = [
            Region((0,) * len(shape), tuple(low)),
            Region(tuple(cut if d == dim else 0 for d in range(len(shape))), tuple(high)),
        ]
    whole = np.arange(math.prod(shape)).reshape(shape)
    stored = {index: whole[part.slices] for index, part in enumerate(parts)}
    pieces = [Piece("w", part, "int64", str(index), 0, 0, 0) for index, part in enumerate(parts)]
    out = np.full(region.lengths, -1)
    for copy in copies(region, pieces):
        out[copy.dest.slices] = stored[int(copy.piece.file)][copy.source.slices]
    np.testing.assert_array_equal(out, whole[region.slices])


def test_gap_is_named() -> None:
    with pytest.raises(LayoutError, match=r"\[0:3, 0:2\]"):
        copies(Region((0, 0), (3, 6)), [PIECE])
