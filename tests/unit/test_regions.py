from __future__ import annotations

import numpy as np
import pytest

from tenplexrun.core.regions import Region, cover, subtract
from tenplexrun.errors import LayoutError


def test_a_scalar_has_one_element_and_no_dims() -> None:
    scalar = Region.whole(())
    assert (scalar.num_elements, scalar.is_empty, scalar.slices, str(scalar)) == (1, False, (), "[]")
    assert scalar.intersect(scalar) == scalar
    assert subtract(scalar, [scalar]) == []
    assert cover(scalar, [scalar, scalar]) == [(0, scalar)]
    assert np.array(7.0)[scalar.slices] == 7.0


def test_an_empty_region_is_everywhere_and_needs_no_cover() -> None:
    empty = Region((4,), (0,))
    assert Region((0,), (2,)).contains(empty)
    assert empty.relative_to(Region((0,), (2,))) == Region((0,), (0,))
    assert cover(empty, []) == []


def test_cover_takes_earlier_pieces_first_and_names_the_gap() -> None:
    halves = [Region((0,), (4,)), Region((2,), (6,))]
    assert cover(Region((1,), (5,)), halves) == [(0, Region((1,), (3,))), (1, Region((4,), (2,)))]
    with pytest.raises(LayoutError, match=r"\[8:10\] of region \[0:10\]"):
        cover(Region((0,), (10,)), halves)


def test_text_is_as_in_numpy() -> None:
    assert str(Region((0, 8), (4, 8))) == "[0:4, 8:16]"


@pytest.mark.parametrize(
    "record",
    [None, "x", [], [[0]], [[0], [1], [2]], [[0], [1, 2]], [[-1], [1]], [[0], [1.0]], [[True], [1]], [["0"], [1]]],
)
def test_malformed_records_are_refused(record: object) -> None:
    with pytest.raises(LayoutError):
        Region.from_json(record)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(LayoutError, match="as many offsets"):
        Region((0,), (1, 2))
    with pytest.raises(LayoutError, match="negative"):
        Region((0,), (-1,))
    with pytest.raises(LayoutError, match="does not lie in"):
        Region((0,), (3,)).relative_to(Region((1,), (3,)))
    with pytest.raises(LayoutError, match="nothing in common"):
        Region((0,), (3,)).intersect(Region((), ()))
