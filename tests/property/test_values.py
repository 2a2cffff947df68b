"""Values come back equal and of the same type, through real JSON."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.values import decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
keys = scalars | st.tuples(st.integers(), st.text(max_size=3)) | st.sampled_from(["$tuple", "$", "$dict"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(st.tuples(keys, inner), max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal and of equal types all the way down; NaN equals NaN, -0.0 does not equal 0.0, dicts keep their order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return bool(one == other)


@given(values)
def test_what_comes_back_is_the_same(value: Any) -> None:
    assert same(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)
