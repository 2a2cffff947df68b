"""What happened, as JSON lines for machines and short sentences for people."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tenplexrun.errors import UsageError


class EventLog:
    """Writes events of one node: `{"t": Unix seconds, "node", "event", ...}`, one a line, to `path`, and if
    asked to stderr."""

    def __init__(self, node: str, path: Path | None, on_stderr: bool = False) -> None:
        self.node, self._on_stderr = node, on_stderr
        self._file = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", buffering=1, encoding="utf-8")
            except OSError as error:
                raise UsageError(f"cannot write events to {path}: {error.strerror}; see --events, --log-dir") from None

    def emit(self, event: str, /, **fields: Any) -> None:
        if self._file is None and not self._on_stderr:
            return
        line = json.dumps({"t": time.time(), "node": self.node, "event": event, **fields}, separators=(",", ":")) + "\n"
        for file in filter(None, (self._file, sys.stderr if self._on_stderr else None)):
            file.write(line)

    def say(self, sentence: str) -> None:
        """One line for the person at the terminal, with a stamp in milliseconds."""
        now = time.time()
        stamp = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03d}"
        sys.stderr.write(f"tenplexrun {stamp} [{self.node}] {sentence}\n")
        sys.stderr.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
