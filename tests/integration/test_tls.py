"""TLS between nodes: the store's wire, HTTP and the agents' links. The authority is thrown away."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trustme
from cluster import Cluster
from extents_of import extents_of
from programs.reader import row_of

from tenplexrun.agent.links import Links
from tenplexrun.config import parse
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import Claim
from tenplexrun.errors import UsageError, WireError
from tenplexrun.store import wire
from tenplexrun.store.arena import Arena
from tenplexrun.store.peers import PeerServer
from tenplexrun.store.pulls import Order, PullJob
from tenplexrun.store.shelf import RowsJob, Shelf
from tenplexrun.store.transfer import Peers
from tenplexrun.tls import Tls

LAYOUT = Layout((TensorSpec("rows", (1500, 1001), "float64", (Shard(0, "tp"),)),))
ONE = Claim(ParallelConfig(), (0,))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PEM files of `one`, `two` (127.0.0.1, 127.0.0.2), and of a `stranger`, which another authority has signed."""
    folder, authority, other = tmp_path_factory.mktemp("tls"), trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    other.cert_pem.write_to_path(str(folder / "other.pem"))
    issued = {name: authority.issue_cert(host) for name, host in (("one", "127.0.0.1"), ("two", "127.0.0.2"))}
    for name, cert in {**issued, "stranger": other.issue_cert("127.0.0.1")}.items():
        cert.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        cert.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    return folder


def tls(files: Path, name: str, ca: str = "ca") -> Tls:
    return Tls(*(str(files / file) for file in (f"{name}.pem", f"{name}.key", f"{ca}.pem")))


@pytest.fixture
def source(files: Path, tmp_path: Path) -> Iterator[tuple[Arena, int]]:
    """A store at 127.0.0.1 that holds a snapshot, and its port."""
    arena = Arena.open(tmp_path / "source")
    slots = arena.open_round(1, LAYOUT, ONE)
    arena.file(slots[0].name).view[: 1500 * 1001 * 8] = np.arange(1500 * 1001.0).tobytes()
    arena.seal(1, 0, 0, {})
    server = PeerServer(arena, b"secret", 5.0, tls=tls(files, "one").server())
    yield arena, server.start("127.0.0.1")
    server.close()


def test_regions_come_by_tls(source: tuple[Arena, int], files: Path, tmp_path: Path) -> None:
    arena, port = source
    (index,) = arena.snapshots()
    target = Arena.open(tmp_path / "target")
    fetch = {"fqn": "rows", "source": "a", "address": f"127.0.0.1:{port}"}
    parts = [(([3, 0], [1200, 1001]), "run"), (([0, 5], [1500, 7]), "strided")]
    fetches = [{**fetch, "region": region, "num_bytes": region[1][0] * region[1][1] * 8} for region, _ in parts]
    record = {"round": 2, "snapshot": index.snapshot.to_json(), "layout": LAYOUT.to_json(), "claim": ONE.to_json()}
    order = Order.from_json({**record, "fetches": fetches})
    PullJob(target, Peers("secret", 5.0, tls(files, "two").client()), order).run()
    for piece in target.get(index.snapshot).pieces:
        data = np.frombuffer(target.file(piece.file).view, np.float64, piece.region.num_elements, piece.offset)
        expected = np.arange(1500 * 1001.0).reshape(1500, 1001)[piece.region.slices]
        np.testing.assert_array_equal(data.reshape(piece.region.lengths), expected)


def test_samples_come_by_tls(files: Path, tmp_path: Path) -> None:
    """Of a dataset's extents; to nobody else."""
    rows = np.arange(3000 * 1001, dtype=np.uint32).reshape(3000, 1001)
    np.save(tmp_path / "rows.npy", rows)
    kept = extents_of(f"npy:{tmp_path}/rows.npy", tmp_path / "extents")
    per, size, home = kept.catalogue.samples_per_extent, kept.catalogue.sample_bytes, Path(kept.directory)
    shelf = Shelf(tmp_path / "extents")
    server = PeerServer(Arena.open(tmp_path / "arena"), b"secret", 5.0, tls=tls(files, "one").server(), shelf=shelf)
    address, path = f"127.0.0.1:{server.start('127.0.0.1')}", tmp_path / "fetched"
    runs = [[1, 0, per, 0, [0]], [3, 5, 2, per * size, [0]]]
    record = {"dataset": home.name, "path": str(path), "sample_bytes": size, "addresses": [address], "runs": runs}
    try:
        for name, missing in (("stranger", [0, 1]), ("two", [])):
            path.write_bytes(bytes((per + 2) * size))
            job = RowsJob(Peers("secret", 5.0, tls(files, name).client()), record)
            assert job.run()["missing"] == missing
            assert any(path.read_bytes()) == (not missing)
        expected = np.concatenate([rows[per : 2 * per], rows[3 * per + 5 : 3 * per + 7]])
        np.testing.assert_array_equal(np.fromfile(path, np.uint32).reshape(-1, 1001), expected)
        (home / "extent-00003.xxh3").unlink()
        assert RowsJob(Peers("secret", 5.0, tls(files, "two").client()), record).run()["missing"] == [1]
        assert not (home / "extent-00003.bin").exists(), "it is fetched anew"
    finally:
        server.close()


def test_who_is_not_of_the_job_gets_nothing(source: tuple[Arena, int], files: Path) -> None:
    arena, port = source
    request = wire.Describe(arena.snapshots()[0].snapshot)
    for context, address in (
        (None, "127.0.0.1"),  # no TLS
        (tls(files, "stranger", "ca").client(), "127.0.0.1"),  # of another authority
        (tls(files, "one", "other").client(), "127.0.0.1"),  # trusts another one
        (tls(files, "one").client(), "localhost"),  # the certificate is for another address
    ):
        with pytest.raises(WireError):
            Peers("secret", 5.0, context).ask([f"{address}:{port}"], request, dict)
    assert Peers("secret", 5.0, tls(files, "two").client()).ask([f"127.0.0.1:{port}"], request, dict)


def test_a_wrong_certificate_ends_a_pull_at_once(source: tuple[Arena, int], files: Path, tmp_path: Path) -> None:
    """It is no peer that went away, which would be asked again for a while."""
    arena, port = source
    (index,) = arena.snapshots()
    fetch = {"fqn": "rows", "source": "a", "region": [[0, 0], [1500, 1001]], "num_bytes": 1500 * 1001 * 8}
    record = {"round": 2, "snapshot": index.snapshot.to_json(), "layout": LAYOUT.to_json(), "claim": ONE.to_json()}
    order = Order.from_json({**record, "fetches": [{**fetch, "address": f"127.0.0.1:{port}"}]})
    peers = Peers("secret", 600.0, tls(files, "stranger").client())
    with pytest.raises(WireError, match=r"alert unknown ca.*--tls-cert"):
        PullJob(Arena.open(tmp_path / "target"), peers, order, patience_s=600.0).run()


def test_curl_by_tls(source: tuple[Arena, int], files: Path) -> None:
    argv = ["curl", "-sSf", "--max-time", "60", "--cacert", str(files / "ca.pem"), "--cert", str(files / "two.pem")]
    argv += ["--key", str(files / "two.key"), "-H", "Authorization: Bearer secret"]
    done = subprocess.run([*argv, f"https://127.0.0.1:{source[1]}/v1/snapshots"], capture_output=True, check=True)
    assert [one["step"] for one in json.loads(done.stdout)] == [0]


def test_links_by_tls(files: Path) -> None:
    async def scenario() -> None:
        decider, member = Links("a", "secret", tls(files, "one")), Links("b", "secret", tls(files, "two"))
        stranger, plain = Links("c", "secret", tls(files, "stranger", "other")), Links("d", "secret")
        address = await decider.start("127.0.0.1")
        for links, host in ((member, "127.0.0.2"), (stranger, "127.0.0.1"), (plain, "127.0.0.1")):
            await links.start(host)
        for links in (stranger, plain, member):
            links.follow(address)
        while "b" not in decider.linked():
            await asyncio.sleep(0.01)
        assert decider.linked() == {"a", "b"}
        for links in (decider, member, stranger, plain):
            await links.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_files_that_cannot_be_used_are_one_line(files: Path, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    good = [f"--tls-cert={files / 'one.pem'}", f"--tls-key={files / 'one.key'}", f"--tls-ca={files / 'ca.pem'}"]
    assert parse([*good, str(script)], {}).tls == tls(files, "one")
    for flags in (good[:2], [*good[:2], "--tls-ca=/none"], [good[0], f"--tls-key={files / 'two.key'}", good[2]]):
        with pytest.raises(UsageError, match="--tls-cert"):
            parse([*flags, str(script)], {})


def test_a_job_by_tls(cluster: Cluster, files: Path) -> None:
    """Two nodes train, and replicate each other's state."""
    command = [str(Path(__file__).parents[2] / "examples" / "train_gpt.py"), "--dim=32", "--heads=2", "--seq-len=32"]
    command += ["--global-batch=4", "--micro-batch=2", "--steps=6"]
    for name, host, cert in (("a", "127.0.0.1", "one"), ("b", "127.0.0.2", "two")):
        flags = ["--nnodes=2", "--nproc-per-node=1", "--pp=2", f"--tls-ca={files / 'ca.pem'}"]
        flags += [f"--tls-cert={files / f'{cert}.pem'}", f"--tls-key={files / f'{cert}.key'}"]
        cluster.start(name, host, flags, command)
    assert {cluster.exit_code(name) for name in "ab"} == {0}
    assert cluster.events(kind="replicated")


def test_a_joining_node_gets_its_part_of_a_dataset_by_tls(cluster: Cluster, files: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", row_of(np.arange(1024), 4096))
    program = Path(__file__).parents[1] / "programs" / "reader.py"
    command = [str(program), f"npy:{tmp_path}/rows.npy", str(cluster.out), "1000000", "0.02"]
    for number, (name, cert) in enumerate((("a", "one"), ("b", "two"))):
        flags = ["--nnodes=1:2", "--nproc-per-node=1", "--view-window=1M", f"--tls-ca={files / 'ca.pem'}"]
        flags += [f"--tls-cert={files / f'{cert}.pem'}", f"--tls-key={files / f'{cert}.key'}"]
        cluster.start(name, f"127.0.0.{number + 1}", flags, command)
        cluster.wait_round(number, number + 1)
        cluster.progress(5)
    cluster.wait(lambda: cluster.events("b", "extents"), "the extents of b")
    [event] = cluster.events("b", "extents")
    assert event["from_peers"] == event["moved"] == 1024 * 4096 // 2
    cluster.progress(1024 // 24)
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert {cluster.exit_code(name) for name in "ab"} == {130}
