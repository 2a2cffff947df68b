"""What has been learnt of a script's imports, kept from launch to launch in the user's cache folder.

A file holds for one script as it is now and one set of installed packages: whatever changes of them makes another."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from tenplexrun.agent.script import Command

MAX_FILES = 200


class LearntModules:
    """One script's file. Nothing of it is needed: what cannot be read or written is left out."""

    def __init__(self, command: Command, environ: Mapping[str, str]) -> None:
        home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
        self._path = Path(home, "tenplexrun", "learnt", f"{_key(command, environ)}.json")
        self.modules: list[str] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.modules = [str(name) for name in json.loads(self._path.read_bytes())["modules"]]

    def add(self, modules: Sequence[str], refused: Mapping[str, str]) -> None:
        self.modules += [name for name in modules if name not in self.modules]
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = self._path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps({"modules": self.modules, "refused": dict(refused)}))
            fresh.replace(self._path)
            files = sorted(self._path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for old in files[:-MAX_FILES]:
                old.unlink()


def _key(command: Command, environ: Mapping[str, str]) -> str:
    """Of the script and its state, the interpreter, and the folders of installed packages and theirs."""
    parts: list[object] = [command.kind, sys.executable, sys.version, environ.get("PYTHONPATH", "")]
    parts += [_state(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")]
    path = os.path.join(command.cwd, command.argv[0])
    parts += [path, _state(path)] if command.kind == "script" else [command.cwd, command.argv[0]]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _state(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (path, 0, 0)
    return (path, found.st_mtime_ns, found.st_size)
