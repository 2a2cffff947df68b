"""Mounts of this host: which there are, and how to be rid of them. Needs no FUSE library."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

from tenplexrun.errors import DataError

_READ_AHEAD_KB = 1024


def clear(path: Path) -> None:
    """Unmount every file system stacked at `path`, dead or hung ones too. Raises DataError when one stays."""
    for _ in range(32):
        minors = minors_at(path)
        if not minors:
            return
        # Force as well as detach: that frees the readers of a server that is stopped. Users have the abort file for it.
        command = ["umount", "-f", "-l"] if os.getuid() == 0 else ["fusermount3", "-u", "-z"]
        with contextlib.suppress(OSError):
            Path(f"/sys/fs/fuse/connections/{minors[-1]}/abort").write_text("1")
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    raise DataError(f"cannot unmount {path}: {done.stderr.strip()}; unmount it by hand (umount -l {path})")


def minors_at(path: Path) -> list[str]:
    """Minor device numbers of what is mounted at `path`, the topmost last.

    Read from /proc: a stat of a mount that this process serves would wait for itself.
    """
    minors = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        device, place = line.split()[2], line.split()[4]
        if re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place) == str(path):
            minors.append(device.partition(":")[2])
    return minors


def raise_read_ahead(path: Path) -> None:
    """Let the kernel ask for 1 MiB at once instead of 128 KiB where we may (root only)."""
    for minor in minors_at(path):
        with contextlib.suppress(OSError):
            Path(f"/sys/class/bdi/0:{minor}/read_ahead_kb").write_text(str(_READ_AHEAD_KB))
