"""The agent's end of the checkpoint process. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tenplexrun.channel import Caller, Record
from tenplexrun.core.durable import Checkpoint, folder_name
from tenplexrun.errors import ProcessError, WireError

LOOK_S = 120.0  # then it is looked again: whoever decides must not wait for ever
LONGEST_S = 24 * 3600.0  # a big state on a slow disk; the process itself says when a write fails


class CheckpointClient:
    """Implements `tenplexrun.ports.CheckpointClient` over the socket at `path`. `home`: where checkpoints are written,
    of which `keep` stay; `origin`: one to start from while there is none."""

    def __init__(self, path: str, home: str | None, origin: str | None, keep: int) -> None:
        self._home, self._origin, self._keep = home, origin, keep
        self._jobs: list[str] = []
        self._claimed = False
        self._caller = Caller(f"unix:{path}", "the checkpoint process", LONGEST_S)

    def joined(self, job: str) -> None:
        self._jobs.append(job)

    async def ready(self) -> None:
        """Wait until the process has its imports done. Raises ProcessError."""
        await self._caller.hello(120.0)

    async def newest(self, refused: Collection[str]) -> tuple[Checkpoint | None, list[str]]:
        await self.ready()
        # once: a job whose folder another one has taken does not take it back
        claim = None if self._claimed or not self._jobs else self._jobs[-1]
        where = {"home": self._home, "origin": self._origin, "claim": claim}
        reply = await self._ask("newest", LOOK_S, refused=list(refused), **where)
        self._claimed = True
        found = reply["checkpoint"]
        return found and Checkpoint(**found), list(reply["notes"])

    async def load(
        self,
        checkpoint: Checkpoint,
        layout: Record,
        config: Record,
        ranks: Sequence[int],
        groups: Mapping[str, int],
        slot: str,
    ) -> Record:
        args = {"layout": layout, "config": config, "ranks": list(ranks), "groups": dict(groups), "slot": slot}
        return await self._ask("load", url=checkpoint.url, step=checkpoint.step, **args)

    async def take(
        self, tag: str, index: str, layout: Record, config: Record, ranks: Sequence[Sequence[int]], me: int
    ) -> int:
        args = {"tag": tag, "layout": layout, "config": config, "ranks": [list(own) for own in ranks], "me": me}
        return int((await self._ask("take", index=index, **args))["num_bytes"])

    async def write(self, step: int, number: int, tag: str, groups: Mapping[str, int]) -> Record:
        return await self._ask("write", url=self._url(step), number=number, tag=tag, groups=dict(groups))

    async def cancel(self) -> None:
        await self._ask("cancel")

    async def prepare(self, step: int, tag: str, layout: Record, parts: Sequence[Record]) -> None:
        await self._ask("prepare", url=self._url(step), tag=tag, layout=layout, parts=list(parts))

    async def publish(self, step: int, tag: str, files: Sequence[str], last: bool) -> Record:
        args = {"home": self._home, "url": self._url(step), "keep": self._keep, "jobs": self._jobs}
        return await self._ask("publish", step=step, tag=tag, files=list(files), last=last, **args)

    async def close(self) -> None:
        await self._caller.close()

    def _url(self, step: int) -> str:
        return f"{self._home}/{folder_name(step)}"

    async def _ask(self, op: str, timeout_s: float | None = None, /, **args: Any) -> Record:
        try:
            return await self._caller.request(op, timeout_s, **args)
        except WireError as error:
            raise ProcessError(f"the checkpoint process of this node has died or hangs: {error}") from error
