"""The decider's rules between two rounds: the workers stop, at one step boundary if nothing is broken; the nodes tell
what they hold; the next round is formed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tenplexrun.core import forming, inputs
from tenplexrun.core.decisions import (
    Decision,
    Settings,
    View,
    draining,
    end,
    end_by_drain,
    first_failure,
    left_text,
    loss,
    nodes_text,
    spent,
)
from tenplexrun.core.durable import Found
from tenplexrun.core.rounds import FAILURES, Ack, Member, Round, Stop, Verdict
from tenplexrun.errors import CheckpointError, QuorumLostError

MAX_VAIN = 3
"""So many rounds that fail alike, from one snapshot and without a newer one, are enough: it will not get better."""
BLAME_S = 2.0
"""How long a job without restarts left waits for the news that a node is gone: links tell in milliseconds."""


def gather(view: View, round_: Round, settings: Settings, now: float) -> Decision:
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
        return end(round_, Verdict(0, "all workers have finished"), view.wall)
    return _form(view, round_, settings, now, gathered)


def _blame(view: View, round_: Round, settings: Settings, now: float, late: bool) -> Decision | None:
    """A worker that fails because its peer's node is gone is no failure; the news of the node may come second.

    So the budget is looked at only here, when all have stopped or a moment has passed. None: nothing to settle.
    """
    failure = round_.first_failure
    if round_.cause.kind not in FAILURES or failure is None:
        return None
    lost = [p for p in round_.participants if p.node not in view.members]
    if lost:
        cause = loss(lost, view)
        return Decision(cause.detail, replace(round_, cause=cause, failures=round_.failures - 1, first_failure=None))
    if round_.vain >= MAX_VAIN:
        again = f"{round_.vain} rounds in a row ended so, from the same snapshot and without a newer one: fix the cause"
        return end(round_, Verdict(failure.exit_code, f"{failure.describe()}; {again}", failure), view.wall)
    if round_.failures <= settings.max_restarts:
        return None
    if late and now < view.since + BLAME_S:
        return Decision("asking whose fault it was", wake_at=view.since + BLAME_S)
    return end(round_, spent(failure, settings), view.wall)


def _to_boundary(view: View, round_: Round, settings: Settings, now: float, active: list[str]) -> Decision | None:
    """Agree on one step before which all workers stop. None when it is agreed and the nodes need only be gathered."""
    stop = round_.stop
    failure = first_failure(view, round_)
    lost = [p for p in round_.participants if p.node not in view.members]
    if failure is not None:
        after = stop.now(hung=bool(failure.hung))
        failed = replace(round_, failures=round_.failures + 1, first_failure=failure, stop=after)
        return Decision(failure.describe(), replace(failed, cause=failure.cause))
    if lost:
        cause = loss(lost, view)
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
    staying = [member for node, member in view.members.items() if node not in draining(view)]
    members = forming.in_rank_order(staying, round_.nodes, view.seen)
    selection = forming.select(members, round_.sizes, settings.min_nodes, settings.max_nodes)
    if selection is None:
        left = [request for request in view.requests if request.kind == "drain" and request.node in view.members]
        everyone = forming.select([*view.members.values()], round_.sizes, settings.min_nodes, settings.max_nodes)
        if left and everyone is not None:
            return end_by_drain(view, round_, left[0])
        return _too_few(view, round_, settings, now, members)
    snapshot, sources, lacking = forming.recover(gathered, view.members, view.layouts)
    found = Found(round_.number, round_.refused)
    if snapshot is None and settings.durable:
        if view.found is None or (view.found.round, view.found.refused) != (found.round, found.refused):
            return Decision("no living nodes hold a snapshot, looking for a checkpoint", look_for=found, tell=True)
        found = view.found
        if found.error is not None:
            return end(round_, Verdict(CheckpointError.exit_code, found.error, round_.first_failure), view.wall)
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
        lacking=lacking,
        extents=forming.extents(gathered),
        checkpoint=found.checkpoint,
        replicas=settings.replicas,
        way=settings.way,
    )
    formed = inputs.frozen(formed, view.members)
    return Decision(f"round {round_.number} runs at {selection.parallel} {formed.origin}", formed)


def _too_few(view: View, round_: Round, settings: Settings, now: float, members: list[Member]) -> Decision:
    deadline = view.since + settings.rendezvous_timeout_s
    workers = sum(member.num_workers for member in members)
    here = f"{nodes_text(len(members))} with {workers} workers here"
    if now < deadline:
        reason = (
            f"{here}, too few for {round_.sizes} on at least {settings.min_nodes} nodes; {left_text(deadline - now)}"
        )
        return Decision(reason, wake_at=deadline, tell=True)
    message = f"{here}, too few for {round_.sizes} on at least {settings.min_nodes} nodes; nobody came in time"
    return end(round_, Verdict(QuorumLostError.exit_code, message, round_.first_failure), view.wall)
