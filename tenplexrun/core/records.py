"""Strict reading of JSON records: what is not known is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.errors import LayoutError

Record = dict[str, Any]


def fields(record: object, what: str, required: Sequence[str], optional: Sequence[str] = ()) -> Mapping[str, Any]:
    """`record` itself, once it is known to have all `required` fields and no others but `optional` ones."""
    if not isinstance(record, Mapping):
        raise LayoutError(f"{what} should be a JSON object, got {_short(record)}; nodes run different versions?")
    missing = [name for name in required if name not in record]
    unknown = sorted(str(name) for name in record if name not in required and name not in optional)
    if missing or unknown:
        faults = [
            f"{word} {', '.join(names)}" for word, names in (("lacks", missing), ("has unknown", unknown)) if names
        ]
        raise LayoutError(f"{what} {' and '.join(faults)}; is it of another version of tenplexrun?")
    return record


def whole(value: object, what: str, least: int = 0) -> int:
    """A whole number of at least `least`; bools and floats are none."""
    if type(value) is not int or value < least:
        raise LayoutError(f"{what} should be a whole number of at least {least}, got {_short(value)}")
    return value


def text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise LayoutError(f"{what} should be a non-empty string, got {_short(value)}")
    return value


def items(value: object, what: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise LayoutError(f"{what} should be a list, got {_short(value)}")
    return value


def flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise LayoutError(f"{what} should be true or false, got {_short(value)}")
    return value


def config(value: object) -> ParallelConfig:
    """The parallel config of a record; axes that it does not name have size 1."""
    sizes = ("pp", "dp", "cp", "ep", "tp")
    known = fields(value, "a parallel config", (), (*sizes, "etp", "dp_shard", "order"))
    for name, size in known.items():
        if name != "order":
            whole(size, f"the size of axis {name}", int(name in sizes))
    for axis in items(known.get("order", ()), "the order of the axes"):
        text(axis, "an axis of the order")
    try:
        return ParallelConfig.from_json(known)
    except ValueError as error:
        raise LayoutError(f"a parallel config cannot be {dict(known)}: {error}") from None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
