"""Whole files of a dataset in shared memory, beside its extents: what views link to.

`files/<number><suffix>`, complete once the file `linked` is there, which says how many bytes they have. They are a
second copy of the dataset, so a node has them only where it keeps the whole of it and has room for it twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tenplexrun import places
from tenplexrun.errors import DataError
from tenplexrun.vfs.extents import taken
from tenplexrun.vfs.mixed import MixedCatalogue, Read
from tenplexrun.vfs.nodes import Link

_TOGETHER = 64
_LOOK_S = 0.5
_PARTIAL = "files.partial"


class Linked:
    """The files of one dataset in `home`. `read(starts, ends)` has their bytes, from extents of this node."""

    def __init__(self, catalogue: MixedCatalogue, home: Path, read: Read) -> None:
        self._catalogue, self._home, self._read = catalogue, home, read
        self._folder, self._mark = home / "files", home / "linked"
        ends = (os.path.splitext(name)[1] for _, name in catalogue.names)
        self._links = [Link(f"{self._folder}/{number:08d}{end}") for number, end in enumerate(ends)]
        self._views: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        shutil.rmtree(home / _PARTIAL, ignore_errors=True)

    def use(self, view: str, budget: int, whole: Callable[[float], bool], patience_s: float) -> list[Link] | None:
        """Links to the files, which stay until `leave`; None: this view has to do without it.

        `whole(seconds)` waits so long for all extents of the dataset to be here. With 0 s of patience nobody waits: the
        files are written aside, for views to come.
        """
        if not self._mark.exists():
            if not self._room(budget):
                return None
            if patience_s and whole(patience_s):
                with contextlib.suppress(DataError):
                    self._write()
            elif self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._write_aside, args=(whole,), name="files", daemon=True)
                self._thread.start()
        if not self._mark.exists():
            return None
        self._views.add(view)
        return self._links

    def leave(self, view: str, kept: bool) -> None:
        """`view` is shown no more; without one, and unless `kept`, the files go."""
        self._views.discard(view)
        if not kept and not self._views and self._mark.exists():
            self._mark.unlink()
            shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        self._stopping = True
        if self._thread is not None:
            self._thread.join(1.0)

    def _room(self, budget: int) -> bool:
        num_bytes = self._catalogue.num_bytes
        return shutil.disk_usage(self._home).free >= num_bytes and taken(self._home.parent) + num_bytes <= budget

    def _write_aside(self, whole: Callable[[float], bool]) -> None:
        with contextlib.suppress(DataError):  # views go on without
            while not whole(_LOOK_S):
                if self._stopping:
                    return
                time.sleep(_LOOK_S)  # a node that is to keep less by now has nothing to wait for
            self._write()

    def _write(self) -> None:
        """Raises DataError."""
        partial = self._home / _PARTIAL
        starts, ends = places.load(self._home)
        for left in (partial, self._folder):
            shutil.rmtree(left, ignore_errors=True)
        try:
            partial.mkdir()
            for first in range(0, len(starts), _TOGETHER):
                if self._stopping:
                    raise DataError("the dataset view was told to stop while it wrote files")
                part = slice(first, first + _TOGETHER)
                data = self._read(np.asarray(starts[part]), np.asarray(ends[part]))
                for link, content in zip(self._links[part], data, strict=True):
                    with open(partial / os.path.basename(link.target), "xb") as file:
                        file.write(content)
                        os.fchmod(file.fileno(), 0o400)
            partial.rename(self._folder)
            new = self._mark.with_suffix(".new")
            new.write_text(str(self._catalogue.num_bytes))
            new.rename(self._mark)
        except OSError as error:
            raise DataError(f"cannot write {partial}: {error.strerror}") from error
        finally:
            if not self._mark.exists():
                for left in (partial, self._folder):
                    shutil.rmtree(left, ignore_errors=True)
