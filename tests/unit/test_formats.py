"""Dataset names, formats, fingerprints; samples end to end over files and over extents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from extents_of import extents_of

from tenplexrun.errors import ArenaFullError, DataError
from tenplexrun.formats import absolute, open_dataset
from tenplexrun.samples import Catalogue, Extents, Proved
from tenplexrun.vfs import extents as extents_module


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "b" / "deep").mkdir(parents=True)
    (root / "a.py").write_bytes(b"0123456789")
    (root / "b" / "empty.py").write_bytes(b"")
    (root / "b" / "deep" / "c.py").write_bytes(b"abcde")
    (root / "b" / "skip.txt").write_bytes(b"no")
    (root / "z.py").write_bytes(b"XYZ")
    return root


def test_bytes_are_the_files_in_sorted_order(texts: Path) -> None:
    dataset = open_dataset(f"bytes:{texts}?glob=**/*.py&sample_bytes=4")
    assert (dataset.num_samples, dataset.sample_bytes, dataset.dtype, dataset.shape) == (4, 4, "|u1", (4,))
    assert dataset.read(0, 16) == b"0123456789abcdeX"
    assert dataset.read(8, 5) == b"89abc"
    assert dataset.gather(np.array([3, 0, 2])).tobytes() == b"cdeX" + b"0123" + b"89ab"
    assert dataset.gather(np.array([], dtype=np.int64)).shape == (0, 4)


def test_bytes_options(texts: Path) -> None:
    assert open_dataset(f"bytes:{texts}?glob=**/*.py&sample_bytes=1&exclude=b/*").read(0, 13) == b"0123456789XYZ"
    assert open_dataset(f"bytes:{texts}?sample_bytes=1&exclude=*.py").num_samples == 2
    assert open_dataset(f"bytes:{texts}/a.py?sample_bytes=3").num_samples == 3


def test_npy_rows(tmp_path: Path) -> None:
    array = np.arange(24, dtype=">f4").reshape(6, 2, 2)
    np.save(tmp_path / "x.npy", array)
    dataset = open_dataset(f"npy:{tmp_path}/x.npy")
    assert (dataset.num_samples, dataset.dtype, dataset.shape) == (6, ">f4", (2, 2))
    np.testing.assert_array_equal(dataset.gather(np.array([5, 1])), array[[5, 1]])
    np.save(tmp_path / "scalars.npy", np.arange(5))
    assert open_dataset(f"npy:{tmp_path}/scalars.npy").gather(np.array([4, 2])).tolist() == [4, 2]


def test_paths_are_percent_decoded_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "50% a?b.npy", np.arange(3))
    monkeypatch.chdir(tmp_path)
    spec = absolute("npy:50%25%20a%3Fb.npy")
    assert open_dataset(spec).num_samples == 3
    assert absolute(spec) == spec
    assert absolute("bytes:x?sample_bytes=3&glob=**/*.py") == f"bytes:{tmp_path}/x?sample_bytes=3&glob=**/*.py"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/data/x.npy", "should be FORMAT:PATH"),
        ("zip:/x", "should be FORMAT:PATH"),
        ("npy:", "should be FORMAT:PATH"),
        ("npy:/no/such.npy", "does not exist"),
        ("bytes:{texts}", "give sample_bytes, for example"),
        ("bytes:{texts}?sample_bytes=0", "give sample_bytes, for example"),
        ("bytes:{texts}?sample_bytes=4&shuffle=1", "unknown options \\['shuffle'\\]"),
        ("bytes:{texts}?sample_bytes", "name=value"),
        ("bytes:{texts}?sample_bytes=4000", "not one sample of 4000"),
        ("bytes:{texts}?sample_bytes=4&glob=*.none", "0 bytes found"),
        ("npy:{texts}/a.py", "not a plain .npy"),
        ("npy:{texts}/b/empty.py", "not a plain .npy"),
        ("npy:{texts}", "no arrays found"),
    ],
)
def test_bad_names_say_what_is_wrong(spec: str, message: str, texts: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(spec.format(texts=texts))


def test_links_that_lead_back_are_not_followed_and_others_are(texts: Path, tmp_path: Path) -> None:
    spec = f"bytes:{texts}?glob=**/*.py&sample_bytes=1"
    before = open_dataset(spec).num_samples
    (texts / "b" / "back").symlink_to("..")
    (texts / "b" / "self").symlink_to(".")
    (texts / "nothing.py").symlink_to("nowhere.py")
    assert open_dataset(spec).num_samples == before
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "new.py").write_bytes(b"12345")
    (texts / "c").symlink_to(tmp_path / "elsewhere")
    assert open_dataset(spec).num_samples == before + 5


def test_an_empty_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "x.png").write_bytes(b"never looked at")
    (tmp_path / "cat" / "empty.png").touch()
    with pytest.raises(DataError, match=r"cat/empty\.png is empty"):
        open_dataset(f"images:{tmp_path}")
    assert len(open_dataset(f"images:{tmp_path}?exclude=cat/empty.png")) == 1


def test_arrays_without_plain_rows_are_refused(tmp_path: Path) -> None:
    arrays = {
        "fortran": np.asfortranarray(np.ones((2, 3))),
        "fields": np.zeros(3, dtype=[("a", "i4"), ("b", "f4")]),
        "scalar": np.array(1.0),
        "nothing": np.zeros((3, 0)),
    }
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
        with pytest.raises(DataError):
            open_dataset(f"npy:{tmp_path}/{name}.npy")
    np.save(tmp_path / "objects", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="not a plain"):
        open_dataset(f"npy:{tmp_path}/objects.npy")


def test_fingerprint_follows_the_content(texts: Path, tmp_path: Path) -> None:
    spec = f"bytes:{texts}?glob=**/*.py&sample_bytes=4"
    before = open_dataset(spec).fingerprint()
    (texts / "a.py").rename(texts / "aa.py")  # same bytes in the same order: the same data
    assert open_dataset(spec).fingerprint() == before
    (texts / "aa.py").write_bytes(b"012345678!")
    assert open_dataset(spec).fingerprint() != before
    np.save(tmp_path / "a.npy", np.zeros(4, dtype=np.int32))
    np.save(tmp_path / "b.npy", np.zeros(4, dtype=np.float32))
    assert len({open_dataset(f"npy:{tmp_path}/{name}.npy").fingerprint() for name in "ab"}) == 2


def test_a_file_that_shrank_is_an_error(texts: Path) -> None:
    dataset = open_dataset(f"bytes:{texts}?glob=**/*.py&sample_bytes=4")
    (texts / "a.py").write_bytes(b"0")
    with pytest.raises(DataError, match="has shrunk"):
        dataset.read(0, 16)
    again = open_dataset(f"bytes:{texts}?glob=**/*.py&sample_bytes=2")
    (texts / "z.py").unlink()
    with pytest.raises(DataError, match="has gone"):
        again.read(0, 8)


def test_extents_hold_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "EXTENT_BYTES", 64)
    monkeypatch.setattr(extents_module, "_COPY_BYTES", 10)
    array = np.random.default_rng(0).integers(0, 2**31, size=(23, 3), dtype=np.int32)
    np.save(tmp_path / "x.npy", array)
    found = extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    assert (found.catalogue.samples_per_extent, found.catalogue.num_extents) == (5, 5)
    ids = np.random.default_rng(1).integers(0, 23, size=100)
    np.testing.assert_array_equal(found.gather(ids), array[ids])
    files = sorted(Path(found.directory).glob("extent-*.bin"))
    assert [file.stat().st_size for file in files] == [60, 60, 60, 60, 36]
    assert b"".join(file.read_bytes() for file in files) == array.tobytes()
    (tmp_path / "x.npy").unlink()  # copied once: not needed again, also after a restart
    again = extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    assert again.catalogue == found.catalogue


@pytest.mark.parametrize("shape", [(4,), (1024,), (129,), (3000,)])
def test_samples_of_any_size_are_gathered_from_many_extents(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extents end at pages where samples of the size allow that, and the other way at others."""
    monkeypatch.setattr(extents_module, "LEAST_EXTENT_BYTES", 600_000)
    array = np.random.default_rng(0).integers(0, 256, size=(1_400_000 // shape[0], *shape), dtype=np.uint8)
    np.save(tmp_path / "x.npy", array)
    found = extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    assert found.catalogue.num_extents == 3
    aligned = found.catalogue.samples_per_extent * shape[0] % 4096 == 0
    assert aligned == (shape != (3000,))
    for count in (0, 1, 500):
        ids = np.random.default_rng(count).integers(0, len(array), size=count)
        np.testing.assert_array_equal(found.gather(ids), array[ids])


def test_readers_share_what_is_mapped_and_proved(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, size=(1003, 1000), dtype=np.uint8)
    np.save(tmp_path / "x.npy", array)
    found = extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    proved = Proved(found.catalogue)
    first, second = (Extents(found.catalogue, found.directory, proved=proved) for _ in range(2))
    everything = np.arange(1003)
    first.gather(everything[500:])
    assert proved.unproved > 0
    np.testing.assert_array_equal(second.gather(everything), array)
    assert proved.unproved == 0
    np.testing.assert_array_equal(first.gather(everything[::-1]), array[::-1])
    first.forget(0)
    assert proved.unproved == proved.blocks
    np.testing.assert_array_equal(second.gather(everything), array)
    assert proved.unproved == 0


def test_a_lost_extent_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(5))
    found = extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    next(Path(found.directory).glob("extent-*.bin")).unlink()
    with pytest.raises(DataError, match="cannot map"):
        found.gather(np.array([1]))
    next_one = extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    (Path(found.directory) / "extent-00000.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="has not the 40 bytes"):
        next_one.gather(np.array([1]))


def test_too_little_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))
    usage = type("Usage", (), {"free": 7999})
    monkeypatch.setattr(extents_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ArenaFullError, match="needs 8000 bytes of shared memory, 7999 are free"):
        extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    assert [path.name for path in (tmp_path / "extents").glob("*/*")] == ["catalogue.json"]


def test_a_damaged_block_is_an_error(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, size=(1000, 300), dtype=np.uint8)
    np.save(tmp_path / "x.npy", array)
    found = extents_of(f"npy:{tmp_path}/x.npy", tmp_path / "extents")
    path = Path(found.directory) / "extent-00000.bin"
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(200 * 300)
        file.write(bytes([array[200, 0] ^ 1]))
    per_block = found.catalogue.samples_per_block
    assert per_block == 218
    np.testing.assert_array_equal(found.gather(np.arange(218, 800)), array[218:800])
    with pytest.raises(DataError, match="is damaged"):
        found.gather(np.array([217]))


def test_catalogue_json() -> None:
    catalogue = Catalogue(7, "<f4", (2, 3), "xxh3-1", 4)
    assert Catalogue.from_json(catalogue.to_json()) == catalogue
    assert (catalogue.sample_bytes, catalogue.samples_in(1)) == (24, 3)
    with pytest.raises(DataError, match="not a catalogue"):
        Catalogue.from_json({"num_samples": 7})
