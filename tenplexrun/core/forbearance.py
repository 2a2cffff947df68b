"""What a decider lets pass after a break: keys may be gone through the coordination store's own fault. Pure.

Those of etcd's v2 run out while etcd is down; an etcd may come back empty. Nodes get one lease to write theirs anew.
"""

from __future__ import annotations

from tenplexrun.core.decisions import Decision, View


class Forbearance:
    """Of one node, over all its reigns; look here before `membership.decide`. Times are of its monotonic clock.

    `has_round`: it has seen one, so that a store without it has come back empty. `proved_gone`: nodes whose ports
    refuse connections; no outage is the reason for their missing keys.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s, self._doubted = lease_s, float("-inf")
        self.has_round = False
        self.proved_gone: set[str] = set()

    def doubt(self, now: float) -> None:
        """The store has just lost a key of a node that lives: what else is missing may live, too."""
        self._doubted = now

    def decide(self, view: View, node: str, connected_s: float, now: float) -> Decision | None:
        """Wait, or None. `node` decides; the store has answered it for `connected_s` without a break."""
        if view.round is None and not self.has_round:
            return None
        if view.round is None or node not in view.members:
            self.doubt(now)
            return Decision("etcd has lost this node's own records, which are written again first")
        missing = {*view.round.nodes, *view.acks} - {*view.members, *view.round.evicted, *self.proved_gone}
        wait_s = self._lease_s - min(connected_s, now - self._doubted)
        if not missing or wait_s <= 0:
            return None
        return Decision(f"etcd is back: {', '.join(sorted(missing))} may write their keys again", wake_at=now + wait_s)
