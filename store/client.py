"""The agent's end of the store's control socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tenplexrun import channel
from tenplexrun.errors import ProcessError, WireError

Record = dict[str, Any]

SLOWEST_BYTES_PER_S = 5 << 20
"""A pull slower than this for its whole size is given up."""


class StoreClient:
    """Implements `tenplexrun.ports.StoreClient` over the socket at `path`.

    Connects when first used, and again after the store was restarted. Every method raises what the store raised,
    WireError where the store is gone or silent too long.
    """

    def __init__(self, path: str, timeout_s: float = 120.0) -> None:
        self._address = f"unix:{path}"
        self._timeout_s = timeout_s
        self._channel: channel.Channel | None = None
        self._connecting = asyncio.Lock()

    async def hello(self, timeout_s: float = 20.0) -> int:
        """Wait until the store is ready. Returns the port that it serves peers on. Raises ProcessError."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return int((await self._ask("hello"))["port"])
            except WireError as error:
                if time.monotonic() > deadline:
                    raise ProcessError(f"the tensor store did not start within {timeout_s} s: {error}") from error
            await asyncio.sleep(0.01)

    async def open_round(self, round_number: int, layout: Record, config: Record, ranks: Sequence[int]) -> Record:
        return await self._ask("open_round", round=round_number, layout=layout, config=config, ranks=list(ranks))

    async def seal(self, round_number: int, step: int, slot: int, values: Record | None) -> Record:
        return await self._ask("seal", round=round_number, step=step, slot=slot, values=values)

    async def commit(self, round_number: int, step: int) -> None:
        await self._ask("commit", round=round_number, step=step)

    async def inventory(self) -> list[Record]:
        return list((await self._ask("inventory"))["holdings"])

    async def pull(self, snapshot: Record, layout: Record, claim: Record, fetches: Sequence[Record]) -> Record:
        timeout_s = self._timeout_s + sum(fetch["num_bytes"] for fetch in fetches) / SLOWEST_BYTES_PER_S
        args = {"snapshot": snapshot, "layout": layout, "claim": claim, "fetches": list(fetches)}
        return await self._ask("pull", timeout_s, **args)

    async def progress(self) -> Record:
        """{"num_bytes", "total_bytes"} of the pulls under way."""
        return await self._ask("progress")

    async def index(self, snapshot: Record) -> str:
        return str((await self._ask("index", snapshot=snapshot))["path"])

    async def layout(self, digest: str, peers: Sequence[str]) -> Record:
        return dict((await self._ask("layout", digest=digest, peers=list(peers)))["layout"])

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _ask(self, op: str, timeout_s: float | None = None, **args: Any) -> Record:
        async with self._connecting:
            if self._channel is None or self._channel.closed:
                self._channel = await channel.connect(self._address)
        return await self._channel.request(op, timeout_s or self._timeout_s, **args)
