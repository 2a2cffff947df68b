"""The asking end of the view's control socket: `tenplexrun.ports.ViewClient`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenplexrun.channel import Caller, Channel, Record


class ViewClient:
    """Talks to the node's view process at `path`. Connects when first used, and again after it was restarted.

    `on_failure` is told of each request of a reader that the view could not serve, and when a dataset's files cannot be
    had, `on_recovery` when they can again, `on_extents` of what this node keeps of a dataset, while it comes and then.
    """

    def __init__(
        self,
        path: str,
        on_failure: Callable[[str], None] = lambda message: None,
        on_extents: Callable[[Record], None] = lambda record: None,
        on_recovery: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._on_failure, self._on_extents, self._on_recovery = on_failure, on_extents, on_recovery
        self._caller = Caller(f"unix:{path}", "the dataset view", handler=self._told)

    async def _told(self, _: Channel, op: str, args: Record) -> None:
        if op == "failed":
            self._on_failure(str(args["message"]))
        elif op == "recovered":
            self._on_recovery(str(args["message"]))
        elif op == "extents":
            self._on_extents(args)

    async def hello(self, timeout_s: float = 20.0) -> Record:
        """Wait until the view is ready. Returns {"mode": "fuse" or "farm", "reason": why}. Raises ProcessError."""
        return await self._caller.hello(timeout_s)

    async def show(
        self,
        round_number: int,
        order: Record,
        dp_rank: int,
        dp_size: int,
        consumed: int,
        placement: Record | None = None,
    ) -> str:
        """Show one dp rank's share of the global order from `consumed` on. Returns the directory.

        `order` is a DataOrder's record with the dataset's name under "dataset"; `num_samples` and `fingerprint` may be
        left out. `placement`: record of `core.extents.Placement`, by which this node's part of the dataset is copied
        into shared memory; None: all of it. Raises DataError, ArenaFullError.
        """
        args: dict[str, Any] = {"dp_rank": dp_rank, "dp_size": dp_size, "consumed": consumed, "placement": placement}
        reply = await self._caller.request("show", round=round_number, order=order, **args)
        return str(reply["dir"])

    async def drop(self, round_number: int) -> None:
        """Readers of this round have left."""
        await self._caller.request("drop", round=round_number)

    async def describe(self, spec: str) -> Record:
        """{"num_samples", "sample_bytes", "fingerprint"} of a dataset."""
        return await self._caller.request("describe", spec=spec)

    async def held(self) -> Record:
        """By dataset the extents that are here, as `core.extents.Spans`."""
        return dict((await self._caller.request("held"))["held"])

    async def close(self) -> None:
        await self._caller.close()
