"""Every element type and shape, through a slot and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from tenplexrun.core.dtypes import ITEM_BYTES
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import arena_map
from tenplexrun.worker.slots import SlotWriter, Snapshot
from tenplexrun.worker.state import State

from .test_worker_layouts import rank_of, write_index


class Everything(nn.Module):
    """A buffer of every element type, 2-d, 0-d and empty."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        for name, size in ITEM_BYTES.items():
            for label, shape in (("matrix", (3, 5)), ("scalar", ()), ("empty", (0, 4))):
                count = int(np.prod(shape))
                data = generator.integers(0, 2 if name == "bool" else 256, count * size, dtype=np.uint8)
                flat = torch.from_numpy(data) if count else torch.empty(0, dtype=torch.uint8)
                tensor = flat.view(getattr(torch, name)).view(shape)
                self.register_buffer(f"{name}_{label}", tensor)


def test_every_type_and_shape_comes_back_bit_by_bit(tmp_path: Path) -> None:
    with rank_of(ParallelConfig(), 0) as (place, _):
        saved, fresh = Everything(1), Everything(2)
        state, layout = State(saved, None, None, None, {}, place), State(saved, None, None, None, {}, place).layout()
        arena = arena_map(layout, place.config, [0])
        slot = tmp_path / "slot.bin"
        slot.write_bytes(bytes(arena.num_bytes))
        SlotWriter([str(slot)], arena, layout, place).write(0, state.read())
        index = write_index(tmp_path, layout, place.config, arena)
        other = State(fresh, None, None, None, {}, place)
        filled, _ = Snapshot(str(index)).fill(other.blank(), layout, place)
        other.adopt(filled, other.values())
        for (name, old), (_, new) in zip(saved.named_buffers(), fresh.named_buffers(), strict=True):
            assert old.dtype == new.dtype
            assert old.shape == new.shape
            old_bytes, new_bytes = (one.reshape(-1).view(torch.uint8) for one in (old, new))
            assert torch.equal(old_bytes, new_bytes), name
