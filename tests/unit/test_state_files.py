"""Files of ranks as rows of state: what comes out is what went in, whatever it lies in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tenplexrun.agent.state_files import pack, unpack
from tenplexrun.config import parse
from tenplexrun.core.files import LENGTH, files_layout, is_of, row, steps_in
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.pieces import Index, Piece
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Claim, Holding, SnapshotId
from tenplexrun.errors import ArenaFullError, LayoutError, UsageError

ROW = 64 << 10


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    path = tmp_path / "slot"
    path.write_bytes(bytes(range(256)) * (3 * ROW // 256))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step-7"
    (folder / "below" / "empty").mkdir(parents=True)
    (folder / "state.pt").write_bytes(os.urandom(20_000))
    (folder / "below" / "x").write_text("x")
    (folder / "link").symlink_to("state.pt")
    return folder


def index_of(tmp_path: Path, pieces: list[tuple[Region, int]]) -> Path:
    listed = tuple(Piece("files", box, "uint8", "slot", offset, box.num_elements, 0) for box, offset in pieces)
    path = tmp_path / "index.json"
    path.write_text(json.dumps(Index(SnapshotId(0, 7, "d"), True, 0, None, (), listed).to_json()))
    return path


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize("pieces", [[(row(1, ROW), ROW)], [(Region((0, 0), (3, ROW)), 0)], "parts"])
def test_a_row_is_found_whole_among_others_or_in_parts(
    tmp_path: Path, slot: Path, folder: Path, pieces: list[tuple[Region, int]] | str
) -> None:
    with open(slot, "r+b") as file:
        pack(folder, file, ROW, ROW)
    data = slot.read_bytes()
    if isinstance(pieces, str):
        slot.write_bytes(data[ROW + 1000 : 2 * ROW] + data[ROW : ROW + 1000])
        pieces = [(Region((1, 1000), (1, ROW - 1000)), 0), (Region((1, 0), (1, 1000)), ROW - 1000)]
    else:
        assert data[:ROW] + data[2 * ROW :] == bytes(range(256)) * (2 * ROW // 256), "nothing but the row is written"
    unpack(index_of(tmp_path, pieces), 1, ROW, tmp_path / "again")
    assert content(tmp_path / "again") == content(folder)


def test_what_does_not_fit_or_is_not_there_is_refused(tmp_path: Path, slot: Path, folder: Path) -> None:
    before = slot.read_bytes()
    with (
        open(slot, "r+b") as file,
        pytest.raises(ArenaFullError, match="step-7 holds more than the 20000 bytes that --state-files"),
    ):
        pack(folder, file, 0, 20_000)
    assert slot.read_bytes()[20_000:] == before[20_000:]
    with pytest.raises(LayoutError, match="is in none of"):
        unpack(index_of(tmp_path, [(row(0, ROW), 0)]), 1, ROW, tmp_path / "again")
    assert LENGTH.size == 8


def test_only_renamed_folders_are_steps() -> None:
    assert steps_in(["step-3", "step-10", "step-4.tmp", "step-05", "step--1", "steps", "step-", "xstep-9"]) == {3, 10}


def test_files_are_those_of_their_layout_alone() -> None:
    config, other = ParallelConfig(dp=2), ParallelConfig(tp=2)
    layout = files_layout(config, ROW)
    snapshot = SnapshotId(0, 7, layout.digest)
    held = [Holding(snapshot, (Claim(config, (0,)),))]
    assert layout.regions_of(config, 1) == {"files": (row(1, ROW),)}
    assert is_of(snapshot, held, config, ROW)
    assert not is_of(snapshot, held, other, ROW)
    assert not is_of(snapshot, held, config, ROW + 1)
    assert not is_of(snapshot, held, ParallelConfig(dp=4), ROW)
    assert not is_of(None, [], config, ROW)
    for sizes in ({"dp": 1}, {"dp": 3}, {"pp": 4, "dp": 2}):
        layout.check(ParallelConfig(**sizes))  # type: ignore[arg-type]


def test_the_flag(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    assert parse(["--state-files=16M", str(script)], {}).state_bytes == 16 << 20
    assert parse([str(script)], {}).state_bytes == 0
    for flags, message in (
        (["--state-files=lots"], "no number of bytes"),
        (["--state-files=1M", "--checkpoint-dir=/x"], "excludes --checkpoint-dir"),
    ):
        with pytest.raises(UsageError, match=message):
            parse([*flags, str(script)], {})
