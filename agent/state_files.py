"""$TENPLEX_STATE_DIR: the checkpoint files of scripts that know nothing of job.state, kept as snapshots are.

Each rank has a folder in shared memory. It writes step-N.tmp/ there and renames it to step-N/, every rank the same
steps in the same order (an empty folder will do), and removes none. Once all ranks of the node have step N, their
folders are packed into the store's slots, as the rows of one tensor (`core.files`); from there on they are state like
any other: sealed, replicated to buddies, committed when all nodes have it. Then older steps are removed. A new round
finds the newest committed step in each rank's folder, and nothing else, provided that its layout is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tenplexrun.agent.session import POLL_S, Session
from tenplexrun.agent.transformer import Restored
from tenplexrun.core import files
from tenplexrun.core.arena import arena_map
from tenplexrun.core.control import NONE
from tenplexrun.core.layout import Layout
from tenplexrun.core.lifecycle import StopWorkers
from tenplexrun.core.pieces import Index, copies
from tenplexrun.errors import ArenaFullError, LayoutError, StoreError, TenplexError

SCAN_S = 0.05


class FilesSession(Session):
    """A round whose state is the files of its ranks."""

    _collecting: asyncio.Task[None] | None = None

    @property
    def _row_bytes(self) -> int:
        return self._services.state_bytes

    @property
    def _layout(self) -> Layout:
        return files.files_layout(self.round.parallel, self._row_bytes)

    @property
    def _home(self) -> Path:
        return self._services.control.parent / "files"

    def _folder(self, rank: int) -> Path:
        return self._home / f"round-{self.round.number}" / f"rank-{rank}"

    async def _restore(self) -> Restored:
        holdings = [holding for source in (self.round.sources or {}).values() for holding in source.holdings]
        if files.is_of(self.round.snapshot, holdings, self.round.parallel, self._row_bytes):
            return await super()._restore()
        if self.round.snapshot is not None:
            self._services.events.say(
                f"$TENPLEX_STATE_DIR is empty: the files of {self.round.snapshot} are those of another layout or size"
            )
        return Restored()

    async def _prepare(self) -> None:
        restored = await self._restoring()
        await asyncio.to_thread(self._unpack, restored)
        opened = await self._declare(self._layout.to_json(), self.round.parallel.to_json(), {})
        done = NONE if restored.index is None else restored.step
        self._collecting = asyncio.ensure_future(self._collect(opened["slots"], done))

    def _env(self, local_rank: int) -> dict[str, str]:
        rank = self._mine.first_rank + local_rank
        step = max(self._steps(rank), default=0)
        more = {"TENPLEX_STATE_DIR": str(self._folder(rank)), "TENPLEX_RESUME_STEP": str(step)}
        return {**super()._env(local_rank), **more}

    async def answer(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "declare":
            raise LayoutError("job.state and --state-files exclude each other: leave one of them out")
        return await super().answer(op, args)

    async def stop(self, order: StopWorkers) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
        await super().stop(order)

    # --- into the store -------------------------------------------------------------------------------------------

    async def _collect(self, slots: list[str], done: int) -> None:
        """Step after step, the next one when the fate of the last is known: its slot is the other one's."""
        slot = 0
        while True:
            step = self._next(done)
            if step is None:
                await asyncio.sleep(SCAN_S)
                continue
            self._seal = asyncio.ensure_future(self._keep(step, slot, slots[slot]))
            await asyncio.shield(self._seal)
            while self._page.committed < step:
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self._prune, step)
            done, slot = step, 1 - slot

    def _next(self, done: int) -> int | None:
        """The first step after `done` that all ranks of this node have."""
        there = map(self._steps, self._mine.ranks)
        return min((step for step in set.intersection(*there) if step > done), default=None)

    def _steps(self, rank: int) -> set[int]:
        try:
            return files.steps_in(os.listdir(self._folder(rank)))
        except FileNotFoundError:  # the script has removed even that
            return set()

    async def _keep(self, step: int, slot: int, path: str) -> None:
        try:
            values = await asyncio.to_thread(self._pack, step, path)
        except TenplexError as error:
            self._fail_here(f"files of step {step}", error)
        except OSError as error:
            self._fail_here(f"files of step {step}", StoreError(str(error)))
        else:
            await self._make_snapshot(step, slot, values)

    def _pack(self, step: int, path: str) -> dict[str, Any]:
        """Into a slot; returns the snapshot's values: `consumed`, if a file of that name says it."""
        consumed = 0
        with open(path, "r+b") as slot:
            for entry in arena_map(self._layout, self.round.parallel, self._mine.ranks).entries:
                folder = self._folder(entry.region.offsets[0]) / files.step_name(step)
                pack(folder, slot, entry.offset, entry.num_bytes)
                with contextlib.suppress(OSError, ValueError):
                    consumed = max(consumed, int((folder / "consumed").read_text()))
        return {"consumed": consumed}

    def _prune(self, step: int) -> None:
        for rank in self._mine.ranks:
            for old in self._steps(rank):
                if old < step:
                    shutil.rmtree(self._folder(rank) / files.step_name(old), ignore_errors=True)

    # --- and back -------------------------------------------------------------------------------------------------

    def _unpack(self, restored: Restored) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        for rank in self._mine.ranks:
            folder = self._folder(rank)
            folder.mkdir(parents=True)
            if restored.index is not None:
                unpack(Path(restored.index), rank, self._row_bytes, folder / files.step_name(restored.step))


def pack(folder: Path, slot: io.BufferedRandom, offset: int, row_bytes: int) -> None:
    """Write `folder` as a tar into the row at `offset`. Raises ArenaFullError where it does not fit, StoreError."""
    slot.seek(offset + files.LENGTH.size)
    bounded = _Bounded(slot, offset, row_bytes, folder)
    try:
        # typeshed wants a whole file; to write a tar takes `write` and `tell`
        with tarfile.open(fileobj=bounded, mode="w", dereference=True) as tar:  # type: ignore[call-overload]
            tar.add(folder, ".")
        size = slot.tell() - offset - files.LENGTH.size
        slot.seek(offset)
        slot.write(files.LENGTH.pack(size))
        slot.flush()
    except OSError as error:
        raise StoreError(f"cannot keep the files of {folder}: {error}") from error


def unpack(index_path: Path, rank: int, row_bytes: int, folder: Path) -> None:
    """The files of a rank, from the pieces of a snapshot on this node. Raises StoreError, LayoutError on a gap."""
    index = Index.from_json(json.loads(index_path.read_bytes()))
    data = memoryview(bytearray(row_bytes))
    for copy in copies(files.row(rank, row_bytes), [piece for piece in index.pieces if piece.fqn == files.FQN]):
        width, (line, column) = copy.piece.region.lengths[1], copy.source.offsets
        with open(index_path.parent / copy.piece.file, "rb") as file:
            file.seek(copy.piece.offset + line * width + column)
            start = copy.dest.offsets[1]
            file.readinto(data[start : start + copy.dest.lengths[1]])
    begin = files.LENGTH.size
    content = io.BytesIO(data[begin : begin + files.LENGTH.unpack_from(data)[0]])
    try:
        with tarfile.open(fileobj=content) as tar:
            safe: Mapping[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(folder, **safe)
    except (OSError, tarfile.TarError) as error:
        raise StoreError(f"cannot restore the files of rank {rank}: {error}") from error


class _Bounded:
    """Writes on to a file, up to `num_bytes` after `start`."""

    def __init__(self, file: io.BufferedRandom, start: int, num_bytes: int, folder: Path) -> None:
        self._file, self._end, self._num_bytes, self._folder = file, start + num_bytes, num_bytes, folder
        self.tell: Callable[[], int] = file.tell

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._end:
            raise ArenaFullError(
                f"{self._folder} holds more than the {self._num_bytes} bytes that --state-files allows a rank; "
                "allow more"
            )
        return self._file.write(data)
