"""What a node says of its running round, for people and their tools."""

from __future__ import annotations

import asyncio
import contextlib
import json

from tenplexrun.agent.dataset_memory import Kept
from tenplexrun.agent.session import Session
from tenplexrun.core import metrics
from tenplexrun.errors import TenplexError
from tenplexrun.ports import Coordination, StoreClient

STORE_TIMEOUT_S = 1.0


class Bulletin:
    """`publish` is called every now and then."""

    def __init__(self, coordination: Coordination, store: StoreClient, kept: Kept, max_restarts: int) -> None:
        self._coordination, self._store, self._kept, self._max_restarts = coordination, store, kept, max_restarts
        self._published: dict[str, str] = {}  # document by key

    async def publish(self, session: Session, folder: str, node: str) -> None:
        """Raises CoordinationError."""
        round_, progress = session.round, session.progress()
        text = metrics.of_round(round_, progress) + metrics.of_datasets(self._kept.records.values())
        with contextlib.suppress(TenplexError, asyncio.TimeoutError):  # the store hangs, or is being started again
            await asyncio.wait_for(self._store.metrics(text), STORE_TIMEOUT_S)
        if self._kept.records:
            await self._put(f"{folder}/datasets/{node}", json.dumps(list(self._kept.records.values())))
        if round_.nodes[0] == node:  # what only rank 0's node knows
            left = max(0, self._max_restarts - round_.failures)
            await self._put(f"{folder}/progress", json.dumps({**progress, "restarts_left": left}))

    async def _put(self, key: str, document: str) -> None:
        """For `tenplexctl status`."""
        if document != self._published.get(key):
            await self._coordination.put(key, document)
            self._published[key] = document
