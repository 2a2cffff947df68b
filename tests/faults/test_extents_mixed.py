"""The same of samples that differ in size, which processes of torch's DataLoader fetch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cluster import Cluster
from file_servers import http_files
from programs.reader import line_of

from .test_extents import (
    check_order,
    extents_event,
    home,
    nodes,
    numbers,
    start,
    start_with_full_windows,
    taken,
)
from .test_job import end, process

__all__ = ["nodes"]  # a fixture

SAMPLES = 3000
WINDOW = 1 << 20


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(line_of(number)) + "\n" for number in range(SAMPLES)))
    return path


def test_nodes_are_lost_and_join_and_each_keeps_its_share(nodes: Cluster, lines: Path) -> None:
    for number in range(2):
        start(nodes, number, "1:3", f"jsonl:{lines}")
    nodes.wait_round(0, 2)
    for name in "ab":
        event = extents_event(nodes, name, lambda event: abs(2 * event["owned"] - event["extents"]) < 2)
        assert (event["unowned"], event["moved"]) == (0, event["bound"])
    assert not numbers(nodes, "a") & numbers(nodes, "b")
    assert taken(nodes, "a") + taken(nodes, "b") < lines.stat().st_size * 1.1 + 4 * WINDOW
    nodes.progress(10)
    start(nodes, 2, "1:3", f"jsonl:{lines}")
    nodes.wait_round(1, 3)
    event = extents_event(nodes, "c", lambda event: abs(3 * event["owned"] - event["extents"]) < 3)
    assert event["moved"] == event["bound"] == event["from_peers"]
    nodes.progress(10)
    nodes.kill_node("b")
    nodes.wait_round(2, 2)
    nodes.progress(10)
    for name in "ac":
        extents_event(
            nodes, name, lambda event: 2 * event["owned"] in range(event["extents"] - 1, event["extents"] + 2)
        )
    nodes.progress(SAMPLES // 24)
    end(nodes)
    check_order(nodes, SAMPLES)


def test_a_killed_view_and_a_server_that_stalls_are_not_felt_while_the_window_lasts(
    nodes: Cluster, lines: Path
) -> None:
    with http_files(lines.parent) as server:
        start_with_full_windows(nodes, f"jsonl:{server.url}/{lines.name}")
        # up to 250 KiB of it lie behind; a step takes 63, and one or two are with the processes that fetch
        server.gate.clear()
        nodes.progress(4)
        assert not server.gate.is_set()
        server.gate.set()
        os.kill(process(nodes, "a", "tenplexrun.vfs.server"), signal.SIGKILL)
        nodes.progress(20)
        for name in "ab":
            assert taken(nodes, name) < (2 << 20) + 4 * WINDOW
            assert home(nodes, name).is_dir()
        end(nodes)
    check_order(nodes, SAMPLES)
