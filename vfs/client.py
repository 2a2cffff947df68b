"""The asking end of the view's control socket: `tenplexrun.ports.ViewClient`."""

from __future__ import annotations

import asyncio
from typing import Any

from tenplexrun import channel
from tenplexrun.errors import WireError

Record = dict[str, Any]
_RETRY_S = 0.02


class Client:
    """Talks to one view process. After its death every call raises WireError: start another, connect again."""

    def __init__(self, opened: channel.Channel) -> None:
        self._channel = opened

    @classmethod
    async def connect(cls, socket: str, timeout_s: float = 20.0) -> Client:
        """Connect to the view at the path `socket`, waiting until it listens. Raises WireError when it does not."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return cls(await channel.connect(f"unix:{socket}"))
            except WireError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def hello(self) -> Record:
        """{"mode": "fuse" or "farm", "reason": why}."""
        return await self._channel.request("hello")

    async def show(self, round_number: int, order: Record, dp_rank: int, dp_size: int, consumed: int) -> str:
        """Show one dp rank's share of the global order from `consumed` on. Returns the directory.

        `order` is a DataOrder's record with the dataset's name under "dataset"; `num_samples` and `fingerprint` may be
        left out. The first call for a dataset copies it into shared memory. Raises DataError, ArenaFullError.
        """
        reply = await self._channel.request(
            "show", round=round_number, order=order, dp_rank=dp_rank, dp_size=dp_size, consumed=consumed
        )
        return str(reply["dir"])

    async def drop(self, round_number: int) -> None:
        """Readers of this round have left."""
        await self._channel.request("drop", round=round_number)

    async def describe(self, spec: str) -> Record:
        """{"num_samples", "sample_bytes", "fingerprint"} of a dataset, copied into shared memory on the way."""
        return await self._channel.request("describe", spec=spec)

    async def close(self) -> None:
        await self._channel.close()
