"""A linearizable key-value store with leases, as seen over a bad network, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

RUN = "runs/job/1"
LEASE_S = 5.0
RETRY_S = 0.3
TIMEOUT_S = 2.0
WATCH_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    value: str
    token: str
    ttl_s: float | None = None


class CompareFailed(Exception):
    pass


class Unreachable(Exception):
    """Also where a request came through and only its answer was lost."""


class Client(Protocol):
    """Who talks to the store. `at` runs something later, if the client still lives then."""

    cut: bool

    def at(self, delay_s: float, work: Callable[[], None]) -> None: ...


class Store:
    """`later` schedules what nobody's death stops. Leased keys go `ttl_s` after their last refresh;
    `expires_while_down` is etcd's v2 API, whose keys do so while no server runs, too."""

    def __init__(self, chance: random.Random, later: Callable[[float, Callable[[], None]], None]) -> None:
        self._random, self._later = chance, later
        self.entries: dict[str, Entry] = {}
        self.on_write: Callable[[str, Entry], None] = lambda key, entry: None
        self.down = False
        self.expires_while_down = chance.random() < 0.5
        self.lost_answers = 0.0
        self._lease_ends: dict[str, int] = {}  # by key, the number of its last refresh
        self._revision = 0
        self._watches: list[Watch] = []

    # --- operations, at the server --------------------------------------------------------------------------------

    def put(self, key: str, value: str, ttl_s: float | None = None) -> Entry:
        self._revision += 1
        self.entries[key] = Entry(value, str(self._revision), ttl_s)
        if ttl_s is not None:
            self._renew(key, ttl_s)
        self._changed(key)
        self.on_write(key, self.entries[key])
        return self.entries[key]

    def create(self, key: str, value: str, ttl_s: float | None = None) -> Entry:
        if key in self.entries:
            raise CompareFailed
        return self.put(key, value, ttl_s)

    def swap(self, key: str, value: str, token: str) -> Entry:
        if key not in self.entries or self.entries[key].token != token:
            raise CompareFailed
        return self.put(key, value)

    def delete(self, key: str, token: str | None = None) -> None:
        if key in self.entries and token in (None, self.entries[key].token):
            del self.entries[key]
            self._changed(key)

    def refresh(self, key: str, token: str) -> bool:
        """Whether the key is still the one of this token."""
        entry = self.entries.get(key)
        if entry is None or entry.token != token or entry.ttl_s is None:
            return False
        self._renew(key, entry.ttl_s)
        return True

    def content(self, prefix: str) -> dict[str, Entry]:
        return {key: entry for key, entry in self.entries.items() if key == prefix or key.startswith(prefix + "/")}

    def _renew(self, key: str, ttl_s: float) -> None:
        number = self._lease_ends[key] = self._lease_ends.get(key, 0) + 1
        self._later(ttl_s, lambda: self._expire(key, number, ttl_s))

    def _expire(self, key: str, number: int, ttl_s: float) -> None:
        if self._lease_ends.get(key) != number:
            return
        if self.down and not self.expires_while_down:
            self._renew(key, ttl_s)
        else:
            self.delete(key)

    def _changed(self, key: str) -> None:
        for watch in self._watches:
            if key == watch.prefix or key.startswith(watch.prefix + "/"):
                watch.stir()

    # --- over the network -----------------------------------------------------------------------------------------

    def call(self, client: Client, operation: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """`done` gets the result or the exception."""

        def arrive() -> None:
            if client.cut or self.down:
                client.at(TIMEOUT_S, lambda: done(Unreachable()))
                return
            try:
                result = operation()
            except CompareFailed as error:
                result = error
            if self._random.random() < self.lost_answers:
                client.at(TIMEOUT_S, lambda: done(Unreachable()))
            else:
                client.at(self._latency(), lambda: done(result))

        self._later(self._latency(), arrive)  # on its way it arrives, whatever becomes of the client

    def watch(self, client: Client, prefix: str, deliver: Callable[[Mapping[str, Entry]], None]) -> None:
        watch = Watch(self, self._random, client, prefix, deliver)
        self._watches.append(watch)
        watch.stir()

    def forget(self, client: Client) -> None:
        self._watches = [watch for watch in self._watches if watch.client is not client]

    def _latency(self) -> float:
        return self._random.random() * (0.02 if self._random.random() < 0.98 else 1.0)


@dataclass(eq=False)
class Watch:
    """Brings the whole content after changes: merged, late, some of it twice, but in order and in the end."""

    store: Store
    random: random.Random
    client: Client
    prefix: str
    deliver: Callable[[Mapping[str, Entry]], None]
    busy: bool = False
    again: bool = False

    def stir(self) -> None:
        self.again = self.busy
        if not self.busy:
            self.busy = True
            self.client.at(self._delay(), self._read)

    def _read(self) -> None:
        if self.client.cut or self.store.down:
            self.client.at(WATCH_RETRY_S, self._read)
            return
        content = self.store.content(self.prefix)
        self.again = False
        self.client.at(self._delay(), lambda: self._bring(content))

    def _bring(self, content: Mapping[str, Entry]) -> None:
        self.busy = False
        if self.again or self.random.random() < 0.05:
            self.stir()
        self.deliver(content)

    def _delay(self) -> float:
        return self.random.random() * (0.02 if self.random.random() < 0.95 else 1.5)
