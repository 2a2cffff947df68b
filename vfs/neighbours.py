"""Samples from other nodes: fetched by the node's own store, which speaks with theirs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tenplexrun.channel import BlockingChannel
from tenplexrun.errors import TenplexError

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """`count` samples of an extent from its sample `first` on, at any of the stores with these addresses."""

    extent: int
    first: int
    count: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Asks the store at `socket` (None: there is none) for samples of dataset `key`. May be used by several threads."""

    socket: str | None
    key: str

    def fetch(self, path: str, start: int, sample_bytes: int, runs: Sequence[Run]) -> list[int]:
        """Have `runs` put into the file `path`, one after the other from byte `start` on. Returns the indexes of those
        that nobody delivered."""
        asked = [index for index, run in enumerate(runs) if run.addresses]
        if self.socket is None or not asked:
            return list(range(len(runs)))
        offsets, offset = [], start
        for run in runs:
            offsets.append(offset)
            offset += run.count * sample_bytes
        known = {address: place for place, address in enumerate(dict.fromkeys(a for r in runs for a in r.addresses))}
        record = [
            [runs[i].extent, runs[i].first, runs[i].count, offsets[i], [known[a] for a in runs[i].addresses]]
            for i in asked
        ]
        try:
            channel = BlockingChannel(f"unix:{self.socket}", TIMEOUT_S)
            try:
                answer = channel.request(
                    "fetch", dataset=self.key, path=path, sample_bytes=sample_bytes, runs=record, addresses=[*known]
                )
            finally:
                channel.close()
        except TenplexError:  # it is being started again
            return list(range(len(runs)))
        missing = {asked[int(place)] for place in answer["missing"]}
        return [index for index, run in enumerate(runs) if index in missing or not run.addresses]

    def probe(self, folder: Path, sample_bytes: int, runs: Sequence[Run]) -> list[int]:
        """As `fetch`, only to see who can deliver."""
        if not runs:
            return []
        with tempfile.NamedTemporaryFile(dir=folder, prefix="probe-") as file:
            file.truncate(sum(run.count for run in runs) * sample_bytes)
            return self.fetch(file.name, 0, sample_bytes, runs)
