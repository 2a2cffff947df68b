"""The decider's machine: from members, acks and requests to the next round document. Pure and level-triggered.

    (no round) ──enough members──► gathering 0 ──all gathered──► running 0 ──all done──► ended
                                       ▲                            │
                                       └── n + 1: failure, loss, ◄──┘
                                           join, resize, drain

A round is decided from what is written alone, so that another decider can go on from it at any point.
`decide` is called again whenever something changed, and at `wake_at`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tenplexrun.core import forming, inputs
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.placement import Assign
from tenplexrun.core.rounds import Ack, Cause, Failure, Member, Participant, Request, Round, Stop, Verdict
from tenplexrun.errors import QuorumLostError, RendezvousTimeoutError

BLAME_S = 2.0
"""How long a job without restarts left waits for the news that a node is gone: links tell in milliseconds."""
DRAIN_WINDOW_S = 0.5
"""A scheduler takes nodes back one by one: those that are told to leave within this time leave in one change."""
LONG_AGO = float("-inf")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the launch fixed. Times in seconds; while there is room, joins are gathered for `join_window_s`.

    `assign` solves the placement of nodes; without it they keep their order.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int
    sizes: ParallelConfig
    join_window_s: float = 3.0
    rendezvous_timeout_s: float = 600.0
    gather_timeout_s: float = 60.0
    park_timeout_s: float = 60.0
    assign: Assign | None = None


@dataclass(frozen=True, slots=True)
class View:
    """All that the decider knows. `seen`: when it first saw each member; `since`: when it saw the round as it is.

    `asked`: when it first saw each request; one that is not in it has waited long enough. Times are of the decider's
    monotonic clock.
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


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why. `round`: the document to write; `answers`: of requests.

    `need_layouts`: digests to fetch before the next decision. `wake_at`: when to decide again without news.
    `tell`: people should hear of it.
    """

    reason: str
    round: Round | None = None
    answers: Mapping[str, str] | None = None
    need_layouts: tuple[str, ...] = ()
    wake_at: float | None = None
    tell: bool = False


def decide(view: View, settings: Settings, now: float) -> Decision:
    """The next decision. Same view, settings and time: same decision."""
    if view.round is None:
        return _start(view, settings, now)
    gone = view.round.evicted
    view = replace(view, members={node: member for node, member in view.members.items() if node not in gone})
    assert view.round is not None
    ending = next((request for request in view.requests if request.kind == "end"), None)
    if view.round.phase == "ended":
        if view.round.stop.urgent or not any(request.urgent for request in view.requests):
            return Decision("the job has ended")
        return Decision("asked again: no grace", replace(view.round, stop=replace(view.round.stop, urgent=True)))
    if ending is not None:
        return _end(view.round, Verdict(ending.code, ending.detail), view.wall, Stop("now", signum=ending.signum))
    if view.round.decider != view.decider:
        return Decision("another agent decides from now on", replace(view.round, decider=view.decider))
    if view.round.phase == "running":
        return _watch(view, view.round, settings, now)
    return _gather(view, view.round, settings, now)


# --- no round yet -------------------------------------------------------------------------------------------------


def _start(view: View, settings: Settings, now: float) -> Decision:
    count = len(view.members)
    newest = max(view.seen.values(), default=now)
    if count < settings.min_nodes:
        deadline = view.since + settings.rendezvous_timeout_s
        if now >= deadline:
            verdict = Verdict(
                RendezvousTimeoutError.exit_code,
                f"only {count} of {settings.min_nodes} nodes came within {settings.rendezvous_timeout_s:.0f} s; start "
                f"the others, lower --nnodes or raise --rdzv-conf join_timeout",
            )
            cause = Cause("end", verdict.message, view.wall)
            ended = Round(0, "ended", cause, view.decider, settings.sizes, verdict=verdict)
            return Decision(verdict.message, ended)
        reason = f"{count} of at least {_nodes(settings.min_nodes)} here, {deadline - now:.0f} s left"
        return Decision(reason, wake_at=deadline, tell=True)
    if count < settings.max_nodes and now < newest + settings.join_window_s:
        return Decision(
            f"{_nodes(count)} here, waiting a moment for more", wake_at=newest + settings.join_window_s, tell=True
        )
    cause = Cause("start", f"{_nodes(count)} here", view.wall)
    return Decision(cause.detail, Round(0, "gathering", cause, view.decider, settings.sizes))


# --- running ------------------------------------------------------------------------------------------------------


def _watch(view: View, round_: Round, settings: Settings, now: float) -> Decision:
    """A running round: failures first, then losses, then wishes."""
    failure = _first_failure(view, round_)
    if failure is not None:
        return _after_failure(view, round_, settings, failure)
    if all(_done(view, node) for node in round_.nodes):
        return _end(round_, Verdict(0, "all workers have finished"), view.wall)
    lost = [p for p in round_.participants if p.node not in view.members]
    if lost:
        return _regather(view, round_, _loss(lost, view.wall), Stop("now"))
    leaving = [request for request in view.requests if request.kind == "drain" and request.node in round_.nodes]
    if leaving:  # a spare leaves by itself
        return _on_drains(view, round_, settings, now, leaving)
    wish = next((request for request in view.requests if request.kind == "resize"), None)
    if wish is not None:
        return _on_resize(view, round_, settings, wish)
    return _on_joiners(view, round_, settings, now)


def _after_failure(view: View, round_: Round, settings: Settings, failure: Failure) -> Decision:
    cause = Cause("worker_failed", failure.describe(), failure.at)
    failed = replace(round_, failures=round_.failures + 1, first_failure=failure)
    unproven = round_.fallback
    if unproven is not None and all(ack.committed is None for ack in view.acks.values()):
        # The layout was somebody's wish and never got as far as a snapshot: go back to the one that worked, free.
        back = f"{cause.detail}; back to {unproven}, the layout asked for never ran"
        failed = replace(round_, sizes=unproven, fallback=None, first_failure=failure)
        return _regather(view, failed, Cause("resize", back, failure.at), Stop("now"))
    if round_.failures >= settings.max_restarts and len(round_.participants) == 1:
        return _end(round_, _spent(failure, settings), view.wall)
    return _regather(view, failed, cause, Stop("now"))


def _on_drains(view: View, round_: Round, settings: Settings, now: float, leaving: list[Request]) -> Decision:
    """Nodes that were told to leave: together, in one change."""
    staying = [member for node, member in view.members.items() if node not in _draining(view)]
    if forming.select(staying, round_.sizes, settings.min_nodes, settings.max_nodes) is None:
        return _end_by_drain(view, round_, leaving[0])
    ready_at = min(view.asked.get(request.id, LONG_AGO) for request in leaving) + DRAIN_WINDOW_S
    if now < ready_at:
        return Decision("a node leaves, waiting a moment for others that do", wake_at=ready_at)
    names = ", ".join(str(request.node) for request in leaving)
    reasons = ", ".join(dict.fromkeys(request.detail for request in leaving))
    many = len(leaving) > 1
    cause = Cause("node_left", f"node{'s' * many} {names} leave{'' if many else 's'}: {reasons}", view.wall)
    return _regather(view, round_, cause, Stop("boundary", signum=leaving[0].signum))


def _end_by_drain(view: View, round_: Round, request: Request) -> Decision:
    message = f"node {request.node} leaves and too few would stay ({request.detail})"
    return _end(round_, Verdict(request.code, message), view.wall, Stop("now", signum=request.signum))


def _on_resize(view: View, round_: Round, settings: Settings, request: Request) -> Decision:
    try:
        sizes = ParallelConfig.least({**round_.sizes.to_json(), **(request.sizes or {})})
    except ValueError as error:
        return Decision(f"resize refused: {error}", answers={request.id: f"refused: {error}"}, tell=True)
    members = forming.in_rank_order(view.members.values(), round_.nodes, view.seen)
    selection = forming.select(members, sizes, settings.min_nodes, settings.max_nodes)
    if selection is None:
        why: str | None = f"the {len(members)} nodes here cannot be laid out as {sizes} (times dp)"
    else:
        why = forming.refusal(view.layouts.values(), selection.parallel)
    if why is not None or selection is None:
        return Decision(f"resize refused: {why}", answers={request.id: f"refused: {why}"}, tell=True)
    if selection.parallel == round_.parallel:
        return Decision(
            "resize: nothing to change", answers={request.id: f"unchanged: the job runs at {round_.parallel} already"}
        )
    wish = " ".join(f"{axis}={size}" for axis, size in (request.sizes or {}).items())
    cause = Cause("resize", f"asked for {wish}", view.wall)
    changed = replace(round_, sizes=sizes, fallback=round_.sizes)
    decision = _regather(view, changed, cause, Stop("boundary"))
    return replace(decision, answers={request.id: f"accepted: {selection.parallel}"})


def _on_joiners(view: View, round_: Round, settings: Settings, now: float) -> Decision:
    """Nodes that wait: take them in, together, if more of them can work than work now."""
    waiting = [node for node in view.members if node not in round_.nodes and node not in _draining(view)]
    if not waiting:
        return Decision(f"round {round_.number} runs")
    staying = [member for node, member in view.members.items() if node not in _draining(view)]
    members = forming.in_rank_order(staying, round_.nodes, view.seen)
    selection = forming.select(members, round_.sizes, settings.min_nodes, settings.max_nodes)
    gained = [] if selection is None else [m.node for m in selection.members if m.node in waiting]
    if selection is None or len(selection.members) <= len(round_.participants):
        return Decision(f"round {round_.number} runs; {len(waiting)} nodes are spare")
    ready_at = max(view.seen[node] for node in waiting) + settings.join_window_s
    if now < ready_at and len(selection.members) < settings.max_nodes:
        return Decision("new nodes are here, waiting a moment for more", wake_at=ready_at)
    cause = Cause("node_joined", f"{', '.join(gained)} joined", view.wall)
    return _regather(view, round_, cause, Stop("boundary"))


# --- gathering ----------------------------------------------------------------------------------------------------


def _gather(view: View, round_: Round, settings: Settings, now: float) -> Decision:
    """All workers of the round before stop; all living nodes say what they hold; then the round is formed."""
    active = [p.node for p in round_.participants if p.node in view.members]
    if round_.stop.mode == "boundary":
        decision = _to_boundary(view, round_, settings, now, active)
        if decision is not None:
            return decision
    gathered = {node: ack for node, ack in view.acks.items() if ack.state == "gathered" and node in view.members}
    late = [node for node in view.members if node not in gathered]
    blamed = _blame(view, round_, settings, now, bool(late))
    if blamed is not None:
        return blamed
    if late:
        timeout = settings.gather_timeout_s
        overdue = [node for node in late if now >= max(view.since, view.seen[node]) + timeout]
        if overdue:
            reason = f"{', '.join(overdue)} did not stop within {timeout:.0f} s: evicted"
            # In the round document, so that a decider whose time is over evicts nobody.
            return Decision(reason, replace(round_, evicted=(*round_.evicted, *overdue)), tell=True)
        wake_at = min(max(view.since, view.seen[node]) + timeout for node in late)
        return Decision(f"waiting for {', '.join(late)} to stop", wake_at=wake_at)
    if active and all(gathered[node].done for node in active) and len(active) == len(round_.participants):
        return _end(round_, Verdict(0, "all workers have finished"), view.wall)
    return _form(view, round_, settings, now, gathered)


def _blame(view: View, round_: Round, settings: Settings, now: float, late: bool) -> Decision | None:
    """A worker that fails because its peer's node is gone is no failure; the news of the node may come second.

    So the budget is looked at only here, when all have stopped or a moment has passed. None: nothing to settle.
    """
    failure = round_.first_failure
    if round_.cause.kind != "worker_failed" or failure is None:
        return None
    lost = [p for p in round_.participants if p.node not in view.members]
    if lost:
        cause = _loss(lost, view.wall)
        return Decision(cause.detail, replace(round_, cause=cause, failures=round_.failures - 1, first_failure=None))
    if round_.failures <= settings.max_restarts:
        return None
    if late and now < view.since + BLAME_S:
        return Decision("asking whose fault it was", wake_at=view.since + BLAME_S)
    return _end(round_, _spent(failure, settings), view.wall)


def _to_boundary(view: View, round_: Round, settings: Settings, now: float, active: list[str]) -> Decision | None:
    """Agree on one step before which all workers stop. None when it is agreed and the nodes need only be gathered."""
    stop = round_.stop
    failure = _first_failure(view, round_)
    lost = [p for p in round_.participants if p.node not in view.members]
    if failure is not None:
        failed = replace(round_, failures=round_.failures + 1, first_failure=failure, stop=stop.now())
        return Decision(
            failure.describe(), replace(failed, cause=Cause("worker_failed", failure.describe(), failure.at))
        )
    if lost:
        cause = _loss(lost, view.wall)
        return Decision(cause.detail, replace(round_, cause=cause, stop=stop.now()))
    acks = {node: view.acks[node] for node in active if node in view.acks}
    if all(node in acks and acks[node].state == "gathered" for node in active):
        return None
    if now >= view.since + settings.park_timeout_s:
        reason = f"workers did not reach a step boundary within {settings.park_timeout_s:.0f} s: stopping them now"
        return Decision(reason, replace(round_, stop=stop.now(hung=True)), tell=True)
    wait = Decision("waiting for a step boundary", wake_at=view.since + settings.park_timeout_s)
    if stop.committed:
        return wait
    held = [acks[node] for node in active if node in acks and acks[node].state in ("holding", "gathered")]
    if len(held) < len(active) or any(ack.state == "holding" and ack.hold != stop.hold for ack in held):
        return wait
    return _negotiate(round_, [ack.started for ack in held if ack.started is not None])


def _negotiate(round_: Round, started: list[int]) -> Decision:
    stop = round_.stop
    if not started:
        return Decision("no worker has begun a step: stopping them now", replace(round_, stop=stop.now()))
    newest = max(started)
    if stop.hold is not None and newest < stop.hold:
        return Decision(f"all stop before step {stop.hold}", replace(round_, stop=replace(stop, committed=True)))
    # A margin that doubles: a fixed one loses the race against short steps for ever.
    hold = newest + 2**stop.tries
    proposed = replace(stop, hold=hold, tries=stop.tries + 1)
    return Decision(f"proposing to stop before step {hold}", replace(round_, stop=proposed))


def _form(view: View, round_: Round, settings: Settings, now: float, gathered: Mapping[str, Ack]) -> Decision:
    wanted = {holding.snapshot.digest for ack in gathered.values() for holding in ack.holdings}
    unknown = tuple(sorted(wanted - set(view.layouts)))
    if unknown:
        return Decision("reading the layouts of the snapshots held", need_layouts=unknown)
    staying = [member for node, member in view.members.items() if node not in _draining(view)]
    members = forming.in_rank_order(staying, round_.nodes, view.seen)
    selection = forming.select(members, round_.sizes, settings.min_nodes, settings.max_nodes)
    if selection is None:
        left = [request for request in view.requests if request.kind == "drain" and request.node in view.members]
        everyone = forming.select([*view.members.values()], round_.sizes, settings.min_nodes, settings.max_nodes)
        if left and everyone is not None:
            return _end_by_drain(view, round_, left[0])
        return _too_few(view, round_, settings, now, members)
    snapshot, sources = forming.recover(gathered, view.members, view.layouts)
    layout = None if snapshot is None else view.layouts[snapshot.digest]
    if snapshot and layout and settings.assign and forming.refusal([layout], selection.parallel) is None:
        ranks = {participant.node: participant.first_rank for participant in round_.participants}
        selection = forming.arrange(selection, layout, snapshot, sources, ranks, settings.assign)
    first = selection.members[0]
    formed = replace(
        round_,
        phase="running",
        stop=Stop(),
        participants=selection.participants(),
        parallel=selection.parallel,
        spares=selection.spares,
        master=(first.host, gathered[first.node].master_port),
        snapshot=snapshot,
        sources=sources,
    )
    formed = inputs.frozen(formed, view.members)
    origin = f"from {snapshot}" if snapshot else "from the start: no living node holds a snapshot"
    return Decision(f"round {round_.number} runs at {selection.parallel} {origin}", formed)


def _too_few(view: View, round_: Round, settings: Settings, now: float, members: list[Member]) -> Decision:
    deadline = view.since + settings.rendezvous_timeout_s
    workers = sum(member.num_workers for member in members)
    here = f"{_nodes(len(members))} with {workers} workers here"
    if now < deadline:
        reason = (
            f"{here}, too few for {round_.sizes} on at least {settings.min_nodes} nodes; {deadline - now:.0f} s left"
        )
        return Decision(reason, wake_at=deadline)
    message = f"{here}, too few for {round_.sizes} on at least {settings.min_nodes} nodes; nobody came in time"
    return _end(round_, Verdict(QuorumLostError.exit_code, message, round_.first_failure), view.wall)


# --- shared -------------------------------------------------------------------------------------------------------


def _regather(view: View, round_: Round, cause: Cause, stop: Stop) -> Decision:
    following = replace(
        round_,
        number=round_.number + 1,
        phase="gathering",
        cause=cause,
        stop=stop,
        snapshot=None,
        sources=None,
        master=None,
        fallback=round_.fallback if cause.kind == "resize" else None,
    )
    return Decision(cause.detail, following, tell=True)


def _end(round_: Round, verdict: Verdict, wall: float, stop: Stop | None = None) -> Decision:
    cause = Cause("end", verdict.message, wall)
    ended = replace(round_, phase="ended", cause=cause, verdict=verdict, sources=None, stop=stop or Stop())
    return Decision(verdict.message, ended)


def _first_failure(view: View, round_: Round) -> Failure | None:
    """Whose process ended first. Clocks of nodes are never compared: of what is reported together, the oldest."""
    failures = [ack.failure for node, ack in view.acks.items() if ack.state == "failed" and ack.failure is not None]
    return min(failures, key=lambda failure: (-failure.age_s, failure.rank), default=None)


def _spent(failure: Failure, settings: Settings) -> Verdict:
    spent = f"no restarts left (--max-restarts {settings.max_restarts})"
    return Verdict(failure.exit_code, f"{failure.describe()}; {spent}", failure)


def _loss(lost: list[Participant], wall: float) -> Cause:
    nodes = ", ".join(f"{p.node} [{p.host}]" for p in lost)
    return Cause("node_lost", f"node {nodes} is gone", wall)


def _done(view: View, node: str) -> bool:
    ack = view.acks.get(node)
    return ack is not None and ack.state == "done"


def _draining(view: View) -> set[str | None]:
    return {request.node for request in view.requests if request.kind == "drain"}


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"
