"""One dataset in the view's process: its extents, its rows fetched ahead, and who reads them."""

from __future__ import annotations

import contextlib
import json
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tenplexrun import places
from tenplexrun.core.extents import ALONE, Placement, Plan, spans
from tenplexrun.core.order import DataOrder
from tenplexrun.errors import DataError
from tenplexrun.samples import Catalogue, Extents, Proved
from tenplexrun.vfs.extents import Keeper, catalogue_of
from tenplexrun.vfs.homes import home_of
from tenplexrun.vfs.linked import Linked
from tenplexrun.vfs.mixed import Mixed, MixedCatalogue, blocks_of
from tenplexrun.vfs.neighbours import Neighbours
from tenplexrun.vfs.outage import Tell
from tenplexrun.vfs.remote import Remote
from tenplexrun.vfs.rows import Limits, Needs, Rows, Source
from tenplexrun.vfs.view import Catalogued, Samples

PATIENCE_S = 3.0
"""So long the first reader of a job waits; then rows that are not there yet are fetched one by one."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A view by its name below `root`, and what it shows: dp rank `rank` of `size` from `consumed` on. `bare`: only
    what a loader needs of it."""

    name: str
    root: Path
    order: DataOrder
    rank: int
    size: int
    consumed: int
    bare: bool = False


class Data:
    """`spec` below the folder `extents`. Made in a thread: it may read a lot. `sockets`: of this process, and of
    the node's store.

    A dataset no larger than the window is kept whole by every node. Raises DataError for a bad dataset.
    """

    def __init__(self, spec: str, extents: Path, sockets: tuple[str, str | None], limits: Limits, tell: Tell) -> None:
        home = home_of(spec, extents)
        self.key = home.name
        self._socket, store = sockets
        self._remote, neighbours = Remote(spec, tell), Neighbours(store, self.key)
        self.catalogue, self._mixed = _catalogues(home, self._remote)
        self._remote.fingerprint = self.catalogue.fingerprint
        self.keeper = Keeper(self._remote, self.catalogue, home, neighbours, tell, self._dropped)
        source = Source(self._remote, self.keeper, neighbours)
        self.rows = Rows(source, self.keeper, self._needs(), limits)
        self._limits = limits
        self._proved = Proved(self.catalogue, self.keeper.written)
        self._readers: weakref.WeakSet[Extents] = weakref.WeakSet()
        self._linked = self._files(home)
        self._begun = False

    @property
    def samples(self) -> Catalogued:
        """What extents are made of may be others: blocks."""
        return self._mixed or self.catalogue

    def follow(self, placement: Placement | None) -> Plan:
        """Keep what this node is to keep now. Raises ArenaFullError."""
        placement = placement or ALONE
        small = len(placement.stores) > 1 and self.catalogue.num_bytes <= self._limits.window_bytes
        plan = Plan.of(placement, self.key, self.catalogue.num_extents, self.catalogue.extent_bytes, small)
        if self.keeper.plan is None or plan != self.keeper.plan:
            self.keeper.follow(plan)
        return plan

    def reader(self, plan: Plan, about: Reader, patience_s: float) -> Samples:
        """What a view reads from. Rows that are not in this node's extents are fetched ahead for it from now on.

        At the start of a job the first reader waits for these extents, but no longer than `patience_s`. In a change the
        others would wait for it: there, rows that are not here yet are fetched as they are asked for.
        """
        started = self._begun or any(plan.held.values())
        patience_s, self._begun = 0.0 if started else patience_s, True
        self.keeper.wait(patience_s)
        find = partial(self.rows.find, about.name)
        extents = Extents(self.catalogue, str(self.keeper.home), plan.wanted, find, self._proved)
        extents.about |= {"here": spans(sorted(plan.wanted)), "socket": self._socket, "view": about.name}
        self._readers.add(extents)
        if len(self.keeper.here()) < self.catalogue.num_extents:
            first = about.order.step(about.consumed).start
            self.rows.open(about.name, about.order, about.rank, about.size, first)
        if self._mixed is None:
            return extents
        links = None
        if self._linked is not None and extents.all_here and not about.bare:
            budget = plan.placement.budgets[plan.placement.me]
            longest = self._limits.patience_s if patience_s else 0.0
            links = self._linked.use(about.name, budget, self._whole, longest)
        return Mixed(self._mixed, self.keeper.home, extents, about.root, links)

    def leave(self, name: str) -> None:
        """A view is shown no more."""
        self.rows.close(name)
        if self._linked is not None:
            plan = self.keeper.plan
            self._linked.leave(name, plan is not None and len(plan.wanted) == self.catalogue.num_extents)

    def stop(self) -> None:
        self._remote.stop()
        self.rows.stop()
        if self._linked is not None:
            self._linked.stop()
        self.keeper.stop()

    def _whole(self, seconds: float) -> bool:
        return self.keeper.wait(seconds) and len(self.keeper.here()) == self.catalogue.num_extents

    def _needs(self) -> Needs:
        if self._mixed is None:
            return Needs(lambda ids: ids, self.catalogue.sample_bytes)
        mean = self.catalogue.num_bytes // self._mixed.num_samples
        return Needs(blocks_of(self._mixed, self.keeper.home, self.catalogue.sample_bytes), mean)

    def _files(self, home: Path) -> Linked | None:
        if self._mixed is None or not self._mixed.names:
            return None
        return Linked(self._mixed, home, Extents(self.catalogue, str(home), proved=self._proved).read)

    def _dropped(self, number: int) -> None:
        for reader in list(self._readers):
            reader.forget(number)


def _catalogues(home: Path, remote: Remote) -> tuple[Catalogue, MixedCatalogue | None]:
    """Of what extents are made of, and of samples of different sizes. As they were written once: a view that is started
    again need not look at the dataset."""
    path = home / "catalogue.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, DataError):
        found = Catalogue.from_json(json.loads(path.read_text()))
        return found, None if remote.one_size else MixedCatalogue.load(home)
    mixed = None if remote.one_size else MixedCatalogue.of(remote.source)
    catalogue = catalogue_of(remote.dataset)
    home.mkdir(parents=True, exist_ok=True)
    try:
        if mixed is not None:
            mixed.save(home)
            places.save(remote.source, home)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(catalogue.to_json()))
        new.rename(path)
    except OSError as error:
        raise DataError(f"cannot write what {home} has of {remote.spec}: {error}; free some shared memory") from error
    return catalogue, mixed
