"""Where a view process may be missing FUSE, and where it has simply failed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tenplexrun.errors import DataError


def skip_or_fail(code: int, said: str) -> None:
    """The end of a view process that was to mount: skips where it was refused, else it is a failure like any other."""
    there = importlib.util.find_spec("pyfuse3") is not None and os.access("/dev/fuse", os.W_OK)
    forbidden = there and not _may_mount()
    assert code == DataError.exit_code, said
    assert not there or forbidden, f"FUSE is here, and yet: {said}"
    pytest.skip(f"no FUSE here: {said}")


def _may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN (bit 21 of capability.h): others may be forbidden it by fusermount."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective, 16) >> 21 & 1)
