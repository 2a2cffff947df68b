"""Folders in shared memory, one for each dataset, that are there when they are complete."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tenplexrun.errors import ArenaFullError

_PARTIAL = ".partial"


def home_of(spec: str, directory: Path) -> Path:
    return directory / hashlib.blake2b(spec.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def appearing(home: Path) -> Iterator[Path]:
    """A new folder, which becomes `home` at the end; after an exception nothing is left."""
    partial = home.with_suffix(_PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(home)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def full(spec: str, num_bytes: int, directory: Path) -> ArenaFullError:
    free = shutil.disk_usage(directory).free
    return ArenaFullError(
        f"dataset {spec} needs {num_bytes} bytes of shared memory, {free} are free: free some (df -h /dev/shm), "
        "enlarge it (mount -o remount,size=...) or give a smaller dataset"
    )
