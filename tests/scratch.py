"""Folders of tests in shared memory: named for the process, so that it can be proved that it leaves none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PREFIX = f"tenplexrun-test-{os.getpid()}-"


def scratch_dir() -> Path:
    """A new one, for its maker to remove."""
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/dev/shm"))
