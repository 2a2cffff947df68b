"""Where checkpoints lie: folders at any fsspec URL. Imports no torch."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from tenplexrun.core import durable
from tenplexrun.core.regions import Region
from tenplexrun.errors import CheckpointError

METADATA = ".metadata"
"""The file that makes a folder a checkpoint."""
OWNER = ".tenplexrun-job"
"""The file with the name of the job that writes checkpoints here."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A range of a file. `region`: what of its tensor it holds; None for a value."""

    file: str
    offset: int
    length: int
    region: Region | None = None


class Folder:
    """A checkpoint's folder at any fsspec URL, or a local path. Errors of the file system are CheckpointErrors."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            found: tuple[AbstractFileSystem, str] = url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{url}: {error}; correct the URL, or install fsspec's package for it on all nodes"
            ) from error
        self.fs, self.path = found

    def at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def sub(self, name: str) -> Folder:
        return Folder(f"{self.url}/{name}")

    def names(self) -> list[str]:
        """Of all that is in it; nothing where there is no such folder. Raises OSError and what the backend raises."""
        self.fs.invalidate_cache()
        try:
            return sorted(path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.path, detail=False))
        except FileNotFoundError:
            return []

    def read(self, stored: Stored) -> bytes:
        """Raises CheckpointError when the bytes are not all there."""
        try:
            data = bytes(self.fs.cat_file(self.at(stored.file), start=stored.offset, end=stored.offset + stored.length))
        except Exception as error:  # whatever a backend raises
            raise CheckpointError(f"{self.url}/{stored.file} cannot be read: {reason(error)}") from error
        if len(data) != stored.length:
            raise CheckpointError(f"{self.url}/{stored.file} ends before byte {stored.offset + stored.length}")
        return data


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def trial(home: str) -> str | None:
    """Write a file below `home` and remove it. Returns why that fails, if it does."""
    try:
        folder = Folder(home)
        path = folder.at(f".trial-{uuid.uuid4().hex[:8]}")
        folder.fs.makedirs(folder.path, exist_ok=True)
        folder.fs.pipe_file(path, b"tenplexrun")
        folder.fs.rm_file(path)
    except Exception as error:  # whatever a backend raises
        return reason(error)
    return None


def claim(home: str, job: str) -> None:
    """`job` writes its checkpoints below `home` from now on, and no other. Raises CheckpointError."""
    folder = Folder(home)
    try:
        folder.fs.pipe_file(folder.at(OWNER), job.encode())
    except Exception as error:  # whatever a backend raises
        raise CheckpointError(f"{home}/{OWNER} cannot be written: {reason(error)}") from error


def check_owner(home: str, jobs: Collection[str]) -> None:
    """Raise CheckpointError if a job has claimed `home` that is none of `jobs`, the names that this one has had."""
    folder = Folder(home)
    try:
        owner = folder.fs.cat_file(folder.at(OWNER)).decode() if OWNER in folder.names() else None
    except Exception as error:  # whatever a backend raises
        raise CheckpointError(f"{home}/{OWNER} cannot be read: {reason(error)}") from error
    if owner is not None and owner not in jobs:
        raise CheckpointError(
            f"another job, {owner}, has begun to write its checkpoints to {home}: give each its own --checkpoint-dir"
        )


def candidates(home: str) -> list[tuple[int, str]]:
    """(step, folder) of each checkpoint that was published below `home`, the newest first, and of `home` itself, with
    step 0, if it is one. Raises CheckpointError."""
    folder = Folder(home)
    try:
        names = folder.names()
        steps = sorted({step: name for name in names if (step := durable.step_of(name)) is not None}.items())
        found = [(step, folder.sub(name)) for step, name in reversed(steps)]
        whole = [(step, sub.url) for step, sub in found if METADATA in sub.names()]
    except Exception as error:  # whatever a backend raises
        raise CheckpointError(f"{home} cannot be listed: {reason(error)}") from error
    return whole + ([(0, folder.url)] if METADATA in names else [])
