"""Sizes of torch's element types by name (without "torch."), so that nobody needs torch to count bytes."""

from __future__ import annotations

from tenplexrun.errors import LayoutError

ITEM_BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises LayoutError for an unknown name."""
    try:
        return ITEM_BYTES[dtype]
    except (KeyError, TypeError):
        raise LayoutError(f"element type {dtype!r} is not supported; use one of {', '.join(ITEM_BYTES)}") from None
