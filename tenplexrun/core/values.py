"""Plain values of a snapshot (step counts, hyper-parameters, schedulers) as JSON that keeps values and types.

JSON alone turns tuples to lists, keys to strings and has no NaN. Here an object with one key that begins with `$`
is a tag: `{"$tuple": [...]}`, `{"$bytes": base64}`, `{"$float": "nan"}`, and `{"$dict": [[key, value], ...]}` for
dicts whose keys are not plain strings. No class is looked up by name and no code runs: nothing here is a pickle.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from tenplexrun.core import records
from tenplexrun.errors import LayoutError, UsageError

MAX_DEPTH = 64

_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: object, path: str = "values") -> Any:
    """What `json.dumps` takes, for None, bool, int, float, str, bytes, tuple, list, dict, OrderedDict and Counter.

    Raises UsageError that names where in `value` something else lies (subclasses count as something else).
    """
    return _encode(value, path, 0)


def decode(record: object, path: str = "values") -> Any:
    """The value that `encode` was given. Raises LayoutError for tags or things it never writes."""
    if isinstance(record, list):
        return [decode(item, f"{path}[{index}]") for index, item in enumerate(record)]
    if isinstance(record, dict):
        tags = [key for key in record if not isinstance(key, str) or key.startswith("$")]
        if len(record) == 1 and tags and tags[0] in _DECODERS:
            return _DECODERS[tags[0]](record[tags[0]], path)
        if tags:
            raise LayoutError(f"{path}: unknown tag {tags[0]!r}; run the same version of tenplexrun on all nodes")
        return {key: decode(item, f"{path}[{key!r}]") for key, item in record.items()}
    if record is None or type(record) in (bool, int, float, str):
        return record
    raise LayoutError(f"{path}: {type(record).__name__} is nothing that JSON can hold")


def _encode(value: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UsageError(f"{path[:200]}: nested deeper than {MAX_DEPTH} levels, or within itself; flatten it")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind in (list, tuple):
        parts = [_encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        return parts if kind is list else {"$tuple": parts}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if kind in _MAPPINGS:
        pairs = [
            [_encode(key, f"key of {path}", depth + 1), _encode(item, f"{path}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {_MAPPINGS[kind]: pairs}
    raise UsageError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a snapshot's values cannot hold; "
        "make it a tensor of the state, or a plain number, string, list, tuple or dict"
    )


def _float(body: object, path: str) -> float:
    if not isinstance(body, str) or body not in _FLOATS:
        raise LayoutError(f"{path}: {body!r} is no special float")
    return _FLOATS[body]


def _bytes(body: object, path: str) -> bytes:
    try:
        return base64.b64decode(records.text(body, path) if body else b"", validate=True)
    except ValueError as error:
        raise LayoutError(f"{path}: no base64: {error}") from None


def _tuple(body: object, path: str) -> tuple[Any, ...]:
    return tuple(decode(item, f"{path}[{index}]") for index, item in enumerate(records.items(body, path)))


def _mapping(kind: type) -> Callable[[object, str], Any]:
    def read(body: object, path: str) -> Any:
        pairs = [_tuple(pair, f"{path}[{index}]") for index, pair in enumerate(records.items(body, path))]
        try:
            return kind(dict(pairs)) if kind is not OrderedDict else OrderedDict(pairs)
        except (TypeError, ValueError) as error:
            raise LayoutError(f"{path}: not a list of (key, value) pairs: {error}") from None

    return read


_DECODERS: dict[str, Callable[[object, str], Any]] = {
    "$float": _float,
    "$bytes": _bytes,
    "$tuple": _tuple,
    **{tag: _mapping(kind) for kind, tag in _MAPPINGS.items()},
}
