"""How long a node does without its coordination store."""

from __future__ import annotations

from collections.abc import Callable

from tenplexrun.core.rounds import Verdict
from tenplexrun.errors import CoordinationError

PERSIST_S = 60.0


class Patience:
    """Healthy workers train on through an outage of any length. Once the store is needed, it gets PERSIST_S.

    `hosted`: a node of the job hosts it, which is lost, then, for good: PERSIST_S is all it gets. Times are monotonic.
    """

    def __init__(self, now: float, lease_s: float, hosted: bool, say: Callable[[str], None]) -> None:
        self._lease_s, self._hosted, self._say = lease_s, hosted, say
        self._answered = self._free_until = now
        self._told = False

    def answered(self, now: float) -> None:
        if self._told:
            self._say(f"etcd is back after {now - self._answered:.0f} s")
        self._answered, self._told = now, False

    def away(self, now: float, training: bool) -> Verdict | None:
        """The store has not answered. `training`: the workers here need nothing of it. Returns why to give up."""
        if training and not self._hosted:
            self._free_until = now
        if now - max(self._answered, self._free_until) > PERSIST_S:
            reason = f"etcd has been away for {now - self._answered:.0f} s; was the node that hosts it lost?"
            return Verdict(CoordinationError.exit_code, reason if self._hosted else reason.partition(";")[0])
        if now - self._answered > self._lease_s and not self._told:
            self._told = True
            end = f"; this node ends if that takes {PERSIST_S:.0f} s" if self._hosted else ""
            what = "training goes on, but no node can come, go or start again" if training else "waiting for it"
            self._say(f"etcd has not answered for {now - self._answered:.0f} s: {what}{end}")
        return None
