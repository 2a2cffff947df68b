"""job.loader under a launcher with torch's DataLoader: any process reads samples from the nodes' memory."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tenplexrun.channel import PROTOCOL
from tenplexrun.core.extents import Placement
from tenplexrun.errors import DataError
from tenplexrun.formats import open_dataset
from tenplexrun.vfs.client import ViewClient
from tenplexrun.worker import shared
from tenplexrun.worker.data import Batch, Loader, open_loader, open_view
from tenplexrun.worker.shared import open_shared

from .test_view_process import Process, start

__all__ = ["start"]  # a fixture

SAMPLES = 300
ORDER = {"global_batch": 24, "micro_batch": 4, "seed": 5}
PLACE = {"dp_rank": 1, "dp_size": 2, "consumed": 48}
Start = Callable[..., Process]


def sizes() -> list[int]:
    return np.random.default_rng(0).integers(1, 30_000, size=SAMPLES).tolist()


def jsonl(folder: Path) -> str:
    lines = [json.dumps({"number": number, "text": "x" * size}) for number, size in enumerate(sizes())]
    (folder / "all.jsonl").write_text("\n".join(lines))
    return f"jsonl:{folder}/all.jsonl"


def images(folder: Path) -> str:
    for number in range(SAMPLES):
        place = folder / ("cat", "dog")[number % 2]
        place.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, size=(8 + number % 40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:03d}.png")
    return f"images:{folder}"


def npy(folder: Path) -> str:
    np.save(folder / "rows.npy", np.random.default_rng(0).integers(0, 256, size=(SAMPLES, 9000), dtype=np.uint8))
    return f"npy:{folder}/rows.npy"


def showing(view: Process, budget: int) -> Callable[[dict[str, Any]], str]:
    """As a job is shown a dataset whose only node has room for `budget` bytes."""
    placement = Placement("a", {"a": ""}, {"a": budget}, {}).to_json()

    def show(order: dict[str, Any]) -> str:
        async def asking(client: ViewClient) -> str:
            return await client.show(1, order, *PLACE.values(), placement)

        return str(view.ask(asking))

    return show


def opened(view: Process, spec: str, budget: int, **options: Any) -> Loader:
    return open_loader(spec, **ORDER, **PLACE, show=showing(view, budget), collate_fn=list, **options)


def same(ours: Batch, theirs: Batch) -> bool:
    assert ours.ids.tolist() == theirs.ids.tolist()
    pairs = zip((s for rows in ours.rows for s in rows), (s for rows in theirs.rows for s in rows), strict=True)
    return all(json.dumps(a, default=np.ndarray.tolist) == json.dumps(b, default=np.ndarray.tolist) for a, b in pairs)


@pytest.mark.parametrize("make", [jsonl, images, npy])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_samples_are_those_of_the_files(
    start: Start, tmp_path: Path, make: Callable[[Path], str], options: dict[str, Any]
) -> None:
    spec, view = make(tmp_path), start("farm", window_bytes=1 << 20)
    loader = opened(view, spec, 1 << 20, **options)
    plain = open_loader(spec, **ORDER, **PLACE, collate_fn=list)
    assert loader.order == plain.order
    for _ in range(2 * SAMPLES // 24):
        assert same(loader.next_batch(), plain.next_batch())
        loader.commit()
    loader.close()


def test_processes_that_fetch_samples_go_on_while_the_view_is_started_again(start: Start, tmp_path: Path) -> None:
    spec, view = jsonl(tmp_path), start("farm", window_bytes=1 << 20)
    loader = opened(view, spec, 1 << 20, num_workers=2)
    plain = open_loader(spec, **ORDER, **PLACE, collate_fn=list)
    assert same(loader.next_batch(), plain.next_batch())
    view.end(signal.SIGKILL)
    start("farm", window_bytes=1 << 20)
    for _ in range(2 * SAMPLES // 24):
        assert same(loader.next_batch(), plain.next_batch())
    loader.close()


def test_a_view_that_dies_while_it_is_asked_is_waited_for_however_long_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have hung until it was killed."""
    monkeypatch.setattr(shared, "_PATIENCE_S", 0.0)

    def answer() -> None:
        listening.accept()[0].close()
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb") as file:
            asked = json.loads(file.readline())
            file.write(json.dumps({"v": PROTOCOL, "re": asked["id"], "ok": {"files": ["a"]}}).encode() + b"\n")

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        serving = threading.Thread(target=answer)
        serving.start()
        assert shared.Asking(str(tmp_path / "s"), "dp-0000/round-0")(np.arange(3), 0) == ["a"]
        serving.join()


@pytest.mark.parametrize("make", [jsonl, npy])
def test_it_pickles_as_where_it_is(start: Start, tmp_path: Path, make: Callable[[Path], str]) -> None:
    """For worker processes that are spawned."""
    spec = make(tmp_path)
    index, _ = open_view(showing(start("farm", window_bytes=1 << 20), 1 << 20)({"dataset": spec, **ORDER}))
    pickled = pickle.dumps(open_shared(spec, index))
    assert len(pickled) < 2000
    samples, files = pickle.loads(pickled), open_dataset(spec)
    numbers = list(range(0, SAMPLES, 7))
    for ours, theirs in zip(samples.__getitems__(numbers), files.__getitems__(numbers), strict=True):
        assert json.dumps(ours, default=np.ndarray.tolist) == json.dumps(theirs, default=np.ndarray.tolist)


def test_a_sample_that_cannot_be_decoded_is_named(start: Start, tmp_path: Path) -> None:
    spec = images(tmp_path)
    (tmp_path / "cat" / "004.png").write_bytes(b"no image")
    loader = opened(start("farm"), spec, 1 << 30)
    with pytest.raises(DataError, match=r"sample 2 of .*cat/004\.png at byte 0: cannot identify image"):
        [loader.next_batch() for _ in range(SAMPLES // 24 + 1)]
