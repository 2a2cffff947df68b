"""Formats on real files: written by other programs, or here byte by byte from their definition."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tenplexrun.datasets.index import SampleIndex
from tenplexrun.datasets.megatron import Index, Writer
from tenplexrun.errors import DataError, DataModifiedError
from tenplexrun.formats import open_dataset

DOCUMENTS = [[[5, 6, 7], [8]], [[9, 10, 11, 12]], [[13, 14]]]  # of sequences of tokens


def idx_bytes(code: int, item: str, lengths: list[int], documents: list[int]) -> bytes:
    """A .idx file, field by field."""
    size = np.dtype(item).itemsize
    pointers = [sum(lengths[:number]) * size for number in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    head += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(documents))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(documents)}q", *lengths, *pointers, *documents)


def write_megatron(prefix: Path, dtype: str = "u2") -> None:
    with Writer(prefix, dtype) as writer:
        for document in DOCUMENTS:
            writer.add(*document)


@pytest.mark.parametrize(("dtype", "code"), [("u2", 8), ("i4", 4), ("u1", 1), ("i8", 5), ("f4", 7), ("f8", 6)])
def test_megatron_files_are_byte_by_byte_as_megatron_writes_them(tmp_path: Path, dtype: str, code: int) -> None:
    write_megatron(tmp_path / "x", dtype)
    assert (tmp_path / "x.idx").read_bytes() == idx_bytes(code, dtype, [3, 1, 4, 2], [0, 2, 3, 4])
    assert (tmp_path / "x.bin").read_bytes() == np.arange(5, 15).astype(dtype).tobytes()
    index = Index.read(str(tmp_path / "x.idx"))
    assert (index.dtype, index.lengths.tolist(), index.documents.tolist()) == (dtype, [3, 1, 4, 2], [0, 2, 3, 4])


def test_megatron_samples(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x")
    sequences = open_dataset(f"megatron:{tmp_path}/x")
    assert [sample.tolist() for sample in sequences] == [s for document in DOCUMENTS for s in document]
    assert sequences[0].dtype == np.uint16
    for path in ("x", "x.bin", "x.idx"):
        crossing = open_dataset(f"megatron:{tmp_path}/{path}?seq_length=4")
        assert (crossing.num_samples, crossing.dtype, crossing.shape) == (2, "<u2", (5,))
        assert crossing.gather(np.array([1, 0])).tolist() == [[9, 10, 11, 12, 13], [5, 6, 7, 8, 9]]
        assert np.frombuffer(crossing.read(4, 14), "<u2").tolist() == [7, 8, 9, 9, 10, 11, 12]
    assert open_dataset(f"megatron:{tmp_path}/x?seq_length=3").num_samples == 3


def test_what_is_no_megatron_dataset(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x")
    good = (tmp_path / "x.idx").read_bytes()
    for content, message in (
        (b"TNTIDX\x00\x00" + good[8:], "no index of Megatron-LM's"),
        (good[:9] + struct.pack("<Q", 2) + good[17:], "version 2"),
        (good[:17] + b"\x09" + good[18:], "type 9"),
        (good[:-1], "is cut off"),
        (idx_bytes(8, "u2", [3, 8], [0, 2]), "20 bytes, its index speaks of 22"),
    ):
        (tmp_path / "x.idx").write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_dataset(f"megatron:{tmp_path}/x")
    with pytest.raises(DataError, match=r"none\.idx does not exist"):
        open_dataset(f"megatron:{tmp_path}/none")
    with pytest.raises(DataError, match="do not fit uint8"), Writer(tmp_path / "small", "u1") as writer:
        writer.add([256])
    assert not (tmp_path / "small.idx").exists()


def test_npz_and_folders_of_npy(tmp_path: Path) -> None:
    rows, labels = np.random.default_rng(0).normal(size=(7, 3)).astype("f4"), np.arange(7)
    np.savez(tmp_path / "x.npz", rows=rows, labels=labels)
    dataset = open_dataset(f"npz:{tmp_path}/x.npz?key=rows")
    np.testing.assert_array_equal(dataset.gather(np.array([6, 0, 3])), rows[[6, 0, 3]])
    assert open_dataset(f"npz:{tmp_path}/x.npz?key=labels").gather(np.array([5])).tolist() == [5]
    with pytest.raises(DataError, match="one of rows, labels"):
        open_dataset(f"npz:{tmp_path}/x.npz")
    np.savez_compressed(tmp_path / "y.npz", rows)
    with pytest.raises(DataError, match=r"compressed.*numpy\.savez"):
        open_dataset(f"npz:{tmp_path}/y.npz")
    (tmp_path / "shards").mkdir()
    for number in (0, 1):
        np.save(tmp_path / "shards" / f"{number}.npy", rows[number * 4 : number * 4 + 4])
    shards = open_dataset(f"npy:{tmp_path}/shards")
    np.testing.assert_array_equal(shards.gather(np.arange(7)), rows)
    np.testing.assert_array_equal(shards[-1], rows[-1])
    np.save(tmp_path / "shards" / "2.npy", labels)
    with pytest.raises(DataError, match="differ in type"):
        open_dataset(f"npy:{tmp_path}/shards")


def test_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "één"}\n\n{"text": "two\\n"}\r\n'.encode())
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(b"[1, 2]\n\r\n3")
    dataset = open_dataset(f"jsonl:{tmp_path}")
    assert list(dataset) == [{"text": "één"}, {"text": "two\n"}, [1, 2], 3]
    assert list(pickle.loads(pickle.dumps(dataset))) == list(dataset)
    before = dataset.fingerprint()
    (tmp_path / "c.jsonl").write_bytes(b"[1, 2]\n\r\n{")
    changed = open_dataset(f"jsonl:{tmp_path}")
    assert changed.fingerprint() != before
    with pytest.raises(DataError, match=r"sample 3 of .*c\.jsonl at byte 9"):
        changed[3]
    with pytest.raises(IndexError):
        changed[4]
    with pytest.raises(DataError, match="samples of different sizes"):
        _ = changed.sample_bytes


def test_images_of_handwritten_digits(tmp_path: Path) -> None:
    digits = load_digits()
    pixels = (digits.images * 15).astype(np.uint8)
    for number in range(60):
        folder = tmp_path / f"{digits.target[number]}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels[number]).save(folder / f"{number:04d}.png")
    (tmp_path / "0" / "notes.txt").write_text("no image")
    dataset = open_dataset(f"images:{tmp_path}?mode=L")
    assert dataset.num_samples == 60
    order = sorted(range(60), key=lambda number: (digits.target[number], number))
    for (image, label), number in zip(dataset, order, strict=True):
        assert label == digits.target[number]
        np.testing.assert_array_equal(image, pixels[number])
    assert open_dataset(f"images:{tmp_path}")[0][0].shape == (8, 8, 3)
    before = dataset.fingerprint()
    (tmp_path / "9").rename(tmp_path / "nine")  # the same pictures of other classes are other data
    assert open_dataset(f"images:{tmp_path}?mode=L").fingerprint() != before


def test_webdataset(tmp_path: Path) -> None:
    members = {"a/1.json": b"{}", "a/1.seg.png": b"png", "a/2.JSON": b"[2]", "b/1.json": b"x" * 600}
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(content), {"comment": "é"}
            archive.addfile(info, io.BytesIO(content))
    assert list(open_dataset(f"tar:{tmp_path}")) == [
        {"__key__": "a/1", "json": b"{}", "seg.png": b"png"},
        {"__key__": "a/2", "json": b"[2]"},
        {"__key__": "b/1", "json": b"x" * 600},
    ]
    with tarfile.open(tmp_path / "y.tar", "w:gz") as archive:
        archive.add(tmp_path / "x.tar", "x")
    with pytest.raises(DataError, match="no plain tar file"):
        open_dataset(f"tar:{tmp_path}/y.tar")


def test_tfrecord(tmp_path: Path) -> None:
    """Checksums are left out here, and not looked at there: `tenplexctl data verify` has its own."""
    records = [b"", b"example", b"x" * 1000]
    framed = b"".join(struct.pack("<Q", len(record)) + b"cccc" + record + b"cccc" for record in records)
    (tmp_path / "x.tfrecord-00000-of-00001").write_bytes(framed)
    assert list(open_dataset(f"tfrecord:{tmp_path}")) == records
    (tmp_path / "x.tfrecord-00000-of-00001").write_bytes(framed[:-1])
    with pytest.raises(DataError, match="cut off at byte 39"):
        open_dataset(f"tfrecord:{tmp_path}")


def write_tenplex(folder: Path) -> list[dict[str, np.ndarray]]:
    samples = [{"text": np.arange(number, number + 3), "mask": np.ones(number + 1)} for number in range(5)]
    lines = ["2"]
    for name, part in (("a.npzs", samples[:2]), ("b.npzs", samples[2:])):
        lines.append(f"{name} {len(part)}")
        with open(folder / name, "wb") as file:
            for sample in part:
                buffer = io.BytesIO()
                np.savez(buffer, **sample)
                lines.append(f"{file.tell()} {file.tell() + len(buffer.getvalue())}")
                file.write(buffer.getvalue())
    (folder / "index.txt").write_text("\n".join(lines) + "\n")
    return samples


def test_tenplex_index(tmp_path: Path) -> None:
    samples = write_tenplex(tmp_path)
    dataset = open_dataset(f"tenplex:{tmp_path}/index.txt")
    for found, sample in zip(dataset, samples, strict=True):
        assert found.keys() == sample.keys()
        np.testing.assert_array_equal(found["text"], sample["text"])
        np.testing.assert_array_equal(found["mask"], sample["mask"])
    content = (tmp_path / "b.npzs").read_bytes()
    (tmp_path / "b.npzs").write_bytes(content[:-4] + b"****")
    with pytest.raises(DataModifiedError, match=r"b\.npzs was written to since the job began"):
        dataset[4]
    dataset = open_dataset(f"tenplex:{tmp_path}/index.txt")
    with pytest.raises(DataError, match=r"sample 4 of .*b\.npzs at byte \d+: "):
        dataset[4]
    good = (tmp_path / "index.txt").read_text()
    for text, message in (
        (good.rsplit(" ", 1)[0], "not an index of Tenplex's"),
        (good + "0 1\n", "more lines than it announces"),
        (good.replace("b.npzs", "no-such://example.org/b.npzs"), "install fsspec and its package"),
        (good.rsplit(" ", 1)[0] + " 99999\n", "samples outside"),
        (json.dumps({}), "not an index of Tenplex's"),
        (good.replace("b.npzs", "c.npzs"), r"c\.npzs does not exist"),
    ):
        (tmp_path / "index.txt").write_text(text)
        with pytest.raises(DataError, match=message):
            open_dataset(f"tenplex:{tmp_path}/index.txt")


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"n": list(range(50)), "text": [f"t{n}" for n in range(50)]})
    parquet.write_table(table.slice(0, 30), tmp_path / "a.parquet", row_group_size=7)
    parquet.write_table(table.slice(30), tmp_path / "b.parquet", row_group_size=7)
    dataset = open_dataset(f"parquet:{tmp_path}")
    assert list(dataset) == [{"n": n, "text": f"t{n}"} for n in range(50)]
    assert pickle.loads(pickle.dumps(dataset))[-1] == {"n": 49, "text": "t49"}
    assert open_dataset(f"parquet:{tmp_path}?columns=text")[31] == {"text": "t31"}
    index = SampleIndex.of(dataset)
    assert list(index.differences(open_dataset(f"parquet:{tmp_path}"))) == []
    parquet.write_table(table.slice(29, 20), tmp_path / "b.parquet", row_group_size=7)
    [*_, last] = index.differences(open_dataset(f"parquet:{tmp_path}"))
    assert last.endswith("b.parquet, row 5 of row group 2: its 24 bytes are others")
    (tmp_path / "b.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match="not a file of the format parquet"):
        open_dataset(f"parquet:{tmp_path}")


@pytest.mark.parametrize("stream", [False, True])
def test_arrow(tmp_path: Path, stream: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"n": list(range(50)), "text": [f"t{n}" for n in range(50)]})
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    for name, part in (("a", table.slice(0, 30)), ("b", table.slice(30))):
        with new(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(part, max_chunksize=7)
    dataset = open_dataset(f"arrow:{tmp_path}")
    assert list(dataset) == [{"n": n, "text": f"t{n}"} for n in range(50)]
    assert pickle.loads(pickle.dumps(dataset))[-1] == {"n": 49, "text": "t49"}
    assert list(open_dataset(f"arrow:file://{tmp_path}?columns=text"))[31] == {"text": "t31"}
    (tmp_path / "b.arrow").write_bytes(b"no table")
    with pytest.raises(DataError, match="not a file of the format arrow"):
        open_dataset(f"arrow:{tmp_path}")


def test_many_files_are_not_all_kept_open(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03d}").write_bytes(bytes([number]) * 3)
    dataset = open_dataset(f"bytes:{tmp_path}?sample_bytes=6")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert dataset.gather(np.arange(100))[:, 0].tolist() == list(range(0, 200, 2))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64
