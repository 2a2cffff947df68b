"""Samples of different sizes in shared memory and in the view: packs as files of their format, or links to files."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from extents_of import data_of, mixed_of
from pyarrow import parquet

from tenplexrun.core.extents import Placement
from tenplexrun.core.order import DataOrder
from tenplexrun.datasets.dataset import Dataset
from tenplexrun.datasets.megatron import Writer
from tenplexrun.errors import DataError
from tenplexrun.formats import open_dataset
from tenplexrun.vfs import extents, mixed
from tenplexrun.vfs.data import Data, Reader
from tenplexrun.vfs.farm import Farm
from tenplexrun.vfs.linked import Linked
from tenplexrun.vfs.mixed import Mixed
from tenplexrun.vfs.nodes import Directory, File, Link
from tenplexrun.vfs.view import fitting, tree
from tenplexrun.vfs.window import window

SAMPLES = 103


def sizes() -> list[int]:
    return np.random.default_rng(0).integers(1, 90, size=SAMPLES).tolist()


def jsonl(folder: Path) -> str:
    lines = [json.dumps({"number": number, "text": "x" * size}) for number, size in enumerate(sizes())]
    (folder / "a.jsonl").write_bytes("\r\n".join(lines[:50]).encode())
    (folder / "b.jsonl").write_bytes("\n".join(lines[50:]).encode())
    return f"jsonl:{folder}"


def tar(folder: Path) -> str:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, size in enumerate(sizes()):
            for suffix in ("txt", "cls"):
                info = tarfile.TarInfo(f"{number:04d}.{suffix}")
                info.size = size
                archive.addfile(info, io.BytesIO(bytes([number]) * size))
    return f"tar:{folder}"


def tfrecord(folder: Path) -> str:
    frames = [
        size.to_bytes(8, "little") + b"len!" + bytes([number]) * size + b"crc!" for number, size in enumerate(sizes())
    ]
    (folder / "a.tfrecord").write_bytes(b"".join(frames))
    return f"tfrecord:{folder}"


def megatron(folder: Path) -> str:
    with Writer(folder / "text", "uint16") as writer:
        for number, size in enumerate(sizes()):
            writer.add([number] * size)
    return f"megatron:{folder}/text"


def images(folder: Path) -> str:
    """What is in them is not looked at."""
    for number, size in enumerate(sizes()):
        place = folder / ("cat", "dog", "")[number % 3] / ("deep" if number % 6 == 0 else "")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.PNG").write_bytes(bytes([number]) * size)
    return f"images:{folder}"


def content(directory: Directory, name: str) -> bytes:
    file = directory.entries[name]
    assert isinstance(file, File)
    return bytes(file.read_all(0, file.num_bytes))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[str], Data]]:
    """Keeps datasets until the test ends."""
    datas: list[Data] = []

    def open_one(spec: str) -> Data:
        datas.append(data_of(spec, tmp_path / "extents"))
        return datas[-1]

    yield open_one
    for data in datas:
        data.stop()


Opened = Callable[[str], Data]
ORDER = DataOrder(SAMPLES, 5, 24, 4)


@pytest.mark.parametrize("make", [jsonl, tar, tfrecord, megatron])
def test_packs_are_files_of_their_format(
    make: Callable[[Path], str], source: Path, tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed, "PACK_BYTES", 2000)
    monkeypatch.setattr(extents, "LEAST_EXTENT_BYTES", 4096)
    spec = make(source)
    samples = mixed_of(opened(spec), tmp_path / "view")
    assert (samples.catalogue.num_samples, samples.catalogue.fingerprint) == (SAMPLES, open_dataset(spec).fingerprint())
    shown = window(ORDER, 1, 2, 24)
    directory = tree(shown, samples)
    ids = shown.ids(0, shown.num_rows)
    packs = content(directory, "list.txt").decode().split()
    index = json.loads(content(directory, "index.json"))
    assert packs == [pack["name"] for pack in index["packs"]]
    assert [pack["first_row"] for pack in index["packs"]] == [
        sum(pack["rows"] for pack in index["packs"][:number]) for number in range(len(packs))
    ]
    assert index["rows"] == sum(pack["rows"] for pack in index["packs"]) == len(ids)
    assert len(packs) > 1
    assert all(len(content(directory, pack)) <= 2000 for pack in packs[:-1]) or make is tar
    offsets = np.load(io.BytesIO(content(directory, "offsets.npy")))
    whole = b"".join(content(directory, pack) for pack in packs)
    assert (len(offsets), offsets[-1]) == (len(ids) + 1, len(whole))

    # a pack is a dataset of the same format
    same: Dataset | None = None
    if make is not megatron:
        (tmp_path / "packs").mkdir()
        for name in packs:
            (tmp_path / "packs" / name).write_bytes(content(directory, name))
        same = open_dataset(f"{spec.partition(':')[0]}:{tmp_path}/packs")
        assert len(same) == len(ids)
    raw = open_dataset(spec)
    for row, number in enumerate(ids.tolist()):
        assert raw.raw(number) in whole[offsets[row] : offsets[row + 1]]
        if same is not None:
            assert same[row] == raw[number]

    pack = directory.entries[packs[1]]
    assert isinstance(pack, File)
    data = content(directory, packs[1])
    for offset in (*range(200), len(data) - 1, len(data), len(data) + 5):
        for count in (0, 1, 2, 3, 50, 130, 10**6):
            assert pack.read(offset, count) == data[offset : offset + count]

    later = directory.hidden("epoch-3")
    assert later is not None
    assert np.load(io.BytesIO(content(later, "offsets.npy")))[-1] > 0
    (source.rename(tmp_path / "gone"))  # copied once: not needed again, also after a restart
    again = tree(shown, mixed_of(opened(spec), tmp_path / "view"))
    assert b"".join(content(again, pack) for pack in packs) == whole


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_of_tables_are_lines(kind: str, source: Path, tmp_path: Path, opened: Opened) -> None:
    """They are in extents as they are rendered."""
    columns = {"number": list(range(SAMPLES)), "text": ["x" * size for size in sizes()]}
    for name, part in (("a", slice(0, 60)), ("b", slice(60, None))):
        table = pyarrow.table({column: values[part] for column, values in columns.items()})
        if kind == "parquet":
            parquet.write_table(table, source / f"{name}.parquet", row_group_size=17)
        else:
            with pyarrow.ipc.new_file(source / f"{name}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=17)
    directory = tree(window(ORDER, 1, 2, 24), mixed_of(opened(f"{kind}:{source}"), tmp_path / "view"))
    ids = window(ORDER, 1, 2, 24).ids(0, 1000).tolist()
    lines = content(directory, "pack-00000.jsonl").decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {name: values[number] for name, values in columns.items()} for number in ids
    ]


def test_whole_files_are_links_by_class_and_row(source: Path, tmp_path: Path, opened: Opened) -> None:
    spec = images(source)
    samples = mixed_of(opened(spec), tmp_path / "view")
    shown = window(ORDER, 1, 2, 24)
    directory = tree(shown, samples)
    farm = Farm(tmp_path / "view")
    farm.start()
    farm.show("dp-0001", "round-1", directory, current=True)
    place = tmp_path / "view" / "dp-0001" / "current"
    names = (place / "list.txt").read_text().splitlines()
    ids = np.load(place / "order.npy").tolist()
    dataset = open_dataset(spec)
    assert [(place / name).read_bytes() for name in names] == [dataset.raw(number) for number in ids]
    assert all((place / name).is_symlink() for name in names)
    assert (place / "paths.txt").read_text().splitlines() == [os.readlink(place / name) for name in names]
    found = [name.split("/") for name in names]
    assert [parts[-1].partition("-")[0] for parts in found] == [f"{row:08d}" for row in range(len(ids))]
    originals = [Path(dataset.where(number).partition(" at ")[0]) for number in ids]
    assert [parts[-1].partition("-")[2] for parts in found] == [path.name for path in originals]
    assert [parts[1:-1] for parts in found] == [[*path.relative_to(source).parts[:-1]][:1] for path in originals]
    folders = sorted(path.name for path in (place / "files").iterdir() if path.is_dir())
    assert folders == ["cat", "dog"]
    assert sum(1 for path in (place / "files").rglob("*") if path.is_file()) == len(ids)
    index = json.loads((place / "index.json").read_text())
    assert (index["rows"], index["files"], index["samples"]["classes"]) == (len(ids), "files", folders)


def test_names_of_files_may_be_any_bytes_but_not_several_lines(source: Path, tmp_path: Path, opened: Opened) -> None:
    names = ["cat a/im 1.png", "ünï☃/x.png", os.fsdecode(b"caf\xe9/\xff.png"), "-rf/--x.png", "'q\"$`/*.png"]
    for name in names:
        (source / name).parent.mkdir()
        (source / name).write_bytes(os.fsencode(name))
    samples = mixed_of(opened(f"images:{source}"), tmp_path / "view")
    farm = Farm(tmp_path / "view")
    farm.start()
    order = DataOrder(len(names), 5, len(names), 1)
    farm.show("dp-0000", "round-0", tree(window(order, 0, 1, 0), samples), current=True)
    place = tmp_path / "view" / "dp-0000" / "current"
    shown = os.fsdecode((place / "list.txt").read_bytes()).splitlines()
    originals = [os.fsdecode((place / name).read_bytes()) for name in shown]
    assert sorted(originals) == sorted(names)
    assert [name.replace("/0000000", "/").partition("/")[2] for name in shown] == [
        name.replace("/", f"/{row}-") for row, name in enumerate(originals)
    ]
    (source / "cat a" / "two\nlines.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"two\\nlines\.png.* more than one line"):
        opened(f"images:{source}?glob=**/*.png")


def test_of_a_name_that_is_too_long_with_its_row_the_end_stays(source: Path, tmp_path: Path, opened: Opened) -> None:
    (source / "cat").mkdir()
    (source / "cat" / ("é" * 125 + "x.png")).write_bytes(b"pixels")
    samples = mixed_of(opened(f"images:{source}"), tmp_path / "view")
    farm = Farm(tmp_path / "view")
    farm.start()
    farm.show("dp-0000", "round-0", tree(window(DataOrder(1, 5, 1, 1), 0, 1, 0), samples), current=True)
    [found] = (tmp_path / "view" / "dp-0000" / "current" / "files" / "cat").iterdir()
    assert found.read_bytes() == b"pixels"
    assert (found.name[:9], found.name[-100:]) == ("00000000-", "é" * 95 + "x.png")


def test_whole_files_that_cannot_all_be_written_leave_nothing(source: Path, tmp_path: Path, opened: Opened) -> None:
    data = opened(images(source))
    samples, home = mixed_of(data, tmp_path / "view"), data.keeper.home
    data.stop()
    (home / "linked").unlink()
    reads: list[int] = []

    def read(starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
        if reads:
            raise DataError("an extent has gone")
        reads.append(len(starts))
        return [bytes(end - start) for start, end in zip(starts, ends, strict=True)]

    assert Linked(samples.catalogue, home, read).use("dp-0000/round-1", 1 << 30, lambda _: True, 1.0) is None
    assert 0 < reads[0] < SAMPLES
    assert not [path for path in home.iterdir() if path.name.startswith(("files", "linked"))]


def test_a_class_without_a_row_keeps_its_folder(source: Path, tmp_path: Path, opened: Opened) -> None:
    """Else labels by the folders' order would be others on each rank."""
    samples = mixed_of(opened(images(source)), tmp_path / "view")
    files = tree(window(DataOrder(SAMPLES, 5, 1, 1), 0, 1, SAMPLES - 1), samples).entries["files"]
    assert isinstance(files, Directory)
    assert {"cat", "dog"} <= set(files.entries)
    links = [link for entry in files.entries.values() for link in getattr(entry, "entries", {"": entry}).values()]
    assert len(links) == 1
    assert isinstance(links[0], Link)


@pytest.mark.parametrize("make", [jsonl, images])
def test_a_farm_takes_as_many_steps_as_there_is_room_for(
    make: Callable[[Path], str], source: Path, tmp_path: Path, opened: Opened
) -> None:
    samples = mixed_of(opened(make(source)), tmp_path / "view")
    whole = window(ORDER, 0, 1, 0)
    assert fitting(whole, samples, None) == fitting(whole, samples, 1 << 30) == whole
    one = fitting(whole, samples, 1)
    assert one.num_rows == 24
    taken = samples.row_bytes(whole.ids(0, 48)).sum() + 48 * 16
    assert fitting(whole, samples, int(taken)).num_rows == 48
    assert fitting(whole, samples, int(taken) - 1).num_rows == 24


def test_without_room_for_a_second_copy_whole_files_are_read_from_extents(
    source: Path, tmp_path: Path, opened: Opened
) -> None:
    spec = images(source)
    data = opened(spec)
    linked = tree(window(ORDER, 1, 2, 24), mixed_of(data, tmp_path / "view"))
    plan = data.follow(Placement("a", {"a": ""}, {"a": data.catalogue.num_bytes}, {}))
    about = Reader("dp-0001/round-1", tmp_path / "view" / "round-1", ORDER, 1, 2, 24)
    assert data.keeper.wait(60)
    data.leave("dp-0000/round-0")
    (data.keeper.home / "linked").unlink()
    samples = data.reader(plan, about, 0.0)
    assert isinstance(samples, Mixed)
    shown = window(ORDER, 1, 2, 24)
    directory, dataset = tree(shown, samples), open_dataset(spec)
    assert content(directory, "list.txt") == content(linked, "list.txt")
    names = content(directory, "list.txt").decode().splitlines()
    assert content(directory, "paths.txt").decode().splitlines() == [f"{about.root}/{name}" for name in names]
    for name, number in zip(names, shown.ids(0, shown.num_rows).tolist(), strict=True):
        place: Directory = directory
        *folders, last = name.split("/")
        for folder in folders:
            found = place.entries[folder]
            assert isinstance(found, Directory)
            place = found
        assert content(place, last) == dataset.raw(number)
    assert samples.row_bytes(np.arange(SAMPLES)).tolist() == [len(dataset.raw(n)) for n in range(SAMPLES)]


def test_a_loader_asks_for_a_view_without_its_files(source: Path, tmp_path: Path, opened: Opened) -> None:
    samples = mixed_of(opened(jsonl(source)), tmp_path / "view")
    bare = tree(window(ORDER, 0, 1, 0), samples, bare=True)
    assert set(bare.entries) == {"index.json", "cursor.json", "batch-sizes.txt", "order.npy", "weights.npy"}


def test_a_lost_extent_is_fetched_anew(source: Path, tmp_path: Path, opened: Opened) -> None:
    data = opened(jsonl(source))
    samples = mixed_of(data, tmp_path / "view")
    directory = tree(window(ORDER, 0, 1, 0), samples)
    for lost in (tmp_path / "extents").rglob("extent-*.bin"):
        lost.unlink()
    assert len(content(directory, "pack-00000.jsonl").splitlines()) == SAMPLES + 1  # and one row of padding


def test_a_line_that_is_all_of_its_file_is_a_line(source: Path, tmp_path: Path, opened: Opened) -> None:
    (source / "a.jsonl").write_text('{"a": 1}')
    directory = tree(window(DataOrder(1, 5, 1, 1), 0, 1, 0), mixed_of(opened(f"jsonl:{source}"), tmp_path / "view"))
    assert content(directory, "pack-00000.jsonl") == b'{"a": 1}\n'
