"""The loader, read from files as outside the launcher; the view's side is in tests/integration/test_view_process.py."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from extents_of import extents_of

from tenplexrun.core.order import DataOrder
from tenplexrun.errors import DataError
from tenplexrun.worker.data import Loader, open_loader, open_view


@pytest.fixture
def rows(tmp_path: Path) -> tuple[str, np.ndarray]:
    array = np.random.default_rng(0).normal(size=(103, 2, 3)).astype(np.float32)
    np.save(tmp_path / "rows.npy", array)
    return f"npy:{tmp_path}/rows.npy", array


def loader(spec: str, rank: int = 0, size: int = 1, consumed: int = 0) -> Loader:
    return open_loader(spec, global_batch=24, micro_batch=4, seed=5, dp_rank=rank, dp_size=size, consumed=consumed)


def test_batches(rows: tuple[str, np.ndarray]) -> None:
    spec, array = rows
    batch = loader(spec, 1, 5).next_batch()
    assert (batch.ids.dtype, batch.rows.dtype, batch.weights.dtype) == (np.int64, np.float32, np.float64)
    assert (batch.rows.shape, batch.num_micro_batches, batch.micro_batch) == ((8, 2, 3), 2, 4)
    np.testing.assert_array_equal(batch.rows, array[batch.ids])
    assert batch.consumed_after == 24
    parts = list(batch.micro_batches())
    assert len(parts) == 2
    np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), batch.rows)
    assert sum(weights.sum() for _, weights in parts) == pytest.approx(batch.weights.sum())
    batch.rows[:] = 0  # the script's own memory


def test_epochs_follow_each_other_without_end(rows: tuple[str, np.ndarray]) -> None:
    found = list(itertools.islice(loader(rows[0]), 10))
    assert [batch.consumed_after for batch in found] == [24, 48, 72, 96, 103, 127, 151, 175, 199, 206]
    for first in (0, 5):
        epoch = np.concatenate([batch.ids[batch.weights > 0] for batch in found[first : first + 5]])
        assert sorted(epoch) == list(range(103))


def test_only_commits_count(rows: tuple[str, np.ndarray]) -> None:
    """Case D4: what was taken ahead but not committed is read again."""
    ahead = loader(rows[0])
    batches = [ahead.next_batch() for _ in range(3)]
    assert ahead.consumed == 0
    ahead.commit()
    assert ahead.consumed == 24
    resumed = loader(rows[0], consumed=ahead.consumed)
    np.testing.assert_array_equal(resumed.next_batch().ids, batches[1].ids)
    ahead.commit()
    ahead.commit()
    assert ahead.consumed == 72
    with pytest.raises(DataError, match="no batch to commit"):
        ahead.commit()


def test_begin_goes_on_elsewhere_and_checks_the_order(rows: tuple[str, np.ndarray]) -> None:
    moved = loader(rows[0])
    saved = moved.order.to_json()
    moved.next_batch()
    moved.begin(48, saved)
    assert moved.consumed == 48
    np.testing.assert_array_equal(moved.next_batch().ids, loader(rows[0], consumed=48).next_batch().ids)
    for change in ({"seed": 6}, {"num_samples": 104}, {"fingerprint": "xxh3-0"}):
        with pytest.raises(DataError, match="not the data the job was reading"):
            moved.begin(48, {**saved, **change})


def test_all_ranks_agree_on_the_number_of_steps(rows: tuple[str, np.ndarray]) -> None:
    """Case D5: at the end of an epoch too every rank gets a batch, of the same number of rows."""
    loaders = [loader(rows[0], rank, 6, consumed=96) for rank in range(6)]
    for _ in range(3):
        assert len({(len(batch.ids), batch.consumed_after) for batch in (one.next_batch() for one in loaders)}) == 1


def test_bad_arguments(rows: tuple[str, np.ndarray], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rank 2 is not below"):
        loader(rows[0], 2, 2)
    with pytest.raises(DataError, match="negative"):
        loader(rows[0], consumed=-1)
    with pytest.raises(DataError, match="micro_batch=4"):
        open_loader(rows[0], global_batch=2, micro_batch=4)
    with pytest.raises(DataError, match="cannot read the dataset view"):
        open_view(str(tmp_path), patience_s=0)
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "cursor.json").write_text("{}")
    with pytest.raises(DataError, match="is no dataset view"):
        open_view(str(tmp_path))


def test_under_a_launcher_the_agent_is_asked(rows: tuple[str, np.ndarray], tmp_path: Path) -> None:
    asked = []

    def show(record: dict[str, object]) -> str:
        asked.append(record)
        order = DataOrder(103, 5, 24, 4, fingerprint="xxh3-1")
        extents = extents_of(str(record["dataset"]), tmp_path / "extents")
        index = {"samples": extents.catalogue.to_json(), "directory": extents.directory}
        (tmp_path / "index.json").write_text(json.dumps(index))
        (tmp_path / "cursor.json").write_text(json.dumps({"order": order.to_json()}))
        return str(tmp_path)

    shown = open_loader(rows[0], global_batch=24, micro_batch=4, seed=5, show=show)
    order = {"global_batch": 24, "micro_batch": 4, "seed": 5, "tail": "short", "algo": "feistel-1"}
    assert asked == [{"dataset": rows[0], **order, "bare": True}]
    direct = loader(rows[0])
    for _ in range(6):
        ours, theirs = shown.next_batch(), direct.next_batch()
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_array_equal(ours.rows, theirs.rows)
        np.testing.assert_array_equal(ours.weights, theirs.weights)
