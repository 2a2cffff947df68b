"""What a node says of its running round, for people and their tools."""

from __future__ import annotations

import asyncio
import contextlib
import json

from tenplexrun.agent.session import Session
from tenplexrun.core import metrics
from tenplexrun.errors import TenplexError
from tenplexrun.ports import Coordination, StoreClient

STORE_TIMEOUT_S = 1.0


class Bulletin:
    """`publish` is called every now and then."""

    def __init__(self, coordination: Coordination, store: StoreClient, max_restarts: int) -> None:
        self._coordination, self._store, self._max_restarts = coordination, store, max_restarts
        self._published = ""

    async def publish(self, session: Session, folder: str, node: str) -> None:
        """Raises CoordinationError."""
        round_, progress = session.round, session.progress()
        with contextlib.suppress(TenplexError, asyncio.TimeoutError):  # the store hangs, or is being started again
            await asyncio.wait_for(self._store.metrics(metrics.of_round(round_, progress)), STORE_TIMEOUT_S)
        if round_.nodes[0] != node:
            return
        # what only rank 0's node knows, for `tenplexctl status`
        document = json.dumps({**progress, "restarts_left": max(0, self._max_restarts - round_.failures)})
        if document != self._published:
            await self._coordination.put(f"{folder}/progress", document)
            self._published = document
