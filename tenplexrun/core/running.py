"""The decider's rules for a running round: failures first, then losses, then wishes, then those who wait. Pure."""

from __future__ import annotations

from dataclasses import replace

from tenplexrun.core import forming
from tenplexrun.core.decisions import (
    Decision,
    Settings,
    View,
    done,
    draining,
    end,
    end_by_drain,
    first_failure,
    held_back,
    loss,
    more_until,
    regather,
    spent,
)
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Cause, Failure, Request, Round, Stop, Verdict
from tenplexrun.errors import CheckpointError, LayoutError

DRAIN_WINDOW_S = 0.5
"""A scheduler takes nodes back one by one: those that are told to leave within this time leave in one change."""
LONG_AGO = float("-inf")


def watch(view: View, round_: Round, settings: Settings, now: float) -> Decision:
    """A running round: failures first, then losses, then wishes."""
    failure = first_failure(view, round_)
    if failure is not None:
        return _after_failure(view, round_, settings, failure)
    if all(done(view, node) for node in round_.nodes):
        if view.writing:
            return Decision("all workers have finished; the last checkpoint is being written", tell=True)
        return end(round_, Verdict(0, "all workers have finished"), view.wall)
    lost = [p for p in round_.participants if p.node not in view.members]
    if lost:
        return regather(view, round_, settings, loss(lost, view), Stop("now"))
    leaving = [request for request in view.requests if request.kind == "drain" and request.node in round_.nodes]
    if leaving:  # a spare leaves by itself
        return _on_drains(view, round_, settings, now, leaving)
    wish = next((request for request in view.requests if request.kind == "resize"), None)
    if wish is not None:
        return _on_resize(view, round_, settings, wish)
    return _on_joiners(view, round_, settings, now)


def _after_failure(view: View, round_: Round, settings: Settings, failure: Failure) -> Decision:
    cause, stop = failure.cause, Stop("now", hung=bool(failure.hung))
    if failure.is_final:
        what = f"{failure.describe()}; no restart would mend what it says below"
        return end(round_, Verdict(failure.exit_code, what, failure), view.wall, stop)
    if round_.checkpoint is not None and failure.pid == 0:  # no worker's fault, and maybe the checkpoint's
        if failure.code == LayoutError.exit_code:
            return end(round_, Verdict(failure.code, failure.describe(), failure), view.wall)
        if failure.code == CheckpointError.exit_code:
            without = replace(round_, refused=(*round_.refused, round_.checkpoint.url), first_failure=None)
            return regather(view, without, settings, cause, stop)
    failed = replace(round_, failures=round_.failures + 1, first_failure=failure, vain=_in_vain(view, round_, failure))
    unproven = round_.fallback
    if unproven is not None and all(ack.committed is None for ack in view.acks.values()):
        # The layout was somebody's wish and never got as far as a snapshot: go back to the one that worked, free.
        back = f"{cause.detail}; back to the sizes before, the layout asked for never ran"
        failed = replace(round_, sizes=unproven, fallback=None, first_failure=failure)
        return regather(view, failed, settings, Cause("resize", back, failure.at), stop)
    if round_.failures >= settings.max_restarts and len(round_.participants) == 1:
        return end(round_, spent(failure, settings), view.wall, stop)
    return regather(view, failed, settings, cause, stop)


def _in_vain(view: View, round_: Round, failure: Failure) -> int:
    """How many rounds in a row, this one the last, have failed like this from one snapshot without a newer one."""
    before = round_.first_failure
    if round_.snapshot is None or any(ack.committed is not None for ack in view.acks.values()):
        return 0
    if before is None or not before.is_like(failure) or round_.snapshot.round == round_.number - 1:
        return 1
    return round_.vain + 1


def _on_drains(view: View, round_: Round, settings: Settings, now: float, leaving: list[Request]) -> Decision:
    """Nodes that were told to leave: together, in one change."""
    staying = [member for node, member in view.members.items() if node not in draining(view)]
    if forming.select(staying, round_.sizes, settings.min_nodes, settings.max_nodes) is None:
        return end_by_drain(view, round_, leaving[0])
    ready_at = min(view.asked.get(request.id, LONG_AGO) for request in leaving) + DRAIN_WINDOW_S
    if now < ready_at:
        return Decision("a node leaves, waiting a moment for others that do", wake_at=ready_at)
    names = ", ".join(str(request.node) for request in leaving)
    reasons = ", ".join(dict.fromkeys(request.detail for request in leaving))
    many = len(leaving) > 1
    cause = Cause("node_left", f"node{'s' * many} {names} leave{'' if many else 's'}: {reasons}", view.wall)
    return regather(view, round_, settings, cause, Stop("boundary", signum=leaving[0].signum))


def _on_resize(view: View, round_: Round, settings: Settings, request: Request) -> Decision:
    try:
        sizes = ParallelConfig.least({**round_.sizes.to_json(), **(request.sizes or {})})
    except ValueError as error:
        return Decision(f"resize refused: {error}", answers={request.id: f"refused: {error}"}, tell=True)
    members = forming.in_rank_order(view.members.values(), round_.nodes, view.seen)
    selection = forming.select(members, sizes, settings.min_nodes, settings.max_nodes)
    if selection is None:
        why: str | None = forming.misfit(members, sizes, settings.min_nodes, settings.max_nodes)
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
    decision = regather(view, changed, settings, cause, Stop("boundary"))
    return replace(decision, answers={request.id: f"accepted: {selection.parallel}"})


def _on_joiners(view: View, round_: Round, settings: Settings, now: float) -> Decision:
    """Nodes that wait: take them in, together, if more of them can work than work now."""
    waiting = [node for node in view.members if node not in round_.nodes and node not in draining(view)]
    if not waiting:
        return Decision(f"round {round_.number} runs")
    staying = [member for node, member in view.members.items() if node not in draining(view)]
    members = forming.in_rank_order(staying, round_.nodes, view.seen)
    selection = forming.select(members, round_.sizes, settings.min_nodes, settings.max_nodes)
    gained = [] if selection is None else [m.node for m in selection.members if m.node in waiting]
    if selection is None or len(selection.members) <= len(round_.participants):
        return Decision(f"round {round_.number} runs; {len(waiting)} nodes are spare")
    held = {node: held_back(view, node) for node in waiting}
    if all(now < held[node] for node in gained):
        return Decision("new nodes come and go: they have to wait", wake_at=min(held[node] for node in gained))
    ready_at = more_until(view, waiting, settings)
    if now < ready_at and len(selection.members) < settings.max_nodes:
        return Decision("new nodes are here, waiting a moment for more", wake_at=ready_at)
    cause = Cause("node_joined", f"{', '.join(gained)} joined", view.wall)
    return regather(view, round_, settings, cause, Stop("boundary"))
