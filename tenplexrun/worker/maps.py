"""Files of the node's arena, mapped."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from tenplexrun.errors import StoreError
from tenplexrun.worker.device import Bytes


class Maps:
    """Each file of `folder` mapped once. The files keep their memory for as long as this lives, whoever removes them.

    `mode`: "r+", or "c" for private pages, so that torch may have a writable view of what nobody may change.
    """

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self._mode = folder, mode
        self._files: dict[str, Bytes] = {}

    def let_go(self) -> None:
        """Unmap all that nobody else uses, in a thread: it takes about a third of the time of a copy."""
        files, self._files = self._files, {}
        threading.Thread(target=files.clear, name="tenplexrun-unmap", daemon=True).start()

    def get(self, name: str) -> Bytes:
        """Raises StoreError."""
        if name not in self._files:
            path = self.folder / name
            try:
                self._files[name] = np.asarray(np.memmap(path, dtype=np.uint8, mode=self._mode))  # type: ignore[call-overload]
            except (OSError, ValueError) as error:
                raise StoreError(f"cannot map {path}: {error}; is the node's store alive?") from error
        return self._files[name]
