"""A script whose state is files of its own goes on from them; not at another layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Cluster

from .test_job import end

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 400
SCRIPT = [str(ROOT / "examples" / "plain_files.py"), "100000", "0.2"]
FLAGS = ["--state-files=1M", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-conf=last_call_timeout=20"]


def said(cluster: Cluster, pattern: str) -> list[str]:
    text = "".join(path.read_text() for path in sorted(cluster.out.glob("*.log")))
    return re.findall(pattern, text)


def committed(cluster: Cluster, step: int) -> None:
    cluster.wait(lambda: any(e["step"] >= step for e in cluster.events(kind="committed")), f"step {step} committed")


def losses(cluster: Cluster) -> dict[tuple[str, int], set[str]]:
    """By rank and step, of whichever round."""
    found: dict[tuple[str, int], set[str]] = {}
    for rank, step, loss in said(cluster, r"rank (\d+) step (\d+) loss (\S+)"):
        if int(step) < STEPS:
            found.setdefault((rank, int(step)), set()).add(loss)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], set[str]]:
    """What two ranks say that nothing happens to."""
    with Cluster(tmp_path_factory.mktemp("alone"), "alone", patience_s=150.0) as alone:
        alone.start("z", "127.0.0.9", ["--state-files=1M", "--nproc-per-node=2"], [SCRIPT[0], str(STEPS)])
        assert alone.exit_code("z") == 0
        return losses(alone)


def test_a_killed_worker_and_a_lost_node_cost_no_committed_step(
    cluster: Cluster, expected: dict[tuple[str, int], set[str]]
) -> None:
    """The lost node's files are on its buddy: a spare gets them."""
    cluster.start("a", "127.0.0.1", ["--nnodes=2:2", "--node-rank=0", *FLAGS], SCRIPT)
    cluster.start("b", "127.0.0.2", ["--nnodes=2:2", "--node-rank=1", *FLAGS], SCRIPT)
    committed(cluster, 1)
    cluster.start("c", "127.0.0.3", ["--nnodes=2:2", *FLAGS], SCRIPT)
    cluster.event("c", "joined")
    committed(cluster, 5)
    cluster.kill_worker("b", 0)
    cluster.wait(lambda: len(said(cluster, "begins at step")) == 4, "round 1")
    first = max(map(int, said(cluster, r"begins at step (\d+)")))
    assert first >= 5
    committed(cluster, first + 5)
    rounds = [event for event in cluster.events(kind="round") if event["phase"] == "running" and event["number"] == 1]
    second = rounds[0]["nodes"][1]
    cluster.kill_node(next(name for name in "bc" if cluster.event(name, "joined")["node"] == second))
    cluster.wait(lambda: len(said(cluster, "begins at step")) == 6, "round 2")
    assert max(map(int, said(cluster, r"begins at step (\d+)"))) >= first + 5
    cluster.wait(lambda: len(said(cluster, "begins at step 0")) == 2, "nobody else at the beginning")
    end(cluster)
    found = losses(cluster)
    assert len(found) > 20
    assert found.items() <= expected.items(), "to the last digit as if nothing had happened"


@pytest.mark.slow
def test_at_another_layout_the_files_are_not_shown(cluster: Cluster) -> None:
    cluster.start("a", "127.0.0.1", ["--nnodes=1:2", *FLAGS], SCRIPT)
    cluster.start("b", "127.0.0.2", ["--nnodes=1:2", *FLAGS], SCRIPT)
    committed(cluster, 5)
    cluster.kill_node("b")
    cluster.wait(lambda: said(cluster, "files of round 0 step .* are those of another layout"), "the word")
    cluster.wait(lambda: len(said(cluster, "begins at step")) == 3, "round 1")
    assert set(said(cluster, r"begins at step (\d+)")) == {"0"}
    end(cluster)


def test_the_data_goes_on_where_the_files_say(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(1000))
    script = tmp_path / "counts.py"
    script.write_text(
        "import json, os, pathlib, time\n"
        "home, data = pathlib.Path(os.environ['TENPLEX_STATE_DIR']), pathlib.Path(os.environ['TENPLEX_DATA_DIR'])\n"
        "step = int(os.environ['TENPLEX_RESUME_STEP'])\n"
        "print('step', step, 'at', json.loads((data / 'cursor.json').read_text())['consumed'], flush=True)\n"
        "while True:\n"
        "    step += 1\n"
        "    folder = home / f'step-{step}.tmp'\n"
        "    folder.mkdir()\n"
        "    (folder / 'consumed').write_text(str(4 * step))\n"
        "    folder.rename(home / f'step-{step}')\n"
        "    time.sleep(0.5)\n"
    )
    data = ["--data", f"bytes:{tmp_path}/data?sample_bytes=1", "--global-batch=4"]
    cluster.start("a", "127.0.0.1", ["--nnodes=1:1", *FLAGS, *data], [str(script)])
    committed(cluster, 3)
    cluster.kill_worker("a", 0)
    cluster.wait(lambda: len(said(cluster, "step .* at")) == 2, "round 1")
    step, consumed = map(int, said(cluster, r"step (\d+) at (\d+)")[1])
    assert step >= 3
    assert consumed == 4 * step
    end(cluster)


def test_files_that_are_too_large_end_the_job_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(
        "import os, pathlib, time\n"
        "folder = pathlib.Path(os.environ['TENPLEX_STATE_DIR']) / 'step-1.tmp'\n"
        "folder.mkdir()\n(folder / 'x').write_bytes(bytes(2 << 20))\nfolder.rename(folder.with_suffix(''))\n"
        "time.sleep(600)\n"
    )
    cluster.start("a", "127.0.0.1", ["--state-files=1M", "--nproc-per-node=1"], [str(script)])
    assert cluster.exit_code("a") == 67
    assert said(cluster, "step-1 holds more than the ")
