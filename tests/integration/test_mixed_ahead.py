"""Samples of different sizes of which a node keeps a part: the rest comes ahead of who reads it, within bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenplexrun.core.extents import Placement
from tenplexrun.core.order import DataOrder
from tenplexrun.formats import open_dataset
from tenplexrun.vfs.data import Data, Reader
from tenplexrun.vfs.nodes import Directory, File
from tenplexrun.vfs.rows import Limits
from tenplexrun.vfs.view import tree
from tenplexrun.vfs.window import window

SAMPLES = 2000
ORDER = DataOrder(SAMPLES, 3, 32, 4)
WINDOW_BYTES = 256 << 10
BUDGET = 512 << 10
DEADLINE_S = 60.0


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[Data]]:
    datas: list[Data] = []
    yield datas
    for data in datas:
        data.stop()


def sizes() -> list[int]:
    return np.random.default_rng(0).integers(1, 2000, size=SAMPLES).tolist()


def shown(opened: list[Data], spec: str, folder: Path) -> Directory:
    """The rows of a view on a node that has room for about a quarter."""
    data = Data(spec, folder, ("", None), Limits(WINDOW_BYTES), lambda kind, **fields: None)
    opened.append(data)
    plan = data.follow(Placement("a", {"a": ""}, {"a": BUDGET}, {}))
    assert data.keeper.wait(DEADLINE_S)
    assert len(plan.wanted) == BUDGET // data.catalogue.extent_bytes
    return tree(window(ORDER, 0, 1, 0), data.reader(plan, Reader("v", folder / "v", ORDER, 0, 1, 0), 0.0))


def read(directory: Directory, name: str, offset: int = 0, count: int = 1 << 40) -> bytes:
    node: Any = directory
    for part in name.split("/"):
        node = node.entries[part]
    assert isinstance(node, File)
    return bytes(node.read_all(offset, min(count, node.num_bytes - offset)))


def taken(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("ahead-*.rows"))


def test_packs_are_read_through_the_window(tmp_path: Path, opened: list[Data]) -> None:
    lines = [json.dumps({"number": number, "text": "x" * size}) for number, size in enumerate(sizes())]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    directory = shown(opened, f"jsonl:{tmp_path}/all.jsonl", tmp_path / "extents")
    offsets = np.frombuffer(read(directory, "offsets.npy")[128:], np.int64)
    ids = ORDER.sample_at(np.arange(SAMPLES)).tolist()
    most = 0
    for row, number in enumerate(ids):
        data = read(directory, "pack-00000.jsonl", int(offsets[row]), int(offsets[row + 1] - offsets[row]))
        assert data == lines[number].encode() + b"\n"
        most = max(most, taken(tmp_path))
    assert 0 < most <= 4 * WINDOW_BYTES, "blocks have neighbours that nobody asked for"


def test_whole_files_are_read_through_the_window(tmp_path: Path, opened: list[Data]) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    for number, size in enumerate(sizes()):
        (tmp_path / "images" / "cat" / f"{number:05d}.png").write_bytes(bytes([number % 251]) * size)
    spec = f"images:{tmp_path}/images"
    directory, dataset = shown(opened, spec, tmp_path / "extents"), open_dataset(spec)
    names = read(directory, "list.txt").decode().splitlines()
    for name, number in zip(names, ORDER.sample_at(np.arange(SAMPLES)).tolist(), strict=False):
        assert read(directory, name) == dataset.raw(number)
    assert 0 < taken(tmp_path) <= 4 * WINDOW_BYTES
