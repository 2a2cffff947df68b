"""What all formats share: options of a dataset's name, and listing files."""

from __future__ import annotations

import fnmatch
import glob as globbing
import os
from collections.abc import Mapping

from tenplexrun.datasets.dataset import Piece
from tenplexrun.errors import DataError

Options = Mapping[str, list[str]]


def option(options: Options, name: str, default: str) -> str:
    return options.get(name, [default])[-1]


def positive(spec: str, options: Options, name: str, example: int) -> int:
    """The option `name`, a whole number of at least 1. Raises DataError without one."""
    text = option(options, name, "")
    if not text.isdecimal() or int(text) < 1:
        raise DataError(f"dataset {spec}: give {name}, for example {name}={example}")
    return int(text)


def list_files(root: str, options: Options, pattern: str = "**/*") -> list[str]:
    """`root` itself if it is a file, else the regular files below it that match the options glob and exclude, sorted by
    the bytes of their relative names: the same order on every node."""
    if os.path.isfile(root):
        return [root]
    names = (
        os.fsencode(name) for name in globbing.glob(option(options, "glob", pattern), root_dir=root, recursive=True)
    )
    kept = (os.fsdecode(name) for name in sorted(set(names)))
    excluded = options.get("exclude", [])
    paths = (os.path.join(root, name) for name in kept if not any(fnmatch.fnmatchcase(name, e) for e in excluded))
    return [path for path in paths if os.path.isfile(path)]


def whole(path: str) -> Piece:
    return Piece(path, 0, os.stat(path).st_size)
