"""Staging through pinned buffers, on devices of which copies run late, early, or in between."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fake_device import FakeCopies

from tenplexrun.worker.device import Bytes, flat
from tenplexrun.worker.staging import NUM_BUFFERS, Stager


@pytest.mark.parametrize("seed", range(30))
def test_all_bytes_arrive_whenever_the_device_copies(seed: int) -> None:
    rng = random.Random(seed)
    copies = FakeCopies(rng)
    stager = Stager(copies, buffer_bytes=rng.choice([1, 7, 64, 1000]))
    for _ in range(2):  # buffers are kept
        sizes = [rng.choice([0, 1, 3, 64, 65, 500]) for _ in range(rng.randint(0, 12))]
        sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        places: list[Bytes] = [np.zeros(size, np.uint8) for size in sizes]
        stager.put(zip(places, sources, strict=True))
        for place, source in zip(places, sources, strict=True):
            np.testing.assert_array_equal(place, source.numpy())
    assert copies.num_buffers == NUM_BUFFERS


def test_the_device_works_while_the_host_does() -> None:
    """It has been told of the next buffer before the host waits for the one before."""
    seen: list[str] = []

    class Told(FakeCopies):
        def copy(self, dest: torch.Tensor, source: torch.Tensor) -> None:
            seen.append("copy")
            super().copy(dest, source)

        def mark(self) -> Callable[[], None]:
            wait = super().mark()
            return lambda: (seen.append("wait"), wait())[1]

    Stager(Told(random.Random(1)), buffer_bytes=4).put([(np.zeros(16, np.uint8), torch.arange(16, dtype=torch.uint8))])
    assert seen == ["copy", "copy", "wait", "copy", "wait", "copy", "wait", "wait"]


def test_elements_as_bytes() -> None:
    assert flat(torch.tensor(1.5)).tolist() == list(np.float32(1.5).tobytes())
    turned = np.arange(6.0, dtype="f4").reshape(2, 3).T
    assert flat(torch.from_numpy(turned)).numpy().tobytes() == turned.tobytes()
    assert flat(torch.ones(3, dtype=torch.bfloat16)).numel() == 6
