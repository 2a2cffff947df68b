"""Folders in shared memory, one for each dataset."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from tenplexrun.errors import ArenaFullError


def home_of(spec: str, directory: Path) -> Path:
    return directory / hashlib.blake2b(spec.encode(), digest_size=8).hexdigest()


def full(spec: str, num_bytes: int, directory: Path) -> ArenaFullError:
    free = shutil.disk_usage(directory).free
    return ArenaFullError(
        f"dataset {spec} needs {num_bytes} bytes of shared memory, {free} are free: free some (df -h /dev/shm), "
        "enlarge it (mount -o remount,size=...) or give a smaller dataset"
    )
