"""What the decider sees and says, and the changes of a round that more than one of its rules makes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tenplexrun.core.durable import Found
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.placement import Assign
from tenplexrun.core.rounds import Ack, Cause, Failure, Member, Participant, Request, Round, Stop, Verdict, Way
from tenplexrun.errors import QuorumLostError

CHURN = ("node_lost", "node_left", "node_joined")
EARLY_S = 2.0
"""As much of the window for joins may be over when a node comes."""
FLAPS, FLAPPING_S = 3, 60.0
"""A host that has left so often, within so many seconds each time, is kept waiting as long, and longer each time."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the launch fixed. Times in seconds; while there is room, joins are gathered for `join_window_s`.

    A member without a link to the decider for `unreachable_s` counts as lost. `max_churn`: how many times the nodes of
    a job may change. `replicas`: on how many nodes each part of a snapshot shall be. `way`: of moves. `assign` solves
    the placement of nodes; without it they keep their order. `durable`: there may be durable checkpoints.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int
    sizes: ParallelConfig
    join_window_s: float = 3.0
    rendezvous_timeout_s: float = 600.0
    gather_timeout_s: float = 60.0
    park_timeout_s: float = 60.0
    unreachable_s: float = 10.0
    max_churn: int | None = None
    replicas: int = 1
    way: Way = "least"
    assign: Assign | None = None
    durable: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """All that the decider knows. `seen`: when it first saw each member; `since`: when it saw the round as it is.

    `asked`: when it first saw each request; one that is not in it has waited long enough. `unlinked`: members that have
    no link to it, and since when. `found`: the durable checkpoint that was looked for. `writing`: one is being written.
    Times are of the decider's monotonic clock.
    """

    decider: str
    members: Mapping[str, Member]
    seen: Mapping[str, float]
    round: Round | None
    acks: Mapping[str, Ack]
    requests: tuple[Request, ...]
    layouts: Mapping[str, Layout]
    since: float
    wall: float
    asked: Mapping[str, float] = field(default_factory=dict)
    unlinked: Mapping[str, float] = field(default_factory=dict)
    found: Found | None = None
    writing: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why. `round`: the document to write; `answers`: of requests.

    `need_layouts`: digests to fetch before the next decision. `look_for`: the same for a durable checkpoint, with what
    is known of it. `wake_at`: when to decide again without news.
    `tell`: people should hear of it. `resign`: let another agent decide.
    """

    reason: str
    round: Round | None = None
    answers: Mapping[str, str] | None = None
    need_layouts: tuple[str, ...] = ()
    wake_at: float | None = None
    tell: bool = False
    resign: bool = False
    look_for: Found | None = None


def regather(view: View, round_: Round, settings: Settings, cause: Cause, stop: Stop) -> Decision:
    """Stop the workers of `round_` and form the next one."""
    churn = round_.churn + (cause.kind in CHURN)
    if settings.max_churn is not None and churn > settings.max_churn:
        message = f"{cause.detail}; the nodes of this job have changed {settings.max_churn} times (max_churn)"
        return end(round_, Verdict(QuorumLostError.exit_code, message), view.wall)
    following = replace(
        round_,
        number=round_.number + 1,
        phase="gathering",
        cause=cause,
        stop=stop,
        snapshot=None,
        sources=None,
        checkpoint=None,
        master=None,
        fallback=round_.fallback if cause.kind == "resize" else None,
        churn=churn,
        departures=_departures(view, round_),
    )
    return Decision(cause.detail, following, tell=True)


def _departures(view: View, round_: Round) -> Mapping[str, tuple[int, float]]:
    """By host: how often a participant there has left the job of late, and the last time (Unix time)."""
    known = {host: one for host, one in round_.departures.items() if view.wall - one[1] < FLAPPING_S}
    for p in round_.participants:
        if p.node not in view.members or p.node in draining(view):
            known[p.host] = (known.get(p.host, (0, 0.0))[0] + 1, view.wall)
    return known


def held_back(view: View, node: str) -> float:
    """Until when a node that waits is not taken in, for its host comes and goes: the longer the more often it did."""
    assert view.round is not None
    count, _ = view.round.departures.get(view.members[node].host, (0, 0.0))
    return view.seen[node] + (0.0 if count < FLAPS else FLAPPING_S * 2.0 ** (count - FLAPS))


def end(round_: Round, verdict: Verdict, wall: float, stop: Stop | None = None) -> Decision:
    cause = Cause("end", verdict.message, wall)
    ended = replace(round_, phase="ended", cause=cause, verdict=verdict, sources=None, stop=stop or Stop())
    return Decision(verdict.message, ended)


def end_by_drain(view: View, round_: Round, request: Request) -> Decision:
    message = f"node {request.node} leaves and too few would stay ({request.detail})"
    return end(round_, Verdict(request.code, message), view.wall, Stop("now", signum=request.signum))


def first_failure(view: View, round_: Round) -> Failure | None:
    """Whose process ended first. Clocks of nodes are never compared: of what is reported together, the oldest."""
    failures = [ack.failure for node, ack in view.acks.items() if ack.state == "failed" and ack.failure is not None]
    return min(failures, key=lambda failure: (-failure.age_s, failure.rank), default=None)


def spent(failure: Failure, settings: Settings) -> Verdict:
    spent = f"no restarts left (--max-restarts {settings.max_restarts})"
    return Verdict(failure.exit_code, f"{failure.describe()}; {spent}", failure)


def loss(lost: list[Participant], view: View) -> Cause:
    silent = [p for p in lost if p.node in view.unlinked]
    gone = [p for p in lost if p.node not in view.unlinked]
    parts = [
        f"node {', '.join(f'{p.node} [{p.host}]' for p in some)} {what}"
        for some, what in ((gone, "is gone"), (silent, "cannot be reached by the node that decides"))
        if some
    ]
    return Cause("node_lost", "; ".join(parts), view.wall)


def done(view: View, node: str) -> bool:
    ack = view.acks.get(node)
    return ack is not None and ack.state == "done"


def more_until(view: View, nodes: Iterable[str], settings: Settings) -> float:
    """Until when others that were launched together with `nodes` may still come. They have been getting ready as long,
    so that some of the window is over already; who took long has siblings that take a little longer."""

    def until(node: str) -> float:
        ready_s, window_s = view.members[node].ready_s, settings.join_window_s
        return view.seen[node] + max(window_s - min(ready_s, EARLY_S), min(window_s, ready_s / 4))

    return max(map(until, nodes))


def draining(view: View) -> set[str | None]:
    return {request.node for request in view.requests if request.kind == "drain"}


def nodes_text(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def left_text(seconds: float) -> str:
    """Coarse, for the decider looks each second and people are told what is new."""
    step = 30 if seconds > 60 else 10
    return f"at most {step * max(1, math.ceil(seconds / step))} s left"
