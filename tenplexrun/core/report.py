"""What a job's changes cost: one row a round, from the events of all nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import FAILURES

Event = Mapping[str, Any]
PLANNED = ("resize", "node_joined", "node_left")


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round. Durations in seconds, None where unknown; the parts follow one another but for `move`, which runs
    beside `spawn` and `load`. `downtime`: from the fault (planned changes: from the step boundary) to the end of the
    first step; `repeated`: completed steps that are run again."""

    number: int
    cause: str
    detail: str
    layout: str
    nodes: int
    step: int
    repeated: int | None
    downtime: float | None
    detect: float | None
    decide: float | None
    stop: float | None
    move: float | None
    spawn: float | None
    load: float | None
    first_step: float | None
    num_bytes: int
    lower_bound: int


def rows(events: Iterable[Event]) -> list[RoundRow]:
    """The rounds that ran, in order. `events` are those of all nodes, in any order; "injected" ones (of a test or
    demo) tell when a fault really happened."""
    ordered = sorted(events, key=lambda event: float(event["t"]))
    running = [e for e in ordered if e["event"] == "round" and e["phase"] == "running"]
    found: dict[int, RoundRow] = {}
    for event in running:
        if event["number"] not in found:  # a new decider writes the same round again
            found[event["number"]] = _row(event, ordered)
    return [found[number] for number in sorted(found)]


def _row(running: Event, events: Sequence[Event]) -> RoundRow:
    number, cause = int(running["number"]), str(running["cause"])
    of_round = [e for e in events if e.get("round") == number]
    gathering = _first(e["t"] for e in events if _is_gathering(e, number))
    fault = _fault(events, cause, running, gathering)
    began = _first(e["t"] for e in of_round if e["event"] == "parked") if cause in PLANNED else None
    start = began or fault or (float(running["noticed"]) if cause != "start" else gathering)
    moved = [e for e in of_round if e["event"] == "moved"]
    spawned = _last(e["began"] + e["seconds"] for e in of_round if e["event"] == "spawned")
    restored = _last(e["at"] for e in of_round if e["event"] == "worker" and e["name"] == "restored")
    stepped = _last(e["at"] for e in of_round if e["event"] == "worker" and e["name"] == "first_step")
    before = _last(float(e["started"]) for e in _stopped(events, number) if e.get("started") is not None)
    noticed = float(running["noticed"])
    return RoundRow(
        number=number,
        cause=cause,
        detail=str(running["detail"]),
        layout=str(ParallelConfig.from_json(running["parallel"])),
        nodes=len(running["nodes"]),
        step=int(running["step"]),
        repeated=None if before is None else max(0, int(before) - int(running["step"])),
        downtime=_between(start, stepped),
        detect=_between(fault, noticed),
        decide=_between(noticed, gathering) if cause != "start" and began is None else None,
        stop=_between(began or gathering, float(running["t"])),
        move=_last(float(e["seconds"]) for e in moved),
        spawn=_between(float(running["t"]), spawned),
        load=_between(spawned, restored),
        first_step=_between(restored, stepped),
        num_bytes=sum(int(e["num_bytes"]) for e in moved),
        lower_bound=sum(int(e["lower_bound"]) for e in moved),
    )


def _is_gathering(event: Event, number: int) -> bool:
    return bool(event["event"] == "round" and event["phase"] == "gathering" and event["number"] == number)


def _fault(events: Sequence[Event], cause: str, running: Event, gathering: float | None) -> float | None:
    """When the fault behind a round was made, if somebody who made it said so."""
    if cause not in (*FAILURES, "node_lost") or gathering is None:
        return None
    earlier = [float(e["t"]) for e in events if e["event"] == "injected" and e["t"] <= gathering]
    before = [float(e["t"]) for e in events if e["event"] == "round" and e["number"] < running["number"]]
    recent = _last(earlier)
    return recent if recent is not None and (not before or recent > max(before)) else None


def _stopped(events: Sequence[Event], number: int) -> list[Event]:
    """The stops that led to this round: those since the last one before it ran."""
    older = [e for e in events if e["event"] == "stopped" and e["round"] < number]
    newest = max((e["round"] for e in older), default=None)
    return [e for e in older if e["round"] == newest]


def _first(times: Iterable[float]) -> float | None:
    return min(times, default=None)


def _last(times: Iterable[float]) -> float | None:
    return max(times, default=None)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


COLUMNS = (
    ("round", "number"), ("cause", "cause"), ("layout", "layout"), ("nodes", "nodes"), ("from step", "step"),
    ("repeated", "repeated"), ("downtime", "downtime"), ("detect", "detect"), ("decide", "decide"), ("stop", "stop"),
    ("move", "move"), ("spawn", "spawn"), ("load", "load"), ("1st step", "first_step"), ("moved", "num_bytes"),
    ("bound", "lower_bound"),
)  # fmt: skip


def table(found: Sequence[RoundRow]) -> str:
    """The rows as aligned text; seconds with three digits, bytes in MiB."""
    lines = [[title for title, _ in COLUMNS]]
    lines += [[_cell(name, getattr(row, name)) for _, name in COLUMNS] for row in found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name in ("num_bytes", "lower_bound") and isinstance(value, int):
        return f"{value / 2**20:.2f} MiB"
    return f"{value:.3f} s" if isinstance(value, float) else str(value)
