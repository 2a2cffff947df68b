"""Samples through torch's DataLoader: nothing lost, nothing twice, whatever the workers, however often it starts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from tenplexrun.errors import DataError, UsageError
from tenplexrun.worker.data import Loader, open_loader

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1, "prefetch_factor": 5},
    {"num_workers": 4},
    {"num_workers": 4, "persistent_workers": True},
]


class Augmented:
    """Samples that have been changed at random, by each of the three generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, number: int) -> np.ndarray:
        return np.array([number, random.random(), np.random.rand(), torch.rand(1).item()])


def noisy(samples: list[np.ndarray]) -> torch.Tensor:
    """A collate function that draws at random, too."""
    noise = torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()])
    return torch.stack([torch.cat([torch.from_numpy(sample), noise]) for sample in samples])


@pytest.fixture
def lines(tmp_path: Path) -> str:
    text = "".join(json.dumps({"number": number, "text": "x" * number}) + "\n" for number in range(23))
    (tmp_path / "x.jsonl").write_text(text)
    return f"jsonl:{tmp_path}/x.jsonl"


def loader(dataset: Any, rank: int = 0, size: int = 1, consumed: int = 0, **options: Any) -> Loader:
    sizes = {"global_batch": 8, "micro_batch": 2, "dp_rank": rank, "dp_size": size, "consumed": consumed}
    return open_loader(dataset, seed=3, **sizes, **options)


def take(made: Loader, steps: int) -> list[int]:
    """Sample numbers of some steps, committed, checked against their ids."""
    found = []
    for _ in range(steps):
        batch = made.next_batch()
        numbers = [row["number"] for rows, _ in batch.micro_batches() for row in rows]
        assert numbers == batch.ids.tolist()
        assert [len(rows) for rows in batch.rows] == [2] * batch.num_micro_batches
        found += [number for number, weight in zip(numbers, batch.weights, strict=True) if weight]
        made.commit()
    return found


def check(lines: str, options: dict[str, Any]) -> None:
    made = loader(lines, collate_fn=list, **options)
    early = iter(made)
    for ahead in (next(early), next(early)):
        assert ahead.consumed_after in (8, 16)
    assert made.consumed == 0
    made.begin(0)  # what was taken and fetched ahead was never committed
    expected = made.order.sample_at(np.arange(46)).tolist()
    seen = take(made, 1)
    made.begin(made.consumed)
    seen += take(made, 2)
    assert (made.consumed, sorted(seen)) == (23, list(range(23)))  # case D3
    made.begin(23)
    seen += take(made, 3)
    made.close()
    assert seen == expected
    assert made.next_batch().consumed_after == 54
    made.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_nothing_is_lost_and_nothing_twice(lines: str, options: dict[str, Any]) -> None:
    """Case D4 at any step, with an early iter(), over two epochs, resumed at an epoch's end."""
    check(lines, options)


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_nothing_is_lost_with_other_start_methods(lines: str, method: str) -> None:
    """In a process of its own, since multiprocessing's trackers stay as long as who started them."""
    done = subprocess.run([sys.executable, __file__, lines, method], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_workers_fetched_ahead_is_read_after_a_restart(lines: str) -> None:
    """Case D4 with its numbers: 16 samples, batch 4, two workers, saved after one step."""
    Path(lines.removeprefix("jsonl:")).write_text("".join(f'{{"number": {number}}}\n' for number in range(16)))
    sizes = {"global_batch": 4, "micro_batch": 2, "seed": 3, "num_workers": 2, "collate_fn": list}
    first = open_loader(lines, **sizes)
    seen = take(first, 1)
    saved = {"consumed": first.consumed, "order": first.order.to_json()}
    first.close()
    assert saved["consumed"] == 4
    again = open_loader(lines, **sizes)
    again.begin(saved["consumed"], saved["order"])
    seen += take(again, 3)
    again.close()
    assert sorted(seen) == list(range(16))


def test_ranks_share_a_step(lines: str) -> None:
    consumed, seen = 0, []
    for size in (3, 1, 5):
        ranks = [loader(lines, rank, size, consumed, collate_fn=list) for rank in range(size)]
        assert len({rank.next_batch().num_micro_batches for rank in ranks}) == 1
        for rank in ranks:
            rank.begin(consumed)
            seen += take(rank, 1)
        consumed = ranks[0].consumed
    assert seen == ranks[0].order.sample_at(np.arange(23)).tolist()


def test_augmentations_depend_on_the_position_alone() -> None:
    """The number of ranks and of workers, and restarts, change nothing; the job's own streams do not notice."""

    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    def rows(size: int, **options: Any) -> torch.Tensor:
        found = []
        for rank in range(size):
            made = loader(Augmented(), rank, size, 16, collate_fn=noisy, **options)
            for _ in range(2):  # across the end of the epoch
                batch = made.next_batch()
                found.append(torch.cat(batch.rows)[torch.from_numpy(batch.weights) > 0])
            made.close()
        both = torch.cat(found)
        return both[np.lexsort(both.numpy().T[:2])]

    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(1)
    expected_draw = draw()
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(1)
    expected = rows(1)
    assert draw() == expected_draw
    assert len(torch.unique(expected[:, 1])) == 15
    assert len(torch.unique(expected[:, -1])) == 8, "micro-batches"
    for size, workers in ((1, 2), (3, 0), (2, 1)):
        assert torch.equal(rows(size, num_workers=workers), expected)


def test_default_collation_and_samples_of_one_size(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", array)
    batch = loader(f"npy:{tmp_path}/x.npy", num_workers=1).next_batch()
    for number, (rows, weights) in enumerate(batch.micro_batches()):
        np.testing.assert_array_equal(rows.numpy(), array[batch.ids[2 * number : 2 * number + 2]])
        assert weights.tolist() == [1 / 8] * 2
    of_torch = loader(TensorDataset(torch.from_numpy(array), torch.arange(23)), fingerprint="mine")
    batch = of_torch.next_batch()
    assert torch.cat([labels for (_, labels), _ in batch.micro_batches()]).tolist() == batch.ids.tolist()
    assert (of_torch.order.num_samples, of_torch.order.fingerprint) == (23, "mine")


def test_a_bad_sample_is_named_from_a_worker(lines: str) -> None:
    Path(lines.removeprefix("jsonl:")).write_text("{}\n[1\n{}\n")
    made = loader(lines, num_workers=1, collate_fn=list)
    with pytest.raises(DataError, match=r"\Adataset jsonl:\S*: sample 1 of \S*x\.jsonl at byte 3: [^\n]*\Z"):
        made.next_batch()
    made.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_after_an_error_the_same_step_is_the_next_one(tmp_path: Path, options: dict[str, Any]) -> None:
    class Failing:
        def __len__(self) -> int:
            return 23

        def __getitem__(self, number: int) -> dict[str, int]:
            if number == failing and not (tmp_path / "mended").exists():
                raise DataError("not now")
            return {"number": number}

    made = loader(Failing(), collate_fn=list, **options)
    failing = int(made.order.sample_at([13])[0])  # in the second step's last micro-batch but one
    seen = take(made, 1)
    for _ in range(2):
        with pytest.raises(DataError, match="not now"):
            made.next_batch()
    (tmp_path / "mended").touch()
    seen += take(made, 2)
    made.close()
    assert seen == made.order.sample_at(np.arange(23)).tolist()


def test_what_a_loader_refuses(lines: str) -> None:
    refused = dict.fromkeys(("shuffle", "batch_size", "sampler", "batch_sampler", "drop_last"), 1)
    for option, value in (*refused.items(), ("in_order", False)):
        with pytest.raises(UsageError, match=f"{option} would change the order"):
            loader(lines, **{option: value})

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([1])

        def __len__(self) -> int:
            return 1

    with pytest.raises(DataError, match="a Stream cannot go on in its middle"):
        loader(Stream())


if __name__ == "__main__":
    check(sys.argv[1], {"num_workers": 1, "multiprocessing_context": sys.argv[2], "persistent_workers": True})
