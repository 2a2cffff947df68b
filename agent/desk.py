"""Where workers talk to their agent: each connection belongs to one rank of one round."""

from __future__ import annotations

import asyncio
from typing import Any

from tenplexrun import channel
from tenplexrun.agent.session import Session
from tenplexrun.channel import Channel
from tenplexrun.errors import ProcessError


class Desk:
    """Serves `agent.sock`. A worker of a round that is over is told so, and nothing else."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._callers: dict[Channel, tuple[Session, int]] = {}
        self._server: asyncio.AbstractServer | None = None

    async def start(self, address: str) -> None:
        self._server, _ = await channel.serve(address, self._answer)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for caller in list(self._callers):
            await caller.close()

    async def _answer(self, caller: Channel, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "hello":
            session = self.session
            if session is None or session.round.number != int(args["round"]):
                raise ProcessError(f"round {args['round']} is over on this node")
            self._callers = {known: place for known, place in self._callers.items() if not known.closed}
            self._callers[caller] = (session, int(args["local_rank"]))
            return {"index": await session.source()}
        session, local_rank = self._callers.get(caller, (None, 0))
        if session is None or session is not self.session:
            raise ProcessError("say hello first, and only to the round that runs")
        return await session.answer(op, {**args, "local_rank": local_rank})
