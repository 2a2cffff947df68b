"""Rows that are not in this node's extents: fetched ahead into files of shared memory, or when somebody asks.

A batch of rows comes from the nodes that own them, what these do not deliver from the dataset's own files. A thread
keeps the window of each view that is shown filled (`core.ahead`); readers find their rows there, and wait only for
those that are not there yet. What an older layout has fetched stays as long as its positions lie ahead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tenplexrun.core.ahead import Ahead, Chunk
from tenplexrun.core.order import DataOrder, Ids
from tenplexrun.errors import DataChangedError, DataError
from tenplexrun.samples import Catalogue, found_in, read_rows, rows_places
from tenplexrun.vfs.extents import Keeper, present
from tenplexrun.vfs.neighbours import Neighbours, Run
from tenplexrun.vfs.remote import Remote

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0
_NAME = re.compile(r"ahead-(\d+)-([0-9a-f]*)-(\d+)-(\d+)\.rows")


@dataclass(frozen=True, slots=True)
class Limits:
    """`window_bytes`: of what is fetched ahead for each view. `patience_s`: so long a reader waits for rows that cannot
    be fetched, asked for again and again, before it gets an error."""

    window_bytes: int
    patience_s: float = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows in a file: ids ascending, for positions [first, stop) of `order`."""

    path: Path
    order: str
    first: int
    stop: int
    ids: Ids


class Source:
    """Fetches rows of one dataset into files beside its extents."""

    def __init__(self, remote: Remote, keeper: Keeper, neighbours: Neighbours) -> None:
        self._remote, self._keeper, self._neighbours = remote, keeper, neighbours
        self.catalogue: Catalogue = keeper.catalogue
        self.left = sorted(self._left(), key=lambda batch: batch.first)
        """What a predecessor has fetched that was killed."""
        self._numbers = itertools.count(1 + max((int(_place(batch.path)[0]) for batch in self.left), default=0))

    def _left(self) -> Iterator[Batch]:
        for path in self._keeper.home.glob("ahead-*"):
            if _NAME.fullmatch(path.name):
                ids, _ = read_rows(str(path), self.catalogue.sample_bytes)
                _, order, first, stop = _place(path)
                yield Batch(path, order, int(first), int(stop), np.array(ids))
            else:
                path.unlink()

    def fetch(self, ids: Ids, order: str, first: int, stop: int) -> Batch:
        """The rows of `ids`, ascending, each once. Raises DataError, OSError when some cannot be had now."""
        size = self.catalogue.sample_bytes
        path = self._keeper.home / f"ahead-{next(self._numbers)}-{order}-{first}-{stop}.rows"
        start, end = rows_places(len(ids), size)
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, end)
                file.write(np.concatenate(([len(ids)], ids)).astype(np.int64).tobytes())
                file.flush()
                runs = self._runs(ids)
                missing = self._neighbours.fetch(str(partial), start, size, runs)
                offsets = np.cumsum([0, *(run.count for run in runs)])
                left = [np.arange(offsets[index], offsets[index + 1]) for index in missing]
                if left:
                    self._read(ids, np.concatenate(left), file.fileno(), start)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return Batch(path, order, first, stop, ids)

    def _runs(self, ids: Ids) -> list[Run]:
        """Consecutive samples of one extent together, each with the stores that have it."""
        per, plan = self.catalogue.samples_per_extent, self._keeper.plan
        assert plan is not None
        numbers = ids // per
        cuts = np.flatnonzero((np.diff(ids) != 1) | (np.diff(numbers) != 0)) + 1
        found, sources = [], {number: plan.sources(number) for number in np.unique(numbers).tolist()}
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ids)], strict=True):
            number = int(numbers[begin])
            found.append(Run(number, int(ids[begin]) - number * per, end - begin, sources[number]))
        return found

    def _read(self, ids: Ids, rows: npt.NDArray[np.int64], fd: int, start: int) -> None:
        size = self.catalogue.sample_bytes
        for row, values in zip(rows.tolist(), self._remote.gather(ids[rows]), strict=True):
            os.pwrite(fd, values.data, start + row * size)


@dataclass(frozen=True, slots=True)
class Needs:
    """What samples are to extents: `rows_of` some ids, ascending, each once, and how many bytes a sample has of them,
    on average."""

    rows_of: Callable[[Ids], Ids]
    sample_bytes: int


class Rows:
    """The rows that views of one dataset need and this node does not own. All methods may be called by any thread."""

    def __init__(self, source: Source, keeper: Keeper, needs: Needs, limits: Limits) -> None:
        self._source, self._keeper, self._needs = source, keeper, needs
        self._limit_rows = max(1, limits.window_bytes // (needs.sample_bytes + 8))
        self._patience_s = limits.patience_s
        self._windows: dict[str, Ahead] = {}
        self._batches = source.left
        self._busy: Chunk | None = None
        self._stuck: list[Ahead] = []  # whose next rows cannot be had now
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)

    def open(self, name: str, order: DataOrder, rank: int, size: int, begin: int) -> None:
        """A view is shown: keep its next rows here. `begin`: as it was shown; one that is shown again after a kill -9
        has been read further, as what was fetched for it says."""
        with self._changed:
            key = _key(order)
            begin = max(begin, min((batch.first for batch in self._batches if batch.order == key), default=begin))
            self._windows[name] = Ahead(order, rank, size, self._limit_rows, begin)
            if not self._thread.is_alive():
                self._thread.start()
            self._changed.notify_all()

    def close(self, name: str) -> None:
        """Its readers have left. What it fetched stays for those who read on in the same order."""
        with self._changed:
            self._windows.pop(name, None)

    def find(self, name: str, ids: Ids, begin: int | None) -> list[str]:
        """The files with all these rows. Waits for them; raises DataError where they cannot be had for a long
        time, DataChangedError at once."""
        self._suspect(ids)
        ids = np.unique(ids)
        with self._changed:
            window = self._windows.get(name)
            if window is not None and begin is not None:
                window.reach(begin)
                self._drop_passed()
                self._changed.notify_all()
            order, first = (_key(window.order), begin or 0) if window is not None else ("", 0)
        deadline, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            with self._changed:
                found, left = self._look(ids)
                while len(left) and self._comes(left):
                    self._changed.wait(_LAST_PAUSE_S)
                    found, left = self._look(ids)
            if not len(left):
                return [str(batch.path) for batch in found]
            try:
                batch = self._source.fetch(left, order, first, first + 1)
            except DataChangedError:
                raise
            except (DataError, OSError) as error:
                if time.monotonic() > deadline or self._stopping:
                    raise DataError(f"{error} (tried again for {self._patience_s:g} s)") from error
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
                continue
            with self._changed:
                self._batches.append(batch)

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # --- inside: with the lock held -------------------------------------------------------------------------------

    def _look(self, ids: Ids) -> tuple[list[Batch], Ids]:
        """The batches that have some of `ids`, and those that are in none."""
        found = []
        for batch in self._batches:
            if not len(ids):
                break
            there, _ = found_in(ids, batch.ids)
            if there.any():
                found.append(batch)
                ids = ids[~there]
        return found, ids

    def _comes(self, ids: Ids) -> bool:
        """Whether the chunk that is under way will bring some of them."""
        return self._busy is not None and bool(found_in(ids, self._busy.ids)[0].any())

    def _drop_passed(self) -> None:
        """What ends before all windows of its order is not needed any more; without a window nobody knows yet."""
        kept_from: dict[str, int] = {}
        for window in self._windows.values():
            key = _key(window.order)
            kept_from[key] = min(window.kept_from, kept_from.get(key, window.kept_from))
        passed = [b for b in self._batches if b.order in kept_from and b.stop <= kept_from[b.order]]
        strangers = [batch for batch in self._batches if not batch.order][:-8]
        for batch in [*passed, *strangers]:
            self._batches.remove(batch)
            batch.path.unlink(missing_ok=True)

    def _next(self, here: Collection[int]) -> Ahead | None:
        """The window that is nearest to its end; None where nothing will be missing. `here`: the extents."""
        if len(here) == self._source.catalogue.num_extents:
            return None
        hungry = [window for window in self._windows.values() if not window.full]
        return min(hungry, key=lambda window: window.fetched - window.reached, default=None)

    def _elsewhere(self, ids: Ids, here: Collection[int]) -> Ids:
        """Those whose extents are not `here`: others own them, or they are not loaded yet, or there is no room."""
        return ids[~np.isin(ids // self._source.catalogue.samples_per_extent, [*here])]

    def _note(self, window: Ahead, fetched: bool) -> None:
        """One window's rows may come while another's do not: the outage is over when all do that are still needed."""
        others = [one for one in self._stuck if one is not window and one in self._windows.values()]
        self._stuck = others if fetched else [*others, window]
        if not self._stuck:
            self._keeper.outage.works("rows")

    # --- without --------------------------------------------------------------------------------------------------

    def _suspect(self, ids: Ids) -> None:
        """Somebody asks for rows whose extents are here: a reader has found them damaged."""
        plan = self._keeper.plan
        asked = set((ids // self._source.catalogue.samples_per_extent).tolist())
        if plan is not None and (ours := asked & plan.wanted):
            self._keeper.suspect(ours & present(self._keeper.home))

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            here = self._keeper.here()
            with self._changed:
                if self._stopping:
                    return
                if (window := self._next(here)) is None:
                    self._changed.wait()
                    continue
            chunk = window.next_chunk()  # without the lock, as the listing above: many small steps take a while
            if chunk is None:
                continue
            ids = self._elsewhere(self._needs.rows_of(chunk.ids), here)
            with self._changed:
                _, absent = self._look(ids)
                if not len(absent):
                    window.done(chunk)
                    continue
                self._busy = chunk = dataclasses.replace(chunk, ids=absent)
            batch = None
            try:
                batch = self._source.fetch(chunk.ids, _key(window.order), chunk.first, chunk.stop)
            except Exception as error:  # a dataset's library has its own; readers would wait for a dead thread
                self._keeper.outage.fails("rows", error)
            with self._changed:
                self._busy = None
                if batch is not None:
                    self._batches.append(batch)
                    window.done(chunk)
                    self._drop_passed()
                self._note(window, batch is not None)
                self._changed.notify_all()
                if batch is None and not self._stopping:
                    self._changed.wait(pause)
            pause = min(2 * pause, _LAST_PAUSE_S) if batch is None else _FIRST_PAUSE_S


def _key(order: DataOrder) -> str:
    """The same for orders under which a position means the same sample."""
    text = f"{order.num_samples} {order.seed} {order.algo} {order.fingerprint}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _place(path: Path) -> tuple[str, ...]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return match.groups()
