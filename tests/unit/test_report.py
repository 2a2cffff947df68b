"""The table of what each round cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.report import rows, table
from tenplexrun.ctl import read_events
from tenplexrun.errors import UsageError


def test_a_failures_row_adds_up() -> None:
    config = ParallelConfig(tp=2).to_json()

    def event(t: float, kind: str, **fields: object) -> dict[str, object]:
        return {"t": t, "node": "a", "event": kind, **fields}

    def round_(t: float, number: int, phase: str, cause: str, step: int) -> dict[str, object]:
        common = {"nodes": ["a"], "parallel": config, "detail": "d", "noticed": 100.1, "step": step}
        return event(t, "round", number=number, phase=phase, cause=cause, **common)

    events = [
        round_(99.0, 0, "running", "start", 0),
        event(100.0, "injected", what="kill"),
        round_(100.2, 1, "gathering", "worker_failed", 0),
        event(100.3, "stopped", round=0, how="kill", seconds=0.1, started=12),
        round_(100.4, 1, "running", "worker_failed", 10),
        event(100.5, "spawned", round=1, began=100.4, seconds=0.1, pids=[1]),
        event(100.5, "moved", round=1, seconds=0.05, num_bytes=2**20, lower_bound=2**20),
        event(100.9, "worker", round=1, name="restored", at=100.8),
        event(101.1, "worker", round=1, name="first_step", at=101.0),
    ]
    row = rows(reversed(events))[1]
    assert row.downtime == 1.0
    parts = (row.detect, row.decide, row.stop, row.spawn, row.load, row.first_step)
    assert all(part is not None for part in parts)
    assert abs(sum(part for part in parts if part is not None) - 1.0) < 1e-6
    assert (row.repeated, row.num_bytes, row.lower_bound, row.layout) == (2, 2**20, 2**20, "tp2")
    assert "1.00 MiB" in table([row])


@pytest.mark.parametrize("line", [b"[1]", b"{}", b'{"t": null, "node": "a", "event": "x"}', b"\xff\xfe", b"none"])
def test_what_is_no_event_is_refused_unless_it_is_a_torn_end(line: bytes, tmp_path: Path) -> None:
    event = {"t": 1.5, "node": "a", "event": "started"}
    path = tmp_path / "events"
    path.write_bytes(json.dumps(event).encode() + b"\n" + line)
    assert read_events([str(path)]) == [event]
    path.write_bytes(line + b"\n" + json.dumps(event).encode())
    with pytest.raises(UsageError, match="events:1 is no JSON event"):
        read_events([str(path)])
