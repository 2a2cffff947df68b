"""How a source's regions are shared out among the streams that pull them."""

from hypothesis import given
from hypothesis import strategies as st

from tenplexrun.core.regions import Region
from tenplexrun.store.transfer import BATCH_BYTES, BATCH_REGIONS, CHUNK_BYTES, STREAMS_PER_SOURCE, Part, _batches

sizes = st.lists(st.integers(1, 1 << 29) | st.integers(1, 1 << 16), min_size=1, max_size=60)


def parts_of(found: list[int]) -> list[Part]:
    return [Part(f"w{n}", Region((0,), (size,)), "uint8", size, 0, ("a:1",)) for n, size in enumerate(found)]


@given(sizes)
def test_all_are_asked_for_once_in_order_and_in_bounds(found: list[int]) -> None:
    parts = parts_of(found)
    batches = _batches(parts)
    assert [part for batch in batches for part in batch] == parts
    assert all(batches)
    for batch in batches:
        assert sum(part.num_bytes for part in batch) <= BATCH_BYTES + max(part.num_bytes for part in batch)
    turns = -(-sum(found) // (STREAMS_PER_SOURCE * BATCH_BYTES))
    assert len(batches) <= STREAMS_PER_SOURCE * turns


def test_streams_get_equal_shares_and_none_is_left_over() -> None:
    batches = _batches(parts_of([3 << 20, 1 << 10, 12 << 20, 4 << 20, 4 << 20, 1 << 10, 9 << 20, 4 << 20]))
    assert [sum(part.num_bytes for part in batch) >> 20 for batch in batches] == [19, 17]
    assert len(_batches(parts_of([CHUNK_BYTES // 4] * 3))) == 1
    assert [len(batch) for batch in _batches(parts_of([1] * (BATCH_REGIONS + 1)))] == [BATCH_REGIONS, 1]
