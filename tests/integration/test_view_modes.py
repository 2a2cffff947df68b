"""How the view is shown where mounting, memory or the configuration are not what they might be."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenplexrun import channel
from tenplexrun.errors import ArenaFullError, WireError
from tenplexrun.vfs.client import ViewClient

from .test_view_process import Process, order, rows, start

__all__ = ["order", "rows", "start"]  # fixtures


def without_sys_admin() -> tuple[str, ...]:
    """A prefix that runs a command without the right to mount."""
    prefix = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to take the right to mount away")
    return prefix


def test_without_the_right_to_mount_it_is_a_farm(start: Callable[..., Process], order: dict[str, Any]) -> None:
    view = start("auto", without_sys_admin())
    hello = view.ask(lambda client: client.hello())
    assert hello["mode"] == "farm"
    assert "cannot mount" in hello["reason"] or "/dev/fuse" in hello["reason"]
    assert (view.show(1, order) / "list.txt").read_text() == "pack-00000.bin\n"
    code, said = view.end(signal.SIGTERM)
    assert (code, said) == (0, "")


def test_fuse_or_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = Process(home, "fuse", without_sys_admin()).start()
    code, said = view.end(0)
    assert (code, said.count("\n")) == (69, 1), said
    assert "mode farm" in said
    monkeypatch.setattr(channel, "RESTART_S", 0.1)
    with pytest.raises(WireError, match="cannot reach"):
        asyncio.run(ViewClient(str(view.socket)).show(1, {}, 0, 1, 0))


def test_bad_configuration(home: Path) -> None:
    assert Process(home, "ramdisk").start().end(0)[0] == 2
    done = subprocess.run(
        [sys.executable, "-m", "tenplexrun.vfs.server", "{"], cwd=home, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_full_shared_memory(home: Path, start: Callable[..., Process], order: dict[str, Any]) -> None:
    (home / "extents").mkdir()
    size = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(home / "extents")]
    if subprocess.run(size, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        view = start("auto")
        with pytest.raises(ArenaFullError, match="needs 100300 bytes of shared memory, 61440 are free"):
            view.show(1, order)
        assert [path.name for path in (home / "extents").glob("*/*")] == ["catalogue.json"]
        assert view.end(signal.SIGTERM)[0] == 0
    finally:
        subprocess.run(["umount", str(home / "extents")], check=True)
