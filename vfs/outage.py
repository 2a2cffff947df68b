"""What cannot be had of a dataset for a while: people hear of it once, and once when it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tenplexrun.errors import DataChangedError

Tell = Callable[..., None]


class Outage:
    """Of dataset `spec`. It begins with the first thing that cannot be had, and ends when none is left. Threads may
    share it; `tell(kind, message=...)` hears of it as "failed", and as "recovered"."""

    def __init__(self, spec: str, tell: Tell) -> None:
        self._spec, self._tell = spec, tell
        self._lock = threading.Lock()
        self._missing: set[str] = set()

    def fails(self, what: str, error: Exception) -> None:
        """`what`: extents, or rows."""
        with self._lock:
            begins = not self._missing
            self._missing.add(what)
        if begins:  # the library of a file system may have errors without words
            text = f"{what} of {self._spec} cannot be fetched"
            again = " now, which is tried again until it works" * (not isinstance(error, DataChangedError))
            self._tell("failed", message=f"{text}{again}: {error or repr(error)}")

    def works(self, what: str) -> None:
        with self._lock:
            ends = self._missing == {what}
            self._missing.discard(what)
        if ends:
            self._tell("recovered", message=f"{what} of {self._spec} can be fetched again")
