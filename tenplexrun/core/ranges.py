"""Where the tensors of a flat buffer lie in it, and which range of each a rank has."""

from __future__ import annotations

from collections.abc import Mapping

from tenplexrun.core.ops import Buffer, Flat, flat_index
from tenplexrun.core.parallel import ParallelConfig

Place = tuple[int, int, int, int]
"""(low, high, place, length): elements low … high - 1 of the tensor, at `place` of the rank's array of `length`."""


def places(
    buffer: Buffer, flat: Flat, sizes: Mapping[str, int], config: ParallelConfig, coord: Mapping[str, int]
) -> dict[str, Place]:
    """By fqn, for the rank at a full coordinate. `sizes`: elements of its tensors, in the buffer's order.

    As Megatron's `_ParamAndGradBuffer` lays parameters out: aligned starts, buckets closed by size, each padded.
    """
    parts, index = flat_index(flat.axes, config.size, coord.__getitem__)
    buckets: list[dict[str, tuple[int, int]]] = [{}]
    cursor = 0
    for fqn, size in sizes.items():
        if buffer.bucket and cursor >= buffer.bucket:
            buckets.append({})
            cursor = 0
        cursor = -(-cursor // buffer.start) * buffer.start
        buckets[-1][fqn] = (cursor, size)
        cursor += size
    found: dict[str, tuple[int, int, int]] = {}
    base = 0
    for bucket in buckets:
        end = max((start + size for start, size in bucket.values()), default=0)
        length = flat.part_length(end, parts)
        first = index * length
        for fqn, (start, size) in bucket.items():
            low, high = max(first - start, 0), min(first + length - start, size)
            found[fqn] = (low, max(low, high), base + max(start - first, 0))
        base += length
    return {fqn: (*found[fqn], base) for fqn in found}
