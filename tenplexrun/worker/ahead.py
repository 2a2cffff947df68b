"""Pages of the arena, had ahead of time.

The first touch of a mapped page costs about as much as copying it. So a thread touches, while the script builds its
model, what the rank will read when it restores, and during the first step what it will write in its snapshots.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from tenplexrun.core.layout import Layout
from tenplexrun.core.pieces import layout_name
from tenplexrun.errors import TenplexError
from tenplexrun.worker.device import Bytes
from tenplexrun.worker.launch import Place
from tenplexrun.worker.maps import Maps
from tenplexrun.worker.slots import Snapshot

STEP_BYTES = 16 << 20
"""Touched at once: after each of them the thread may be told to end."""


class Ahead:
    """A thread that touches `ranges`, until all are or `end` is called. What it cannot find it leaves alone."""

    def __init__(self, ranges: Iterable[Bytes]) -> None:
        self._ranges, self._ended = ranges, threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenplexrun-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all are touched."""
        self._thread.join()

    def end(self) -> None:
        self._ended.set()
        self.wait()

    def _run(self) -> None:
        try:
            for data in self._ranges:
                for start in range(0, len(data), STEP_BYTES):
                    if self._ended.is_set():
                        return
                    # reading is enough for pages of shared memory to become writable, too; numpy lets others run
                    data[start : start + STEP_BYTES : mmap.PAGESIZE].max()
        except (OSError, ValueError, TenplexError):
            pass  # whoever needs it is told


class Source:
    """The snapshot to restore from, as far as it is on this node when the script begins: `index_path` says so."""

    def __init__(self, index_path: str, place: Place) -> None:
        self._index_path, self._place, self._maps = index_path, place, Maps(Path(index_path).parent, "c")
        self.ahead = Ahead(self._ranges(None))

    def aim(self, layout: Layout) -> None:
        """The script has declared its layout: where that is not the snapshot's, it will read other parts."""
        self.ahead.end()
        self.ahead = Ahead(self._ranges(layout))

    def end(self) -> Maps:
        self.ahead.end()
        return self._maps

    def _ranges(self, layout: Layout | None) -> Iterator[Bytes]:
        snapshot = Snapshot(self._index_path, self._maps)
        path = self._maps.folder / layout_name(snapshot.index.snapshot.digest)
        yield from snapshot.ranges(layout or Layout.from_json(json.loads(path.read_bytes())), self._place)
