from __future__ import annotations

import enum
import json
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest

from tenplexrun.core.values import MAX_DEPTH, decode, encode
from tenplexrun.errors import LayoutError, UsageError


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        False, True, 0, 1, 2**80, -0.0, 1e-320, "False", "", "\ud800", b"", b"\x00\xff", (), (1, (2,)), [], {},
        {"betas": (0.9, 0.999), "lr": 0.1, "initial_lr": 0.1 + 0.2, "foreach": None},
        {0: "x", "0": "y", (1, 2): "z"}, {"$tuple": [1]}, OrderedDict(b=1, a=2), Counter({30: 1, 80: 2}),
    ],
)  # fmt: skip
def test_types_are_kept(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert (back, type(back), repr(back)) == (value, type(value), repr(value))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"lr": np.float64(0.1)}, r"values\['lr'\] is a numpy.float64"),
        ({"groups": [{"lr": Colour.RED}]}, r"values\['groups'\]\[0\]\['lr'\] is a .*Colour"),
        ({"seen": {1}}, r"values\['seen'\] is a builtins.set"),
        ((1, np.zeros(2)), r"values\[1\] is a numpy.ndarray"),
        ({"f": print}, r"values\['f'\] is a builtins.builtin_function"),
        ({"d": defaultdict(int)}, r"values\['d'\] is a collections.defaultdict"),
        ({frozenset(): 1}, "key of values is a builtins.frozenset"),
        (1j, "values is a builtins.complex"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(UsageError, match=where):
        encode(value)


def test_a_value_within_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="within itself"):
        encode(loop)


def test_the_deepest_value_comes_back() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    assert decode(json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize(
    "record",
    [
        {"$set": [1]},
        {"$tuple": [1], "more": 2},
        {"$tuple": 1},
        {"$float": "1.5"},
        {"$float": 1},
        {"$bytes": "?"},
        {"$bytes": 3},
        {"$bytes": "é"},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [1]},
        {"$ordered": [[1, 2, 3]]},
        {"a": object()},
        {1: "not a key of JSON"},
    ],
)
def test_records_that_were_never_written_are_refused(record: Any) -> None:
    with pytest.raises(LayoutError):
        decode(record)
