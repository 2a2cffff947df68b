"""One dataset in the view's process: its extents, its rows fetched ahead, and who reads them."""

from __future__ import annotations

import contextlib
import json
import weakref
from functools import partial
from pathlib import Path

from tenplexrun.core.extents import ALONE, Placement, Plan, spans
from tenplexrun.core.order import DataOrder
from tenplexrun.errors import DataError
from tenplexrun.samples import Catalogue, Extents, Proved
from tenplexrun.vfs.extents import Keeper, catalogue_of
from tenplexrun.vfs.homes import home_of
from tenplexrun.vfs.neighbours import Neighbours
from tenplexrun.vfs.outage import Tell
from tenplexrun.vfs.remote import Remote
from tenplexrun.vfs.rows import Limits, Rows, Source

PATIENCE_S = 3.0
"""So long the first reader waits for its extents; then rows that are not there yet are fetched one by one."""


class Data:
    """`spec` below the folder `extents`. Made in a thread: it may read a lot. `sockets`: of this process, and of
    the node's store.

    A dataset no larger than the window is kept whole by every node. Raises DataError for a bad dataset.
    """

    def __init__(self, spec: str, extents: Path, sockets: tuple[str, str | None], limits: Limits, tell: Tell) -> None:
        home = home_of(spec, extents)
        self.key = home.name
        self._socket, store = sockets
        self._remote, neighbours = Remote(spec), Neighbours(store, self.key)
        self.catalogue = _catalogue(home, self._remote)
        self.keeper = Keeper(self._remote, self.catalogue, home, neighbours, tell, self._dropped)
        self.rows = Rows(Source(self._remote, self.keeper, neighbours), self.keeper, limits)
        self._window_bytes = limits.window_bytes
        self._proved = Proved(self.catalogue, self.keeper.written)
        self._readers: weakref.WeakSet[Extents] = weakref.WeakSet()

    def follow(self, placement: Placement | None) -> Plan:
        """Keep what this node is to keep now. Raises ArenaFullError."""
        placement = placement or ALONE
        small = len(placement.stores) > 1 and self.catalogue.num_bytes <= self._window_bytes
        plan = Plan.of(placement, self.key, self.catalogue.num_extents, self.catalogue.extent_bytes, small)
        if self.keeper.plan is None or plan != self.keeper.plan:
            self.keeper.follow(plan)
        return plan

    def reader(self, name: str, plan: Plan, order: DataOrder, rank: int, size: int, consumed: int) -> Extents:
        """For the view `name`. Rows that are not in this node's extents are fetched ahead for it from now on."""
        find = partial(self.rows.find, name)
        extents = Extents(self.catalogue, str(self.keeper.home), plan.wanted, find, self._proved)
        extents.about |= {"here": spans(sorted(plan.wanted)), "socket": self._socket, "view": name}
        self._readers.add(extents)
        if not extents.all_here:
            self.rows.open(name, order, rank, size, order.step(consumed).start)
        return extents

    def stop(self) -> None:
        self._remote.stop()
        self.rows.stop()
        self.keeper.stop()

    def _dropped(self, number: int) -> None:
        for reader in list(self._readers):
            reader.forget(number)


def _catalogue(home: Path, remote: Remote) -> Catalogue:
    """As it was written once: a view that is started again need not look at the dataset."""
    path = home / "catalogue.json"
    with contextlib.suppress(FileNotFoundError, ValueError, DataError):
        return Catalogue.from_json(json.loads(path.read_text()))
    catalogue = catalogue_of(remote.dataset)
    home.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(catalogue.to_json()))
    new.rename(path)
    return catalogue
