"""A dataset that is in the nodes' shared memory once a job: nodes come, go and fail, extents break, files stall."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster

from tenplexrun.core.order import DataOrder

from .test_job import end

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
sys.path.insert(0, str(PROGRAMS))
from reader import row_of  # noqa: E402

SAMPLES, SIZE, EXTENTS, EXTENT_BYTES = 4096, 4096, 64, 256 << 10
WINDOW = 1 << 20
FLAGS = [
    "--nproc-per-node=1", "--max-restarts=5", f"--view-window={WINDOW}", "--data-memory=64M",
    "--rdzv-conf=last_call_timeout=20",
]  # fmt: skip


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


def taken(cluster: Cluster, name: str) -> int:
    """Bytes of rows and extents in a node's shared memory."""
    total = 0
    for path in home(cluster, name).iterdir():
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


def test_each_node_keeps_its_share(cluster: Cluster, dataset: str) -> None:
    for number in range(2):
        start(cluster, number, "2:2", dataset)
    for name in "ab":
        event = extents_event(cluster, name, lambda event: True)
        assert (event["owned"], event["extents"], event["unowned"]) == (EXTENTS // 2, EXTENTS, 0)
        assert event["moved"] == event["bound"] == SAMPLES * SIZE // 2
    cluster.wait_round(0, 2)
    cluster.progress(2 * SAMPLES // 24)
    assert numbers(cluster, "a") | numbers(cluster, "b") == set(range(EXTENTS))
    assert not numbers(cluster, "a") & numbers(cluster, "b")
    for name in "ab":
        assert taken(cluster, name) < SAMPLES * SIZE // 2 + 2 * WINDOW
    end(cluster)
    assert check_order(cluster) > 2 * SAMPLES // 24
