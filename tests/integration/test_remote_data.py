"""Datasets behind URLs, from real servers: the same samples as from local files."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parent.parent))  # when run as a program

from extents_of import extents_of
from file_servers import FileServer, http_files, s3_bucket, s3_server

from tenplexrun import ctl
from tenplexrun.datasets import remote
from tenplexrun.datasets.megatron import Writer
from tenplexrun.errors import DataChangedError, DataError
from tenplexrun.formats import absolute, open_dataset

SPECS = (
    "bytes:{}/bytes/?sample_bytes=129&exclude=*.txt",
    "npy:{}/x.npy",
    "npy:{}/npy/",
    "npz:{}/x.npz?key=b",
    "megatron:{}/tokens?seq_length=7",
    "megatron:{}/tokens",
    "jsonl:{}/x.jsonl",
    "jsonl:{}/jsonl/",
    "images:{}/images/",
    "tar:{}/x.tar",
    "tfrecord:{}/records/",
    "tenplex:{}/tenplex/index.txt",
    "parquet:{}/x.parquet",
)


def write_all(root: Path) -> None:
    """A file or folder of each format."""
    random = np.random.default_rng(3)
    for folder in ("bytes/sub", "npy", "jsonl", "images/cat", "images/dog", "records", "tenplex"):
        (root / folder).mkdir(parents=True)
    for number in range(3):
        (root / "bytes" / "sub" / f"{number} ä").write_bytes(random.bytes(1000 + number))
        np.save(root / "npy" / f"{number}.npy", random.normal(size=(5, 3)))
        (root / "jsonl" / f"{number}.jsonl").write_text(f'{{"n": {number}}}\r\n\n"last {number}"')
        Image.fromarray(random.integers(0, 255, (4, 5, 3), dtype=np.uint8)).save(root / f"images/cat/{number}.png")
        Image.fromarray(random.integers(0, 255, (4, 5, 3), dtype=np.uint8)).save(root / f"images/dog/{number}.png")
    (root / "bytes" / "notes.txt").write_text("none of it")
    (root / "bytes" / ".hidden").write_text("none of it")
    np.save(root / "x.npy", random.normal(size=(50, 4)).astype("f4"))
    np.savez(root / "x.npz", a=np.arange(3), b=np.arange(40).reshape(20, 2))
    with Writer(root / "tokens", "uint16") as writer:
        for length in (5, 1, 30, 8):
            writer.add(random.integers(0, 1000, length))
    (root / "x.jsonl").write_text("".join(f'{{"text": "{"x" * number}", "n": {number}}}\n' for number in range(200)))
    with tarfile.open(root / "x.tar", "w") as archive:
        for number in range(20):
            for kind in ("json", "bin"):
                info = tarfile.TarInfo(f"{number:03d}.{kind}")
                info.size = 700 * number
                archive.addfile(info, io.BytesIO(random.bytes(info.size)))
    frames = [random.bytes(size) for size in (0, 10, 5000)]
    framed = b"".join(struct.pack("<Q", len(each)) + b"cccc" + each + b"cccc" for each in frames)
    (root / "records" / "x.tfrecord").write_bytes(framed)
    with (root / "tenplex" / "a.npzs").open("wb") as file:
        lines = ["1", "a.npzs 4"]
        for number in range(4):
            content = io.BytesIO()
            np.savez(content, text=np.arange(number + 1))
            lines.append(f"{file.tell()} {file.tell() + len(content.getvalue())}")
            file.write(content.getvalue())
    (root / "tenplex" / "index.txt").write_text("\n".join(lines))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"n": list(range(30))}), root / "x.parquet", row_group_size=7)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_all(root)
    return root


@pytest.fixture
def web(root: Path) -> Iterator[FileServer]:
    with http_files(root) as server:
        yield server


@pytest.fixture
def bucket(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The root of the files in an S3 server."""
    with s3_server(monkeypatch):
        yield s3_bucket(root)


@pytest.fixture(params=["file", "http", "s3"])
def url(request: pytest.FixtureRequest, root: Path) -> str:
    if request.param == "file":
        return f"file://{root}"
    if request.param == "http":
        return str(request.getfixturevalue("web").url)
    return str(request.getfixturevalue("bucket"))


def assert_same(there: Any, here: Any) -> None:
    if isinstance(here, dict):
        assert there.keys() == here.keys()
        for key in here:
            assert_same(there[key], here[key])
    elif isinstance(here, tuple):
        for one, other in zip(there, here, strict=True):
            assert_same(one, other)
    else:
        np.testing.assert_array_equal(there, here)


def test_every_format_has_the_same_samples_behind_a_url(url: str, root: Path) -> None:
    for spec in SPECS:
        there, here = open_dataset(absolute(spec.format(url))), open_dataset(spec.format(root))
        assert len(there) == len(here), spec
        assert there.fingerprint() == here.fingerprint(), spec
        copied = pickle.loads(pickle.dumps(there))
        for number in (0, len(here) // 2, len(here) - 1):
            assert_same(copied[number], here[number])
            assert there.raw(number) == here.raw(number), spec
            assert there.where(number).startswith(url), spec
        numbers = np.random.default_rng(0).permutation(len(here))
        assert_same(tuple(there.__getitems__(numbers.tolist())), tuple(here[number] for number in numbers))
        if here.spans is None:
            np.testing.assert_array_equal(there.gather(numbers), here.gather(numbers))
            half = here.num_bytes // 2
            assert there.read(half - 10, 20) == here.read(half - 10, 20)


def test_the_view_copies_samples_from_a_url(bucket: str, root: Path, home: Path) -> None:
    for spec in SPECS[:5]:
        shown = extents_of(spec.format(bucket), home)
        numbers = np.arange(shown.catalogue.num_samples)
        np.testing.assert_array_equal(shown.gather(numbers), open_dataset(spec.format(root)).gather(numbers))


def test_failures_are_retried_and_then_name_the_url(web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES_S", (0.01, 0.01, 0.01))
    web.failing = 2
    dataset = open_dataset(f"npy:{web.url}/x.npy")
    expected = dataset[7]
    web.failing = 3
    np.testing.assert_array_equal(dataset[7], expected)
    web.failing = 1000
    with pytest.raises(DataError, match=rf"{web.url}/x\.npy: .*503.* also at attempt 4; is its server up"):
        dataset[7]
    with pytest.raises(DataError, match=r"/x\.npy: .*503.* also at attempt 4"):
        open_dataset(f"npy:{web.url}/x.npy")
    web.failing, web.ranges = 0, False
    with pytest.raises(DataError, match=r"x\.npy: its server sends whole files where a range is asked for"):
        dataset[7]


def test_what_is_not_there(web: FileServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES_S", (0.01,))
    for base in (web.url, bucket):
        with pytest.raises(DataError, match=rf"{base}/none\.npy does not exist: correct the URL"):
            open_dataset(f"npy:{base}/none.npy")
    with pytest.raises(DataError, match="0 bytes found, not one sample"):
        open_dataset(f"jsonl:{bucket}/images")
    with pytest.raises(DataError, match="Protocol not known: nope; correct the URL, or install"):
        open_dataset("npy:nope://x/y.npy")
    web.shutdown()
    web.server_close()
    with pytest.raises(DataError, match=r"x\.npy: .* also at attempt 2; is its server up, reached"):
        open_dataset(f"npy:{web.url}/x.npy")


def test_a_file_that_shrinks(web: FileServer, root: Path, tmp_path: Path) -> None:
    with http_files(tmp_path) as server:
        (tmp_path / "x.npy").write_bytes((root / "x.npy").read_bytes())
        dataset = open_dataset(f"npy:{server.url}/x.npy")
        (tmp_path / "x.npy").write_bytes((root / "x.npy").read_bytes()[:200])
        with pytest.raises(DataChangedError, match="has shrunk since the job began"):
            dataset[4]
        (tmp_path / "x.npy").unlink()
        with pytest.raises(DataChangedError, match="has gone since the job began"):
            dataset[4]


def test_an_object_that_shrinks(bucket: str, root: Path) -> None:
    from s3fs import S3FileSystem

    system, url = S3FileSystem(), f"{bucket}/shrinks.npy"
    system.pipe_file(url, (root / "x.npy").read_bytes())
    dataset = open_dataset(f"npy:{url}")
    system.pipe_file(url, (root / "x.npy").read_bytes()[:200])
    for number in (4, 20):  # across the end, and beyond it
        with pytest.raises(DataChangedError, match="has shrunk since the job began"):
            dataset[number]
    system.rm_file(url)
    with pytest.raises(DataChangedError, match="has gone since the job began"):
        dataset[4]


def test_spans_that_touch_are_one_request(web: FileServer) -> None:
    dataset = open_dataset(f"jsonl:{web.url}/x.jsonl")
    before = web.requests
    assert [sample["n"] for sample in dataset.__getitems__(list(range(200)))] == list(range(200))
    assert web.requests == before + 1


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(one, marks=pytest.mark.slow) for one in ("spawn", "forkserver"))]
)
def test_loader_workers_read_beside_their_parent(method: str, web: FileServer, bucket: str, root: Path) -> None:
    """A fork inherits fsspec's event loop and connections, and may use neither. In a process of its own, since
    multiprocessing's trackers stay as long as who started them."""
    for base in (web.url, bucket):
        argv = [sys.executable, __file__, f"jsonl:{base}/x.jsonl", f"jsonl:{root}/x.jsonl", method]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")


def read_with_workers(spec: str, expected: str, method: str) -> None:
    from torch.utils.data import DataLoader

    dataset, here = open_dataset(spec), open_dataset(expected)
    assert dataset[3] == here[3]
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context=method, collate_fn=list)
    for _ in range(2):
        found: list[Any] = []
        for number, batch in enumerate(loader):
            found += batch
            assert dataset[number] == here[number], "the parent's own connections still work"
        assert found == list(here)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        ctl.main(["data", *argv])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_index_verify_and_show_a_url(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"jsonl:{bucket}/x.jsonl"
    assert run("show", spec, "--sample", "-1") == 0
    assert f"{bucket}/x.jsonl at byte" in capsys.readouterr().out
    assert run("index", spec) == 0
    assert f"{bucket}/x.jsonl.index.npz" in capsys.readouterr().out
    assert run("verify", spec) == 0
    assert "200 samples, each as it was" in capsys.readouterr().out


def test_a_web_server_takes_no_index(web: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"jsonl:{web.url}/x.jsonl"
    assert run("index", spec) == 69
    assert "where its server takes no files, name a local one with --index FILE" in capsys.readouterr().err
    assert run("index", spec, "--index", str(tmp_path / "i")) == 0
    assert run("verify", spec, "--index", str(tmp_path / "i")) == 0


def test_with_an_index_nothing_is_scanned(
    web: FileServer, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for spec in SPECS:
        name, where = spec.format(web.url), str(tmp_path / "index")
        with_index = f"{name}{'&' if '?' in name else '?'}index={where}"
        assert run("index", name, "--index", where) == 0
        scanned, opened = open_dataset(name), open_dataset(absolute(with_index))
        assert opened.fingerprint() == scanned.fingerprint()
        assert_same(tuple(opened.__getitems__([0, len(scanned) - 1])), (scanned[0], scanned[-1]))
    big = tmp_path / "big"
    big.mkdir()
    lines = [json.dumps({"n": number, "text": "x" * 20_000}) + "\n" for number in range(2_000)]
    (big / "x.jsonl").write_text("".join(lines))
    with http_files(big) as server:
        spec = f"jsonl:{server.url}/x.jsonl"
        assert run("index", spec, "--index", str(big / "x.jsonl.index.npz")) == 0
        before = server.requests
        dataset = open_dataset(f"{spec}?index=")
        dataset.fingerprint()
        assert dataset[1_999]["n"] == 1_999
        assert server.requests - before < 30
        lines[0] = lines[0].replace("0", "1", 1)
        (big / "x.jsonl").write_text("".join(lines))
        with pytest.raises(DataError, match="is not what it was when its index was made"):
            open_dataset(f"{spec}?index=")
        (big / "x.jsonl").write_text("".join(lines[1:]))
        with pytest.raises(DataError, match="is not what it was when its index was made"):
            open_dataset(f"{spec}?index=")


if __name__ == "__main__":
    read_with_workers(*sys.argv[1:])
