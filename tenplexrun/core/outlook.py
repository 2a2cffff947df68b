"""What a decider knows, from what it has watched and written: it remembers when it first saw things. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol, TypeVar

from tenplexrun.core import rounds
from tenplexrun.core.durable import Found
from tenplexrun.core.layout import Layout
from tenplexrun.core.membership import View
from tenplexrun.core.rounds import Round

T = TypeVar("T")


class Written(Protocol):
    """A key's content in the coordination store, and the token of its last write."""

    @property
    def value(self) -> str: ...
    @property
    def token(self) -> str: ...


class Outlook:
    """`observe` what the watch of the epoch's `folder` brings; `view` is all that `membership.decide` asks for.

    Times are of the decider's monotonic clock. `layouts`: those read so far, by digest. `found`: see `View`.
    """

    def __init__(self, folder: str, layouts: Mapping[str, Layout] | None = None) -> None:
        self._folder = folder
        self._content: Mapping[str, Written] = {}
        self._wrote: tuple[str | None, Written] | None = None  # token that was replaced, and what by
        self._seen: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._unlinked: dict[str, float] = {}
        self._since: tuple[object, float] | None = None
        self._parsed: dict[str, tuple[str, Any]] = {}  # by key, of which token: a big job has a thousand acks
        self.layouts = dict(layouts or {})
        self.found: Found | None = None

    def observe(self, content: Mapping[str, Written]) -> None:
        """The whole content of the folder, by key."""
        self._content = content

    def wrote(self, replaced: str | None, written: Written) -> None:
        """This decider has replaced the round of token `replaced` (None: there was none)."""
        self._wrote = (replaced, written)

    @property
    def current(self) -> Written | None:
        """The round document: as watched, or as written by us if the watch is behind."""
        watched = self._content.get(f"{self._folder}/round")
        if self._wrote is not None and self._wrote[0] == (watched.token if watched else None):
            return self._wrote[1]
        return watched

    @property
    def round(self) -> Round | None:
        current = self.current
        return None if current is None else self._parse(f"{self._folder}/round", current, rounds.round_from_json)

    @property
    def condemned(self) -> list[str]:
        """Keys of members that the round document has evicted."""
        evicted = self.round.evicted if self.round else ()
        return [key for node in evicted if (key := f"{self._folder}/members/{node}") in self._content]

    def view(self, decider: str, now: float, wall: float, linked: Container[str], writing: bool = False) -> View:
        """`decider`: the address of its link. `wall`: Unix time, for the records only. `linked`: the nodes that have a
        link to it. `writing`: a durable checkpoint is under way."""
        round_ = self.round
        members = {member.node: member for member in self._all("members", rounds.member_from_json)}
        self._seen = {node: self._seen.get(node, now) for node in members}
        state = None if round_ is None else (round_.number, round_.phase, round_.stop)
        if self._since is None or self._since[0] != state:
            self._since = (state, now)
        self._unlinked = {node: self._unlinked.get(node, now) for node in members if round_ and node not in linked}
        requests = tuple(self._all("requests", rounds.request_from_json))
        self._asked = {request.id: self._asked.get(request.id, now) for request in requests}
        acks = [] if round_ is None else self._all(f"acks/{round_.number}", rounds.ack_from_json)
        return View(
            decider=decider,
            members=members,
            seen=self._seen,
            round=round_,
            acks={ack.node: ack for ack in acks},
            requests=requests,
            asked=self._asked,
            unlinked=self._unlinked,
            layouts=self.layouts,
            since=self._since[1],
            wall=wall,
            found=self.found,
            writing=writing,
        )

    def _all(self, kind: str, parse: Callable[[dict[str, Any]], T]) -> list[T]:
        prefix = f"{self._folder}/{kind}/"
        return [self._parse(key, self._content[key], parse) for key in sorted(self._content) if key.startswith(prefix)]

    def _parse(self, key: str, written: Written, parse: Callable[[dict[str, Any]], T]) -> T:
        token, parsed = self._parsed.get(key, (None, None))
        if token != written.token:
            parsed = parse(json.loads(written.value))
            self._parsed[key] = (written.token, parsed)
        return parsed  # type: ignore[return-value]
