"""The agent's end of the store's control socket."""

from __future__ import annotations

from collections.abc import Sequence

from tenplexrun.channel import Caller, Record

SLOWEST_BYTES_PER_S = 5 << 20
"""A pull slower than this for its whole size is given up."""


class StoreClient:
    """Implements `tenplexrun.ports.StoreClient` over the socket at `path`.

    Connects when first used, and again after the store was restarted. Every method raises what the store raised,
    WireError where the store is gone or silent too long.
    """

    def __init__(self, path: str, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._caller = Caller(f"unix:{path}", "the tensor store", timeout_s)

    async def hello(self, timeout_s: float = 20.0) -> int:
        """Wait until the store is ready. Returns the port that it serves peers on. Raises ProcessError."""
        return int((await self._caller.hello(timeout_s))["port"])

    async def open_round(
        self, round_number: int, layout: Record, config: Record, ranks: Sequence[int], buddy: Record | None = None
    ) -> Record:
        return await self._caller.request(
            "open_round", round=round_number, layout=layout, config=config, ranks=list(ranks), buddy=buddy
        )

    async def seal(
        self, round_number: int, step: int, slot: int, values: Record | None, without: Sequence[str] = ()
    ) -> Record:
        args = {"round": round_number, "step": step, "slot": slot, "values": values, "without": list(without)}
        return await self._caller.request("seal", None, **args)

    async def replicate(self, round_number: int, step: int, slot: int, stores: Sequence[str], num_bytes: int) -> Record:
        timeout_s = self._timeout_s + num_bytes / SLOWEST_BYTES_PER_S
        where = {"round": round_number, "step": step, "slot": slot}
        return await self._caller.request("replicate", timeout_s, **where, stores=list(stores))

    async def digests(self, round_number: int, step: int) -> Record:
        return dict((await self._caller.request("digests", round=round_number, step=step))["digests"])

    async def checksums(self, round_number: int, step: int, key: str) -> list[Sequence[object]]:
        return list((await self._caller.request("checksums", round=round_number, step=step, key=key))["checksums"])

    async def commit(self, round_number: int, step: int) -> None:
        await self._caller.request("commit", round=round_number, step=step)

    async def inventory(self) -> list[Record]:
        return list((await self._caller.request("inventory"))["holdings"])

    async def pull(
        self,
        round_number: int,
        snapshot: Record,
        layout: Record,
        claim: Record,
        fetches: Sequence[Record],
        buddy: Record | None = None,
        after: Record | None = None,
    ) -> Record:
        timeout_s = self._timeout_s + sum(fetch["num_bytes"] for fetch in fetches) / SLOWEST_BYTES_PER_S
        args = {"snapshot": snapshot, "layout": layout, "claim": claim, "fetches": list(fetches), "buddy": buddy}
        return await self._caller.request("pull", timeout_s, round=round_number, after=after, **args)

    async def progress(self) -> Record:
        """{"num_bytes", "total_bytes"} of the pulls under way."""
        return await self._caller.request("progress")

    async def abandon(self) -> None:
        await self._caller.request("abandon")

    async def index(self, snapshot: Record) -> str:
        return str((await self._caller.request("index", snapshot=snapshot))["path"])

    async def layout(self, digest: str, peers: Sequence[str]) -> Record:
        return dict((await self._caller.request("layout", digest=digest, peers=list(peers)))["layout"])

    async def metrics(self, text: str) -> None:
        await self._caller.request("metrics", text=text)

    async def close(self) -> None:
        await self._caller.close()
