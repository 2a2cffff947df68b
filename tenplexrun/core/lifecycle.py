"""A node's machine: from the round document and its own workers to what the agent does next. Pure.

    idle ──round running──► starting ──► running ──stop──► stopping ──► idle
      └─────────────── gathering: tell what is held ◄──────────────────────┘

Events carry the round they are about; what is about an older round is dropped.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from tenplexrun.core.extents import Spans
from tenplexrun.core.rounds import FAILURES, Ack, Failure, Round
from tenplexrun.core.snapshots import Holding

# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundSeen:
    round: Round


@dataclass(frozen=True, slots=True)
class Held:
    """The control page was asked: `started` is the newest step begun here, None if no worker counts steps."""

    round: int
    hold: int | None
    started: int | None


@dataclass(frozen=True, slots=True)
class Parked:
    """Every worker here is parked before the agreed step, and its snapshot is sealed."""

    round: int


@dataclass(frozen=True, slots=True)
class WorkersEnded:
    """The first failure of this node's workers, or, with None, all of them have exited with 0."""

    round: int
    failure: Failure | None
    committed: int | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """No worker of `round` lives here any more."""

    round: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the store holds, and the port that listens for the round `round`. `extents`: held of datasets."""

    round: int
    holdings: tuple[Holding, ...]
    master_port: int
    extents: Mapping[str, Spans] = field(default_factory=dict)


Event = RoundSeen | Held | Parked | WorkersEnded | Stopped | Gathered

How = Literal["leave", "terminate", "rescue", "kill"]

# --- actions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """Write `hold` (None: only read) to the control page, then report `Held` for `round`."""

    round: int
    hold: int | None


@dataclass(frozen=True, slots=True)
class AwaitParked:
    round: int
    hold: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End the workers of `round`.

    leave      they are parked, and told to go on to their end
    terminate  they are sent `signum`
    rescue     one of them or a peer has failed: who still runs signal handlers is sent `signum`, the others are killed
    kill       at once

    All but the last give them their grace. `hung`: show their stacks first.
    """

    round: int
    how: How
    signum: int = signal.SIGTERM
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """Take stock for round `round`, then report `Gathered`."""

    round: int


@dataclass(frozen=True, slots=True)
class SendAck:
    round: int
    ack: Ack


@dataclass(frozen=True, slots=True)
class StartRound:
    round: Round


@dataclass(frozen=True, slots=True)
class Exit:
    round: Round


@dataclass(frozen=True, slots=True)
class Leave:
    """This node was asked to leave, and the round goes on without it."""


@dataclass(frozen=True, slots=True)
class StandBy:
    """This round runs without this node, which waits until it is taken in; said once a round."""

    round: Round


Action = Hold | AwaitParked | StopWorkers | Gather | SendAck | StartRound | Exit | Leave | StandBy


_HOWS = get_args(How)  # from the mildest on


class Lifecycle:
    """State of one node. `on` takes an event and returns the actions, in order."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.round: Round | None = None
        self.live: int | None = None
        """Round whose workers live (or are being started) here."""
        self.draining = False
        self._stopping: How | None = None
        self._done = False
        self._finished: int | None = None
        self._gathering: int | None = None
        self._standing_by: int | None = None

    @property
    def training(self) -> bool:
        """The workers run, and nobody has asked them to stop."""
        return self.round is not None and self.round.phase == "running" and self.live == self.round.number

    def on(self, event: Event) -> list[Action]:
        if isinstance(event, RoundSeen):
            return self._on_round(event.round)
        if isinstance(event, Stopped):
            return self._on_stopped(event)
        if isinstance(event, WorkersEnded):
            return self._on_ended(event)
        current = self.round
        if current is None or current.number != event.round or current.phase != "gathering":
            return []
        if isinstance(event, Held):
            return [self._ack(Ack(self.node, "holding", hold=event.hold, started=event.started))]
        if isinstance(event, Parked):
            return self._stop("leave")
        ack = Ack(self.node, "gathered", done=self._done, holdings=event.holdings, master_port=event.master_port)
        return [self._ack(replace(ack, extents=event.extents))]

    def _on_round(self, seen: Round) -> list[Action]:
        if self.round == seen or (self.round is not None and seen.number < self.round.number):
            return []
        self.round = seen
        if seen.phase == "running":
            return self._on_running(seen)
        if seen.phase == "ended":
            failed = seen.verdict is not None and seen.verdict.failure is not None
            how: How = "kill" if seen.stop.urgent else "rescue" if failed else "terminate"
            return [Exit(seen)] if self.live is None else self._stop(how)
        if self.live is None:
            return self._gather(seen.number)
        if self._stopping:
            return self._stop("rescue") if seen.stop.mode == "now" else []
        if seen.stop.mode == "now":
            failed = seen.stop.hung or seen.cause.kind in (*FAILURES, "node_lost")
            return self._stop("rescue" if failed else "terminate")
        if seen.stop.committed and seen.stop.hold is not None:
            return [AwaitParked(seen.number, seen.stop.hold)]
        return [Hold(seen.number, seen.stop.hold)]

    def _on_running(self, seen: Round) -> list[Action]:
        if seen.number in (self.live, self._finished):
            return []  # the same round, with something else written in it
        if self.live is not None:
            return self._stop("kill")  # it went on without this node
        if seen.participant(self.node) is not None:
            self.live, self._done = seen.number, False
            return [StartRound(seen)]
        if self.draining:
            return [Leave()]
        told, self._standing_by = self._standing_by, seen.number
        return [] if told == seen.number else [StandBy(seen)]

    def _on_ended(self, event: WorkersEnded) -> list[Action]:
        if event.round != self.live or self.round is None:
            return []
        if event.failure is None:
            self.live, self._stopping, self._done = None, None, True  # no `Stopped` will be about them
            self._finished = event.round
            if self.round.phase == "ended":
                return [Exit(self.round)]
            if self.round.phase == "gathering":
                return self._gather(self.round.number)
            return [SendAck(event.round, Ack(self.node, "done"))]
        if self._stopping or self.round.phase == "ended":
            return []
        if self.round.phase == "gathering" and self.round.stop.mode == "now":
            return []  # a victim of the stop
        failed = Ack(self.node, "failed", failure=event.failure, committed=event.committed)
        return [SendAck(self.round.number, failed)]

    def _on_stopped(self, event: Stopped) -> list[Action]:
        if event.round != self.live or self.round is None:
            return []
        self.live, self._stopping = None, None
        if self.round.phase == "ended":
            return [Exit(self.round)]
        if self.round.phase == "gathering":
            return self._gather(self.round.number)
        return self._on_running(self.round)

    def _stop(self, how: How) -> list[Action]:
        """Never said twice: a worker that saves in its handler must not be taken for one that hangs."""
        if (
            self.live is None
            or self.round is None
            or (self._stopping and _HOWS.index(self._stopping) >= _HOWS.index(how))
        ):
            return []
        self._stopping = how
        return [StopWorkers(self.live, how, self.round.stop.signum, self.round.stop.hung)]

    def _gather(self, number: int) -> list[Action]:
        if self._gathering == number:
            return []
        self._gathering = number
        return [Gather(number)]

    def _ack(self, ack: Ack) -> Action:
        assert self.round is not None
        return SendAck(self.round.number, ack)
