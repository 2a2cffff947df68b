"""Sees from outside, in a node's shared memory, what its workers and store are just doing."""

from __future__ import annotations

import contextlib
import json
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tenplexrun.core.layout import Layout
from tenplexrun.core.snapshots import BuddyClaim, Claim
from tenplexrun.store.slots import Round

MIN_BYTES = 64 << 10
"""Only tensors of at least this size are looked at."""


class ArenaWatch:
    """The slots of a node's open round. Each state differs from the one before in every large tensor of `names`."""

    def __init__(self, node_dir: Path, names: str = "layers.") -> None:
        self.folder, self._names = node_dir / "arena", names
        record = json.loads((self.folder / "round.json").read_text())
        layout = Layout.from_json(json.loads((self.folder / f"layout-{record['digest']}.json").read_text()))
        buddy = record["buddy"] and BuddyClaim.from_json(record["buddy"])
        opened = Round.of(record["round"], layout, Claim.from_json(record["claim"]), buddy)
        self._paths = [self.folder / name for name in opened.slots]
        own = [(entry.fqn, entry.offset, entry.num_bytes) for entry in opened.entries]
        owed = [(one.fqn, offset, one.num_bytes) for one, offset in opened.owed]
        self.own, self.owed = self._probes(own), self._probes(owed)

    def _probes(self, places: list[tuple[str, int, int]]) -> list[int]:
        """Offsets, in words of 8 bytes, of the middle of each large tensor."""
        large = [(offset, size) for fqn, offset, size in places if size >= MIN_BYTES and fqn.startswith(self._names)]
        return [(offset + size // 2) // 8 for offset, size in large]

    def written(self, probes: list[int], deadline_s: float = 60.0) -> Iterator[float]:
        """The share of `probes` that a write under way has reached: what is seen in turn, without a pause."""
        assert probes, "there is nothing to look at"
        slots, until = [], time.monotonic() + deadline_s
        for path in self._paths:
            with path.open("rb") as file:
                slots.append(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint64))
        before = [slot[probes] for slot in slots]
        while time.monotonic() < until:
            for number, slot in enumerate(slots):
                now = slot[probes]
                share = float((now != before[number]).mean())
                if share:
                    yield share
                if share == 1.0:
                    before[number] = now
        raise AssertionError(f"nobody wrote into {self._paths} for {deadline_s} s")

    def in_mid_write(self) -> None:
        """Return while the workers write a snapshot."""
        next(share for share in self.written(self.own) if share < 1.0)

    def just_written(self) -> None:
        """Return when they have written it, and the store proves it."""
        next(share for share in self.written(self.own) if share == 1.0)

    def in_mid_replication(self) -> None:
        """Return while the store writes what it keeps for other nodes."""
        next(share for share in self.written(self.owed) if share < 1.0)


def in_mid_move(node_dir: Path, deadline_s: float = 60.0) -> None:
    """Return while a store pulls what a round starts with, into the second slot, before there is a first one."""
    arena, until = node_dir / "arena", time.monotonic() + deadline_s
    while time.monotonic() < until:
        for path in arena.glob("slot-*-1.bin"):
            first = path.with_name(path.name.replace("-1.bin", "-0.bin"))
            if path.stat().st_blocks and not first.exists() and not _listed(arena, path.name):
                return
    raise AssertionError(f"nothing was moved to {node_dir} for {deadline_s} s")


def _listed(arena: Path, file: str) -> bool:
    """Whether a snapshot has pieces in it."""
    for index in arena.glob("snapshot-*.json"):
        with contextlib.suppress(FileNotFoundError):
            if file in index.read_text():
                return True
    return False
