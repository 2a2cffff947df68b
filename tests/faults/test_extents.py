"""A dataset that is in the nodes' shared memory once a job: nodes come, go and fail, extents break, files stall."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from etcd_servers import EtcdServer, scratch
from file_servers import http_files
from programs.reader import row_of

from tenplexrun.agent.sweep import sweep
from tenplexrun.core.order import DataOrder
from tenplexrun.errors import DataError

from .test_job import curl, end, process

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"

SAMPLES, SIZE, EXTENTS, EXTENT_BYTES = 4096, 4096, 64, 256 << 10
WINDOW = 1 << 20
BLOCK = 16  # samples that have one checksum
FLAGS = [
    "--nproc-per-node=1", "--max-restarts=5", f"--view-window={WINDOW}", "--data-memory=64M",
    "--rdzv-conf=last_call_timeout=20",
]  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    """Nodes that meet at an etcd of its own: one that grows with them is another matter."""
    with scratch() as directory:
        etcd = EtcdServer(directory / "etcd")
        etcd.start()
        try:
            with Cluster(tmp_path / "cluster", patience_s=150.0, etcd=etcd.endpoint) as cluster:
                yield cluster
        finally:
            etcd.kill()
            sweep()  # after the node that is killed as a whole


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    np.save(tmp_path / "rows.npy", row_of(np.arange(SAMPLES), SIZE))
    return f"npy:{tmp_path}/rows.npy"


def command(dataset: str, folder: Path, pause_s: float = 0.02) -> list[str]:
    return [str(PROGRAMS / "reader.py"), dataset, str(folder), "1000000", str(pause_s)]


def start(cluster: Cluster, number: int, nnodes: str, dataset: str, *flags: str, pause_s: float = 0.02) -> None:
    name = "abc"[number]
    arguments = [f"--nnodes={nnodes}", *FLAGS, *flags]
    cluster.start(name, f"127.0.0.{number + 1}", arguments, command(dataset, cluster.out, pause_s))


def start_two(cluster: Cluster, dataset: str, pause_s: float) -> None:
    for number in range(2):
        start(cluster, number, "2:2", dataset, pause_s=pause_s)
    cluster.wait_round(0, 2)


def start_with_full_windows(cluster: Cluster, dataset: str) -> None:
    """Two nodes that have room for little of the dataset, and have much of the rest ahead."""
    for number in range(2):
        start(cluster, number, "2:2", dataset, "--data-memory=2M", pause_s=0.3)
    cluster.wait_round(0, 2)
    cluster.progress(6)
    cluster.wait(lambda: all(ahead_bytes(cluster, name) >= 640 << 10 for name in "ab"), "full windows")


def extents_event(cluster: Cluster, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        events = [event for event in cluster.events(name, "extents") if condition(event)]
        return events[-1] if events else None

    return dict(cluster.wait(found, f"extents of node {name}"))


def home(cluster: Cluster, name: str) -> Path:
    [found] = (Path(cluster.event(name, "started")["dir"]) / "extents").iterdir()
    return found


def numbers(cluster: Cluster, name: str) -> set[int]:
    return {int(path.name[7:12]) for path in home(cluster, name).glob("extent-*.bin")}


def ahead_bytes(cluster: Cluster, name: str) -> int:
    return taken(cluster, name, "ahead-*.rows")


def taken(cluster: Cluster, name: str, pattern: str = "*") -> int:
    """Bytes of rows and extents in a node's shared memory."""
    total = 0
    for path in home(cluster, name).glob(pattern):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            pass
    return total


def check_order(cluster: Cluster, num_samples: int = SAMPLES) -> int:
    """Each step, whoever read it and however often it was repeated, has the samples of the global order. Returns how
    many steps were read."""
    found: dict[int, dict[str, dict[int, list[int]]]] = {}
    for path in cluster.out.glob("ids-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                found.setdefault(record["step"], {}).setdefault(path.name[:7], {})[record["rank"]] = record["ids"]
    order = DataOrder(num_samples, 7, 24, 4)
    consumed, complete = 0, 0
    for step in range(max(found) + 1):
        wanted = order.sample_at(np.arange(consumed, order.step(consumed).stop)).tolist()
        consumed = order.step(consumed).stop
        read = [[i for rank in sorted(ranks) for i in ranks[rank]] for ranks in found[step].values()]
        whole = [ids for ids in read if len(ids) == len(wanted)]
        assert all(ids == wanted for ids in whole), step
        complete += bool(whole)
    assert complete >= max(found)
    return complete


def test_each_node_keeps_its_share(nodes: Cluster, dataset: str) -> None:
    for number in range(2):
        start(nodes, number, "2:2", dataset)
    for name in "ab":
        event = extents_event(nodes, name, lambda event: True)
        assert (event["owned"], event["extents"], event["unowned"]) == (EXTENTS // 2, EXTENTS, 0)
        assert event["moved"] == event["bound"] == SAMPLES * SIZE // 2
    nodes.wait_round(0, 2)
    nodes.progress(SAMPLES // 24 + 10)
    assert numbers(nodes, "a") | numbers(nodes, "b") == set(range(EXTENTS))
    assert not numbers(nodes, "a") & numbers(nodes, "b")
    for name in "ab":
        assert taken(nodes, name) < SAMPLES * SIZE // 2 + 2 * WINDOW
    line = f"    {dataset}: 32 of 64 extents, 8.0 of 8.0 MiB here (of all datasets up to 64.0 MiB may be)\n"
    nodes.wait(lambda: nodes.ctl("status").stdout.count(line) == 2, "the status of both nodes")
    content = json.loads(nodes.ctl("status", "--json").stdout)
    assert f"\ntenplex_extents_here_bytes {SAMPLES * SIZE // 2}\n" in curl(nodes, "/metrics")
    [kept] = next(records for key, records in content.items() if "/datasets/" in key)
    assert (kept["owned"], kept["here_bytes"], kept["whole"]) == (EXTENTS // 2, SAMPLES * SIZE // 2, True)
    end(nodes)
    assert check_order(nodes) > SAMPLES // 24, "into the second epoch"


def test_a_lost_nodes_extents_are_read_again_and_nothing_else(nodes: Cluster, dataset: str) -> None:
    for number in range(3):
        start(nodes, number, "2:3", dataset)
    for name in "abc":
        extents_event(nodes, name, lambda event: event["owned"] in (21, 22))
    nodes.wait_round(0, 3)
    lost = numbers(nodes, "c")
    before = {name: numbers(nodes, name) for name in "ab"}
    nodes.progress(20)
    nodes.kill_node("c")
    nodes.wait_round(1, 2)
    events = [extents_event(nodes, name, lambda event: event["owned"] == EXTENTS // 2) for name in "ab"]
    assert sum(event["moved"] for event in events) == sum(event["bound"] for event in events)
    assert sum(event["moved"] for event in events) == len(lost) * EXTENT_BYTES
    assert [event["from_peers"] for event in events] == [0, 0]
    assert all(before[name] < numbers(nodes, name) <= before[name] | lost for name in "ab")
    nodes.progress(20)
    end(nodes)
    check_order(nodes)


def test_a_node_that_joins_gets_its_share_from_the_others(nodes: Cluster, dataset: str) -> None:
    for number in range(2):
        start(nodes, number, "2:3", dataset)
    nodes.wait_round(0, 2)
    for name in "ab":
        extents_event(nodes, name, lambda event: event["owned"] == EXTENTS // 2)
    before = {name: numbers(nodes, name) for name in "ab"}
    nodes.progress(5)
    start(nodes, 2, "2:3", dataset)
    nodes.wait_round(1, 3)
    event = extents_event(nodes, "c", lambda event: event["owned"] == 21)
    assert event["moved"] == event["bound"] == event["from_peers"] == 21 * EXTENT_BYTES
    nodes.wait(lambda: sum(len(numbers(nodes, name)) for name in "abc") == EXTENTS, "what is given to be dropped")
    assert all(numbers(nodes, name) < before[name] for name in "ab")
    for name in "ab":
        event = extents_event(nodes, name, lambda event: event["owned"] < EXTENTS // 2)
        assert (event["moved"], event["bound"]) == (0, 0)
    nodes.progress(20)
    end(nodes)
    check_order(nodes)


def test_a_damaged_extent_is_noticed_and_fetched_anew(nodes: Cluster, dataset: str) -> None:
    """By its owner's rank or for another node's, whichever reads it first; the script proves the rows."""
    start_two(nodes, dataset, pause_s=0.05)
    position = np.argsort(DataOrder(SAMPLES, 7, 24, 4).sample_at(np.arange(SAMPLES)))
    block = int(position.reshape(-1, BLOCK).min(axis=1).argmax())  # it is read last of all
    number, place = divmod(block * BLOCK, EXTENT_BYTES // SIZE)
    owner = next(name for name in "ab" if number in numbers(nodes, name))
    path = home(nodes, owner) / f"extent-{number:05d}.bin"
    inode = path.stat().st_ino
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(place * SIZE)
        file.write(b"\xff" * BLOCK * SIZE)
    assert nodes.committed() * 24 < position.reshape(-1, BLOCK).min(axis=1).max(), "not read by now"
    nodes.wait(lambda: path.exists() and path.stat().st_ino != inode, "the extent to be fetched anew")
    nodes.progress(SAMPLES // 24)
    end(nodes)
    check_order(nodes)


def test_files_that_stall_are_not_felt_while_the_window_lasts(nodes: Cluster, tmp_path: Path) -> None:
    """Most of the dataset fits into no node, and is behind a URL whose server answers nobody for a while."""
    np.save(tmp_path / "rows.npy", row_of(np.arange(SAMPLES), SIZE))
    with http_files(tmp_path) as server:
        start_with_full_windows(nodes, f"npy:{server.url}/rows.npy")
        for name in "ab":
            event = extents_event(nodes, name, lambda event: True)
            assert (event["owned"], event["unowned"]) == (8, EXTENTS - 16)
        # of a full window, 760 KiB lie ahead and up to 190 behind; eight steps take 290
        server.gate.clear()
        nodes.progress(8)
        assert not server.gate.is_set()
        for name in "ab":
            assert taken(nodes, name) < (2 << 20) + 2 * WINDOW
        server.gate.set()
        nodes.progress(30)
        server.failing = 40
        nodes.progress(8)
        server.failing = 1 << 30
        nodes.wait(lambda: nodes.events(kind="view_failed"), "an outage")
        requests = server.requests
        nodes.wait(lambda: server.requests > requests + 100, "more attempts")
        server.failing = 0
        nodes.progress(30)
        kinds = ("view_failed", "view_recovered")
        told = {name: [e["event"] for e in nodes.events(name) if e["event"] in kinds] for name in "ab"}
        assert [*kinds] in told.values()
        assert all(said in ([], [*kinds]) for said in told.values()), "once a node and outage"
        line = r"^tenplexrun [\d:.]+ \[\w+\] the dataset view of this node: rows of npy:.* can be fetched again$"
        said = "\n".join(map(nodes.log, "ab"))
        assert len(re.findall(line, said, re.MULTILINE)) == said.count("can be fetched again") > 0
        end(nodes)
    check_order(nodes)


def test_a_dataset_cut_short_ends_the_job_where_it_is_needed(nodes: Cluster, dataset: str, tmp_path: Path) -> None:
    """And a lost node's part of it is: no wait, no restart."""
    for number in range(2):
        start(nodes, number, "1:2", dataset)
    nodes.wait_round(0, 2)
    for name in "ab":
        extents_event(nodes, name, lambda event: event["owned"] == EXTENTS // 2)
    os.truncate(tmp_path / "rows.npy", 1 << 20)
    nodes.progress(20)
    nodes.kill_node("b")
    assert nodes.exit_code("a") == DataError.exit_code
    rounds = [event["number"] for event in nodes.events("a", "round") if event["phase"] == "running"]
    assert rounds == [0, 1]
    last = nodes.log("a").partition("ended with exit code 69: ")[2]
    assert re.match(r"rank 0 .*: exit code 69; no restart would mend", last)
    assert re.search(r"/rows\.npy (has shrunk|was written to) since the job began; .*restore it, and start", last)
    assert len(nodes.events("a", "view_failed")) == 1


def test_two_datasets_that_do_not_fit_together_are_read_all_the_same(nodes: Cluster, tmp_path: Path) -> None:
    """Each alone would fit. What has no room comes from the files, also after a loss, and that is said once a round."""
    for name, size in (("rows", SIZE), ("more", SIZE // 2)):
        np.save(tmp_path / f"{name}.npy", row_of(np.arange(SAMPLES), size))
    both = f"npy:{tmp_path}/rows.npy,npy:{tmp_path}/more.npy"
    for number in range(2):
        start(nodes, number, "1:2", both, "--data-memory=9M")
    nodes.wait_round(0, 2)
    nodes.progress(SAMPLES // 24 + 10)
    for name in "ab":
        event = extents_event(nodes, name, lambda event: event["dataset"].endswith("rows.npy"))
        assert event["owned"] == EXTENTS // 2
        assert extent_bytes(nodes, name) <= 9 << 20
    line = rf"    npy:{tmp_path}/more\.npy: 16 of 32 extents, \S+ of 4\.0 MiB here, more on the way .*up to 9\.0 MiB"
    status = nodes.ctl("status").stdout
    assert len(re.findall(line, status)) == 2, status
    told = nodes.events(kind="view_failed")
    assert sorted(event["node"] for event in told) == sorted({event["node"] for event in told})
    assert all(event["message"].startswith("no room for more of npy:") for event in told)
    nodes.kill_node("b")
    nodes.wait_round(1, 1)
    nodes.progress(SAMPLES // 24)
    assert extent_bytes(nodes, "a") <= 9 << 20
    assert len(nodes.events("a", "view_failed")) <= 3, "each dataset once a round"
    end(nodes)
    check_order(nodes)


def extent_bytes(cluster: Cluster, name: str) -> int:
    folder = Path(cluster.event(name, "started")["dir"]) / "extents"
    return sum(path.stat().st_size for path in folder.glob("*/extent-*.bin"))


def test_killed_views_and_stores_come_back_while_rows_are_read(nodes: Cluster, dataset: str) -> None:
    """The order and every row are as ever; what they kept in memory is still there."""
    start_two(nodes, dataset, pause_s=0.1)
    held = {name: {path: path.stat().st_ino for path in home(nodes, name).glob("extent-*.bin")} for name in "ab"}
    for name, module in (
        ("a", "tenplexrun.vfs.server"),
        ("b", "tenplexrun.store.server"),
        ("b", "tenplexrun.vfs.server"),
    ):
        nodes.progress(3)
        os.kill(process(nodes, name, module), signal.SIGKILL)
    nodes.wait(lambda: len(nodes.events("*", "process_ended")) == 3, "all deaths")
    nodes.progress(30)
    for name in "ab":
        assert held[name] == {path: path.stat().st_ino for path in home(nodes, name).glob("extent-*.bin")}
        assert len(nodes.events(name, "spawned")) == 1, "no worker has noticed"
    end(nodes)
    check_order(nodes)
