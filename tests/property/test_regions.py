"""Set algebra of regions against boolean numpy masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.regions import Region, cover, subtract
from tenplexrun.errors import LayoutError


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offsets = [draw(st.integers(0, length)) for length in shape]
    lengths = [draw(st.integers(0, length - offset)) for length, offset in zip(shape, offsets, strict=True)]
    return Region(tuple(offsets), tuple(lengths))


@st.composite
def families(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, list[Region]]:
    """(shape, a box, up to six other boxes) with 0 to 3 dims of up to 6 elements."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    return shape, draw(boxes(shape)), draw(st.lists(boxes(shape), max_size=6))


def mask(shape: tuple[int, ...], regions: list[Region]) -> np.ndarray:
    """How many of `regions` hold each element."""
    counts = np.zeros(shape, dtype=int)
    for region in regions:
        counts[region.slices] += 1
    return counts


@given(families())
def test_subtract_leaves_exactly_what_no_hole_holds(family: tuple[tuple[int, ...], Region, list[Region]]) -> None:
    shape, box, holes = family
    rest = subtract(box, holes)
    assert not any(one.is_empty for one in rest)
    want = (mask(shape, [box]) > 0) & (mask(shape, holes) == 0)
    np.testing.assert_array_equal(mask(shape, rest), want.astype(int))


@given(families())
def test_cover_tiles_or_refuses(family: tuple[tuple[int, ...], Region, list[Region]]) -> None:
    shape, box, pieces = family
    if subtract(box, pieces):
        with pytest.raises(LayoutError, match="is in none of"):
            cover(box, pieces)
        return
    tiles = cover(box, pieces)
    assert all(pieces[index].contains(tile) for index, tile in tiles)
    np.testing.assert_array_equal(mask(shape, [tile for _, tile in tiles]), mask(shape, [box]))


@given(families())
def test_intersect_contains_and_relative_agree_with_numpy(
    family: tuple[tuple[int, ...], Region, list[Region]],
) -> None:
    shape, box, others = family
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for other in others:
        common = box.intersect(other)
        both = (mask(shape, [box]) > 0) & (mask(shape, [other]) > 0)
        assert (common is None) == (not both.any())
        assert box.contains(other) == bool((mask(shape, [box]) >= mask(shape, [other])).all())
        if common is not None:
            assert common == other.intersect(box)
            inner = common.relative_to(box)
            np.testing.assert_array_equal(numbers[box.slices][inner.slices], numbers[common.slices])


@given(families())
def test_json_gives_back_the_region(family: tuple[tuple[int, ...], Region, list[Region]]) -> None:
    _, box, _ = family
    assert Region.from_json(box.to_json()) == box
