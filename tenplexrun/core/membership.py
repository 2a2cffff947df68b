"""The decider's machine: from members, acks and requests to the next round document. Pure and level-triggered.

    (no round) ──enough members──► gathering 0 ──all gathered──► running 0 ──all done──► ended
                                       ▲                            │
                                       └── n + 1: failure, loss, ◄──┘
                                           join, resize, drain

A round is decided from what is written alone, so that another decider can go on from it at any point.
`decide` is called again whenever something changed, and at `wake_at`.
"""

from __future__ import annotations

from dataclasses import replace

from tenplexrun.core.decisions import Decision, Settings, View, end, first_failure, left_text, more_until, nodes_text
from tenplexrun.core.gathering import gather
from tenplexrun.core.rounds import Cause, Round, Stop, Verdict
from tenplexrun.core.running import watch
from tenplexrun.errors import RendezvousTimeoutError

__all__ = ["Decision", "Settings", "View", "decide", "may_wait"]


def decide(view: View, settings: Settings, now: float) -> Decision:
    """The next decision. Same view, settings and time: same decision."""
    if view.round is None:
        return start(view, settings, now)
    deadlines = {node: since + settings.unreachable_s for node, since in view.unlinked.items()}
    silent = {node for node, deadline in deadlines.items() if now >= deadline}
    if 2 * len(silent) > len(view.members):
        return Decision("more than half of the nodes cannot be reached from here", resign=True, tell=True)
    out = silent.union(view.round.evicted)
    here = {node: member for node, member in view.members.items() if node not in out}
    decision = _decide(replace(view, members=here), view.round, settings, now)
    if decision.round is None and (waiting := [deadlines[node] for node in deadlines.keys() - silent]):
        decision = replace(decision, wake_at=min(waiting + ([decision.wake_at] if decision.wake_at else [])))
    return decision


def _decide(view: View, round_: Round, settings: Settings, now: float) -> Decision:
    ending = next((request for request in view.requests if request.kind == "end"), None)
    if round_.phase == "ended":
        if round_.stop.urgent or not any(request.urgent for request in view.requests):
            return Decision("the job has ended")
        return Decision("asked again: no grace", replace(round_, stop=replace(round_.stop, urgent=True)))
    if ending is not None:
        return end(round_, Verdict(ending.code, ending.detail), view.wall, Stop("now", signum=ending.signum))
    if round_.decider != view.decider:
        return Decision("another agent decides from now on", replace(round_, decider=view.decider))
    if round_.phase == "running":
        return watch(view, round_, settings, now)
    return gather(view, round_, settings, now)


def may_wait(decision: Decision, view: View) -> bool:
    """Whether the decision ends a job that runs well, since it was told to: then a checkpoint may be written first."""
    if decision.round is None or view.round is None or decision.round.phase != "ended" or view.round.phase != "running":
        return False
    told = any(request.kind != "resize" for request in view.requests)
    urgent = any(request.urgent for request in view.requests)
    done = any(ack.state == "done" for ack in view.acks.values())
    return told and not urgent and not done and first_failure(view, view.round) is None


def start(view: View, settings: Settings, now: float) -> Decision:
    count = len(view.members)
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
        reason = f"{count} of at least {nodes_text(settings.min_nodes)} here, {left_text(deadline - now)}"
        return Decision(reason, wake_at=deadline, tell=True)
    ready_at = more_until(view, view.members, settings)
    if count < settings.max_nodes and now < ready_at:
        return Decision(f"{nodes_text(count)} here, waiting a moment for more", wake_at=ready_at, tell=True)
    cause = Cause("start", f"{nodes_text(count)} here", view.wall)
    return Decision(cause.detail, Round(0, "gathering", cause, view.decider, settings.sizes))
