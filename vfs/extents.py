"""This node's extents of one dataset: files in shared memory, as the plan of the round says.

`<directory>/<key of the spec>/` holds an extent as two files (see `tenplexrun.samples`); the checksums come by rename
before the samples do, so that whatever is killed when, an extent that is there is whole. What this node lacks comes
from other nodes that hold it, through the node's store, else from the dataset's own files. What it held and another
node owns now goes as soon as that one has it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from tenplexrun.core.extents import Plan
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.errors import ArenaFullError, DataError
from tenplexrun.samples import Catalogue, block_sums, extent_name, samples_per_extent, sums_name
from tenplexrun.vfs.homes import full
from tenplexrun.vfs.neighbours import Neighbours, Run
from tenplexrun.vfs.outage import Outage, Tell
from tenplexrun.vfs.remote import Remote

EXTENT_BYTES, LEAST_EXTENT_BYTES, EXTENTS = 32 << 20, 256 << 10, 64
_COPY_BYTES = 4 << 20
_LOOK_S, _LAST_PAUSE_S = 1.0, 30.0
_NEWS_S = 2.0  # between reports while extents are fetched
_PARTIAL = ".partial"


def catalogue_of(dataset: Dataset) -> Catalogue:
    """With some dozens of extents to share, of a size that is good to move."""
    size = dataset.sample_bytes
    wanted = min(max(dataset.num_bytes // EXTENTS, LEAST_EXTENT_BYTES), EXTENT_BYTES)
    per_extent = min(samples_per_extent(size, wanted), dataset.num_samples)
    return Catalogue(dataset.num_samples, dataset.dtype, dataset.shape, dataset.fingerprint(), per_extent)


def present(home: Path) -> set[int]:
    """The extents in a folder."""
    with contextlib.suppress(FileNotFoundError):
        return {int(match[1]) for name in os.listdir(home) if (match := re.fullmatch(r"extent-(\d+)\.bin", name))}
    return set()


def taken(directory: Path) -> int:
    """Bytes that datasets take below `directory`: their extents, and files that views link to (`vfs.linked`)."""
    files = sum(int(path.read_text()) for path in directory.glob("*/linked"))
    return files + sum(path.stat().st_size for path in directory.glob("*/extent-*.bin"))


class Keeper:
    """Keeps the extents of one dataset in `home`, in a thread of its own.

    `follow` a plan; `tell(kind, **fields)` hears what became of it, `dropped(number)` of an extent that is gone.
    """

    def __init__(
        self,
        remote: Remote,
        catalogue: Catalogue,
        home: Path,
        neighbours: Neighbours,
        tell: Tell,
        dropped: Callable[[int], None],
    ) -> None:
        self._remote, self.catalogue, self.home = remote, catalogue, home
        self._neighbours, self._tell, self._dropped = neighbours, tell, dropped
        self.outage = Outage(remote.spec, tell)
        self.plan: Plan | None = None
        self.written: set[int] = set()
        """Extents that this process has written, and which are still here."""
        self._settled = threading.Event()
        self._wake = threading.Event()
        self._stopping = False
        self._moved = {"peers": 0, "files": 0}
        self._reported: Plan | None = None  # as all here
        self._lacking_room: Plan | None = None  # as told
        self._thread = threading.Thread(target=self._run, name="extents", daemon=True)
        home.mkdir(parents=True, exist_ok=True)

    def follow(self, plan: Plan) -> None:
        """From now on. Raises ArenaFullError where shared memory is too small for it."""
        missing = self.catalogue.bytes_of(plan.wanted - present(self.home))
        if shutil.disk_usage(self.home).free < missing:
            raise full(self._remote.spec, missing, self.home)
        self._settled.clear()
        self.plan = plan
        self._wake.set()
        if not self._thread.is_alive():
            self._thread.start()

    def here(self) -> set[int]:
        """The extents that this node is to have, and has."""
        return present(self.home) & self.plan.wanted if self.plan is not None else set()

    def wait(self, seconds: float) -> bool:
        """Until all that the plan wants is here, or so long. Returns whether it is."""
        return self._settled.wait(seconds)

    def suspect(self, numbers: Collection[int]) -> None:
        """Somebody has found an extent damaged: prove it, and have a damaged one fetched anew."""
        for number in numbers:
            if not self._intact(number) and (self.home / extent_name(number)).exists():  # else it was dropped just now
                self._drop(number)
                self._tell("failed", message=f"extent {number} of {self._remote.spec} is damaged, fetched anew")
                self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_LOOK_S)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        for left in self.home.glob(f"extent-*{_PARTIAL}"):
            left.unlink()
        pause = _LOOK_S
        while not self._stopping:
            self._wake.clear()
            plan = self.plan
            assert plan is not None
            try:
                if self._load_all(plan):
                    self._settled.set()
                    self.outage.works("extents")
                    if self._reported is not plan:
                        self._report(plan, whole=True)
                self._give(plan)
                pause = _LOOK_S
            except Exception as error:  # a dataset's library has its own; this thread must live on
                self._failed(plan, error)
                pause = min(2 * pause, _LAST_PAUSE_S)
                with contextlib.suppress(OSError):
                    self._give(plan)
            self._wake.wait(pause)

    def _failed(self, plan: Plan, error: Exception) -> None:
        if not isinstance(error, ArenaFullError):
            self.outage.fails("extents", error)
            return
        if self._lacking_room is not plan:  # which lasts: rows come from elsewhere, and that may well have an outage
            self._lacking_room = plan
            self._tell("failed", message=f"{error}; what has none is fetched row by row")

    def _load_all(self, plan: Plan) -> bool:
        """Fetch what is missing. Returns whether all is here; a newer plan ends it."""
        news_at = 0.0
        for number in sorted(plan.wanted - present(self.home)):
            if self._stopping or self.plan is not plan:
                return False
            if time.monotonic() >= news_at:
                self._report(plan, whole=False)
                news_at = time.monotonic() + _NEWS_S
            self._load(number, plan)
        return self.plan is plan

    def _load(self, number: int, plan: Plan) -> None:
        partial, num_bytes = self.home / (extent_name(number) + _PARTIAL), self.catalogue.bytes_of([number])
        self._check_budget(plan, num_bytes)
        with open(partial, "wb+") as file:
            try:
                # Reserved first: a write to a full tmpfs through a mapping would be a SIGBUS, not an error.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                partial.unlink()
                if error.errno == errno.ENOSPC:
                    raise full(self._remote.spec, num_bytes, self.home) from error
                raise DataError(f"cannot write {partial}: {error.strerror}") from error
            run = Run(number, 0, self.catalogue.samples_in(number), plan.sources(number))
            from_peers = not self._neighbours.fetch(str(partial), 0, self.catalogue.sample_bytes, [run])
            if not from_peers:
                self._read(number, file.fileno())
            sums = block_sums(np.memmap(file, dtype=np.uint8, mode="r").data, self.catalogue)
        self._moved["peers" if from_peers else "files"] += num_bytes
        (self.home / (sums_name(number) + _PARTIAL)).write_bytes(sums.tobytes())
        (self.home / (sums_name(number) + _PARTIAL)).rename(self.home / sums_name(number))
        partial.chmod(0o400)
        partial.rename(self.home / extent_name(number))
        self._dropped(number)  # an older file of it, if there was one
        self.written.add(number)

    def _check_budget(self, plan: Plan, num_bytes: int) -> None:
        """A plan is of one dataset, the budget is for all. Raises ArenaFullError."""
        budget = plan.placement.budgets[plan.placement.me]
        used = taken(self.home.parent)
        if used + num_bytes > budget and len(plan.wanted) == len(plan.mine):
            raise ArenaFullError(
                f"no room for more of {self._remote.spec}: datasets have {used} of the {budget} bytes that "
                "--data-memory allows"
            )

    def _read(self, number: int, fd: int) -> None:
        """From the dataset's own files."""
        begin = offset = number * self.catalogue.extent_bytes
        end = begin + self.catalogue.bytes_of([number])
        while offset < end:
            if self._stopping:
                raise DataError(f"dataset {self._remote.spec}: the view was told to stop while it copied the samples")
            block = self._remote.read(offset, min(_COPY_BYTES, end - offset))
            os.pwrite(fd, block, offset - begin)
            offset += len(block)

    def _give(self, plan: Plan) -> None:
        """Drop what another node owns, once it has it."""
        extra = sorted(present(self.home) - plan.wanted)
        owned = [number for number in extra if number in plan.owner]
        probes = [Run(number, 0, 1, (plan.placement.stores[plan.owner[number]],)) for number in owned]
        waiting = {owned[index] for index in self._neighbours.probe(self.home, self.catalogue.sample_bytes, probes)}
        for number in extra:
            if number not in waiting:
                self._drop(number)

    def _drop(self, number: int) -> None:
        for name in (extent_name(number), sums_name(number)):
            with contextlib.suppress(FileNotFoundError):
                (self.home / name).unlink()
        self.written.discard(number)
        self._dropped(number)

    def _intact(self, number: int) -> bool:
        try:
            sums = np.fromfile(self.home / sums_name(number), np.uint64)
            data = np.memmap(self.home / extent_name(number), dtype=np.uint8, mode="r").data
        except (OSError, ValueError):  # without checksums, or empty
            return False
        return np.array_equal(block_sums(data, self.catalogue), sums)

    def _report(self, plan: Plan, whole: bool) -> None:
        catalogue, placement, moved = self.catalogue, plan.placement, self._moved
        self._reported = plan if whole else None
        if whole:
            self._moved = {"peers": 0, "files": 0}
        record: dict[str, Any] = {
            "dataset": self._remote.spec,
            "owned": len(plan.mine),
            "extents": catalogue.num_extents,
            "unowned": catalogue.num_extents - len(plan.owner),
            "num_bytes": catalogue.bytes_of(plan.mine),
            "wanted_bytes": catalogue.bytes_of(plan.wanted),
            "here_bytes": catalogue.bytes_of(plan.wanted & present(self.home)),
            "whole": whole,
            "total_bytes": catalogue.num_bytes,
            "budget": placement.budgets[placement.me],
            "moved": moved["peers"] + moved["files"],
            "from_peers": moved["peers"],
            "bound": catalogue.bytes_of(plan.lacked()),
        }
        self._tell("extents", **record)
