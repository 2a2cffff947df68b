"""Coordination in memory, with the semantics of the real adapters: for tests and simulations of many agents."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Mapping

from tenplexrun.errors import CompareFailedError
from tenplexrun.ports import KeyValue


class MemoryStore:
    """What the agents share, in one event loop. Leases don't expire by themselves: `expire` is the tests'."""

    def __init__(self) -> None:
        self._items: dict[str, KeyValue] = {}
        self._leases: dict[str, MemoryLease] = {}
        self._watchers: set[asyncio.Event] = set()
        self._tokens = itertools.count(1)

    def get(self, key: str) -> KeyValue | None:
        return self._items.get(key)

    def content(self, prefix: str) -> Mapping[str, KeyValue]:
        folder = prefix.rstrip("/") + "/"
        return {key: self._items[key] for key in sorted(self._items) if key == prefix or key.startswith(folder)}

    def write(self, key: str, value: str) -> KeyValue:
        self._items[key] = KeyValue(key, value, str(next(self._tokens)))
        self._changed()
        return self._items[key]

    def remove(self, key: str) -> None:
        if self._items.pop(key, None) is not None:
            lease = self._leases.pop(key, None)
            if lease is not None:
                lease.lost.set()
            self._changed()

    def expire(self, key: str) -> None:
        """What the store does to the key of a holder that has gone silent."""
        self.remove(key)

    def lease(self, key: str, value: str) -> MemoryLease:
        item = self.write(key, value)
        self._leases[key] = MemoryLease(self, item)
        return self._leases[key]

    def subscribe(self) -> asyncio.Event:
        changed = asyncio.Event()
        self._watchers.add(changed)
        return changed

    def unsubscribe(self, changed: asyncio.Event) -> None:
        self._watchers.discard(changed)

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.set()


class MemoryLease:
    """Implements `tenplexrun.ports.Lease`."""

    def __init__(self, store: MemoryStore, held: KeyValue) -> None:
        self.lost = asyncio.Event()
        self._store, self._held = store, held

    @property
    def key(self) -> str:
        return self._held.key

    async def release(self) -> None:
        if self._store.get(self.key) == self._held:
            self._store.remove(self.key)


class MemoryCoordination:
    """Implements `tenplexrun.ports.Coordination` over a shared `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @property
    def connected_s(self) -> float:
        return math.inf

    async def get(self, key: str) -> KeyValue | None:
        return self._store.get(key)

    async def put(self, key: str, value: str) -> KeyValue:
        return self._store.write(key, value)

    async def create(self, key: str, value: str) -> KeyValue:
        self._must_not_exist(key)
        return self._store.write(key, value)

    async def swap(self, key: str, value: str, token: str) -> KeyValue:
        current = self._store.get(key)
        if current is None or current.token != token:
            raise CompareFailedError(f"somebody else has changed the key {key} first")
        return self._store.write(key, value)

    async def delete(self, key: str, token: str | None = None) -> None:
        current = self._store.get(key)
        if current is not None and token is not None and current.token != token:
            raise CompareFailedError(f"somebody else has changed the key {key} first")
        self._store.remove(key)

    async def delete_folder(self, prefix: str) -> None:
        for key in self._store.content(prefix):
            self._store.remove(key)

    async def list(self, prefix: str) -> Mapping[str, KeyValue]:
        return self._store.content(prefix)

    async def hold(self, key: str, value: str, ttl_s: float) -> MemoryLease:
        self._must_not_exist(key)
        return self._store.lease(key, value)

    async def watch(self, prefix: str) -> AsyncIterator[Mapping[str, KeyValue]]:
        changed, seen = self._store.subscribe(), None
        try:
            while True:
                content = self._store.content(prefix)
                if content != seen:
                    seen = content
                    yield content
                else:
                    await changed.wait()
                    changed.clear()
        finally:
            self._store.unsubscribe(changed)

    async def close(self) -> None:
        pass

    def _must_not_exist(self, key: str) -> None:
        if self._store.get(key) is not None:
            raise CompareFailedError(f"the key {key} exists already")
