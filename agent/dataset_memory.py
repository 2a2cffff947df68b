"""This node's part in keeping datasets: how much memory it gives, what it holds, and what people hear of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenplexrun.agent.events import EventLog
from tenplexrun.core.extents import Spans
from tenplexrun.errors import ArenaFullError, TenplexError
from tenplexrun.ports import ViewClient

HELD_TIMEOUT_S = 0.5


def budget(asked: int | None, folder: Path) -> int:
    """Bytes that extents may take in the shared memory of `folder`: what is asked for, else half of what is free.

    Raises ArenaFullError when there is less than is asked for.
    """
    free = shutil.disk_usage(folder).free
    if asked is None:
        return free // 2
    if asked > free:
        raise ArenaFullError(
            f"--data-memory asks for {asked} bytes of shared memory, {free} are free: free some (df -h {folder}), "
            "enlarge it (mount -o remount,size=...; containers: --shm-size) or ask for less: what fits into no node "
            "is read from the dataset's own files"
        )
    return asked


async def held(view: ViewClient) -> Mapping[str, Spans]:
    """The extents that are here, by dataset; of a view that does not answer, none: the next round need not wait."""
    try:
        found = await asyncio.wait_for(view.held(), HELD_TIMEOUT_S)
    except (TenplexError, asyncio.TimeoutError):
        return {}
    return {key: tuple((first, count) for first, count in packed) for key, packed in found.items() if packed}


class Kept:
    """What this node keeps of datasets, by dataset, as its view has said last (`vfs.extents.Keeper`)."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.records: dict[str, dict[str, Any]] = {}

    def told(self, record: Mapping[str, Any]) -> None:
        self.records[str(record["dataset"])] = dict(record)
        if record["whole"]:
            tell(self._events, record)


def tell(events: EventLog, record: Mapping[str, Any]) -> None:
    """What this node keeps of a dataset has become as the round's plan says."""
    events.emit("extents", **record)
    kept, whole, mebi = record["num_bytes"], record["total_bytes"], 2**20
    if record["here_bytes"] == whole and kept < whole:
        what = f"all of {record['dataset']} ({whole / mebi:.1f} MiB) on this node: it is small"
    else:
        what = (
            f"{record['owned']} of {record['extents']} extents of {record['dataset']} on this node: {kept / mebi:.1f} "
            f"of {whole / mebi:.1f} MiB (up to {record['budget'] / mebi:.1f} MiB may be)"
        )
    moved = f"; {record['moved'] / mebi:.1f} MiB fetched, {record['from_peers'] / mebi:.1f} of them from other nodes"
    unowned = (
        f"; {record['unowned']} extents fit into no node: these samples are read from its own files"
        if record["unowned"]
        else ""
    )
    events.say(what + moved + unowned)
