"""A simulated agent's decider: the real outlook and membership machines, over the simulated store."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tenplexrun.core import membership, rounds
from tenplexrun.core.forbearance import Forbearance
from tenplexrun.core.membership import Decision
from tenplexrun.core.outlook import Outlook

from .store import LEASE_S, RETRY_S, RUN, CompareFailed, Entry, Unreachable

if TYPE_CHECKING:
    from .node import Agent

LOOK_S = 1.0


class SimDecider:
    """What agent/decider.py does: one reign after the other, one decision after the other."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._world = agent, agent.world
        self._reign = 0
        self._outlook: Outlook | None = None
        self._acting = self._news = self._resting = False
        self._reason = self._token = ""
        self.reigns = False
        self.forbearance = Forbearance(LEASE_S)

    def campaign(self) -> None:
        self._world.store.watch(self._agent, f"{RUN}/decider", self._on_key)

    def _on_key(self, content: Mapping[str, Entry]) -> None:
        if content or self.reigns or self._resting:
            return
        key, document = f"{RUN}/decider", json.dumps({"node": self._agent.name, "link": self._agent.member.link})

        def done(found: Any) -> None:
            if isinstance(found, Entry) and not self.reigns:
                self._begin(key, found.token)
            elif isinstance(found, Unreachable):
                self._agent.at(RETRY_S, self._look)

        self._agent.call(lambda: self._world.store.create(key, document, LEASE_S), done)

    def _look(self) -> None:
        self._agent.call(
            lambda: self._world.store.content(f"{RUN}/decider"),
            lambda found: (
                self._agent.at(RETRY_S, self._look) if isinstance(found, Unreachable) else self._on_key(found)
            ),
        )

    def _begin(self, key: str, token: str) -> None:
        self._agent.tell("decides")
        self._reign += 1
        self._token = token
        reign, self.reigns, self._acting = self._reign, True, False
        self._outlook = outlook = Outlook(RUN)
        outlook.layouts.update(self._world.layouts)
        seen: list[bool] = []
        self._agent.refresh(key, token, lambda: self._lost(reign), lambda: self._reign == reign and self.reigns)

        def deliver(content: Mapping[str, Entry]) -> None:
            if self._reign == reign and self.reigns:
                outlook.observe(content)
                if not seen:
                    seen.append(True)
                    self._look_again(reign)
                else:
                    self._think()

        self._world.store.watch(self._agent, RUN, deliver)

    def _look_again(self, reign: int) -> None:
        """Links come and go without news from the store."""
        if self._reign == reign and self.reigns:
            self._think()
            self._agent.at(LOOK_S, lambda: self._look_again(reign))

    def _lost(self, reign: int) -> None:
        if self._reign == reign and self.reigns:
            self._agent.tell("no longer decides")
            self.reigns = False
            self._look()

    def _think(self) -> None:
        """One decision at a time; what happens meanwhile is looked at afterwards."""
        if self._acting:
            self._news = True
            return
        assert self._outlook is not None
        now = self._world.now + self._agent.host.skew_s
        view = self._outlook.view(self._agent.member.link, now, now, self._world.linked(self._agent))
        decision = self.forbearance.decide(view, self._agent.name, self._agent.connected_s, now)
        decision = decision or membership.decide(view, self._world.settings, now)
        self._world.check(decision, view, now)
        if decision.resign:
            self._resign()
            return
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._agent.tell(f"decides: {decision.reason}")
        if decision.wake_at is not None and decision.round is None:
            reign, delay = self._reign, max(0.01, decision.wake_at - now)
            self._agent.at(delay, lambda: self._think() if self.reigns and self._reign == reign else None)
        self._act(decision)

    def _resign(self) -> None:
        self._agent.tell("resigns")
        self.reigns = False
        self._agent.call(lambda: self._world.store.delete(f"{RUN}/decider", self._token))
        self._resting = True
        self._agent.at(2 * LEASE_S, self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._look()

    def _act(self, decision: Decision) -> None:
        outlook, store = self._outlook, self._world.store
        assert outlook is not None
        work: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        if decision.round is not None:
            current, text = outlook.current, json.dumps(rounds.to_json(decision.round))
            token = current.token if current else None
            write = (
                (lambda: store.swap(f"{RUN}/round", text, token))
                if token
                else (lambda: store.create(f"{RUN}/round", text))
            )
            work.append((write, lambda entry: self._wrote(token, entry, decision)))
        keys = [f"{RUN}/requests/{name}" for name in decision.answers or {}] + outlook.condemned
        work += [(functools.partial(store.delete, key), lambda _: None) for key in keys]
        self._acting, self._news = bool(work), False
        if work:
            self._next(self._reign, work)

    def _next(self, reign: int, work: list[tuple[Callable[[], Any], Callable[[Any], None]]]) -> None:
        operation, then = work.pop(0)

        def done(found: Any) -> None:
            if self._reign != reign or not self.reigns:
                return
            if isinstance(found, CompareFailed | Unreachable):
                work.clear()
                self._news = True
            else:
                then(found)
            if work:
                self._next(reign, work)
            else:
                self._agent.at(RETRY_S if isinstance(found, Unreachable) else 0.0, self._done)

        self._agent.call(operation, done)

    def _done(self) -> None:
        self._acting = False
        if self._news and self.reigns:
            self._think()

    def _wrote(self, token: str | None, entry: Entry, decision: Decision) -> None:
        assert self._outlook is not None
        self._outlook.wrote(token, entry)
        self._news = True
