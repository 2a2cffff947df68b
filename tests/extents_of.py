"""A dataset as a node without a job keeps it: all of it."""

from __future__ import annotations

from pathlib import Path

from tenplexrun.core.order import DataOrder
from tenplexrun.samples import Extents
from tenplexrun.vfs.data import Data, Reader
from tenplexrun.vfs.mixed import Mixed
from tenplexrun.vfs.rows import Limits
from tenplexrun.worker.data import Gathered, Loader, open_view
from tenplexrun.worker.shared import open_extents

DEADLINE_S = 60.0


def data_of(spec: str, directory: Path) -> Data:
    """To be stopped by the caller. Raises DataError."""
    return Data(spec, directory, ("", None), Limits(1 << 30), lambda kind, **fields: None)


def extents_of(spec: str, directory: Path) -> Extents:
    """Below `directory`, written unless they are there. Raises DataError, ArenaFullError."""
    data = data_of(spec, directory)
    try:
        data.follow(None)
        assert data.keeper.wait(DEADLINE_S)
        return Extents(data.catalogue, str(data.keeper.home))
    finally:
        data.stop()


def mixed_of(data: Data, root: Path) -> Mixed:
    """What a view at `root` reads from, all of it here."""
    count = data.samples.num_samples
    about = Reader("dp-0000/round-0", root, DataOrder(count, 0, 1, 1), 0, 1, 0)
    found = data.reader(data.follow(None), about, DEADLINE_S)
    assert isinstance(found, Mixed)
    return found


def loader_of(view: Path, rank: int, size: int, consumed: int) -> Loader:
    """Reads from the extents behind a view."""
    index, order = open_view(str(view))
    return Loader(Gathered(open_extents(index).gather), order, rank, size, consumed)
