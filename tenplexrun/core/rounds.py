"""The records of coordination: members, the round document, what nodes report about a round, requests.

All are JSON documents in the coordination store, below `runs/<run_id>/<run_epoch>/`:

    members/<node>          leased; Member
    decider                 leased; the node that decides
    round                   one Round, changed by compare-and-swap only by the decider
    acks/<number>/<node>    Ack: the last word of a node about that round
    requests/<id>           Request; answered below answers/<id>
    progress                {"round", "step", "committed", "sealed", "copies", "restarts_left"} as rank 0's node saw it
                            last, for people
    datasets/<node>         what that node keeps of datasets, a list of records (`vfs.extents.Keeper`), for people
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from tenplexrun.core.durable import Checkpoint
from tenplexrun.core.extents import Placement, Spans
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import BuddyClaim, Holding, SnapshotId
from tenplexrun.errors import DataChangedError

Record = dict[str, Any]
SCHEMA = 1

Phase = Literal["gathering", "running", "ended"]
CauseKind = Literal["start", "worker_failed", "worker_hung", "node_lost", "node_left", "node_joined", "resize", "end"]
Way = Literal["least", "migrate-all", "central"]
"""How state gets to the nodes of a round: see `core.baselines`."""
FINAL = (DataChangedError.__name__,)
"""Kinds of errors that no restart would mend."""
FAILURES = ("worker_failed", "worker_hung")
"""Causes that count against --max-restarts."""


@dataclass(frozen=True, slots=True)
class Member:
    """A living agent: where its link and store listen, how many workers it runs. `node` is new at each start.

    `rack`: label of those that are near one another. `ready_s`: seconds from its launch until it could join.
    `data_bytes`: of datasets it may keep in memory.
    """

    node: str
    host: str
    link: str
    store: str
    num_workers: int
    node_rank: int | None = None
    role: str = "default"
    rack: str | None = None
    ready_s: float = 0.0
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's end that was no success, or its hang. `code` as in `subprocess`: -N for signal N.

    `at` is Unix time, on its node. `stderr`: its last lines. `error`: what it wrote to TORCHELASTIC_ERROR_FILE (torch's
    `@record`), if it did; or, if it is `is_final`, the error by which it ended.
    `age_s`: how long ago it was when the node reported it. `hung`: what shows that it hangs, "" if it has ended.
    """

    node: str
    host: str
    rank: int
    local_rank: int
    pid: int
    code: int
    at: float
    stderr: tuple[str, ...] = ()
    error: Mapping[str, Any] | None = None
    age_s: float = 0.0
    hung: str = ""

    @property
    def cause(self) -> Cause:
        return Cause("worker_hung" if self.hung else "worker_failed", self.describe(), self.at)

    def describe(self) -> str:
        if self.pid == 0:  # no worker's fault: `stderr` says what went wrong on its node
            return f"node {self.node} [{self.host}]: {'; '.join(self.stderr)}"
        where = f"rank {self.rank} (local rank {self.local_rank}, pid {self.pid}) on node {self.node} [{self.host}]"
        return f"{where}: {self.how}"

    @property
    def how(self) -> str:
        """ "signal 11 (SIGSEGV)", "exit code 3", or how it hangs."""
        if self.hung:
            return self.hung
        if self.code >= 0:
            return f"exit code {self.code}"
        known = {int(number): number.name for number in signal.Signals}
        return f"signal {-self.code}" + (f" ({known[-self.code]})" if -self.code in known else "")

    @property
    def is_final(self) -> bool:
        return self.error is not None and self.error.get("kind") in FINAL

    def is_like(self, other: Failure) -> bool:
        """The same rank ended in the same way, and said the same last."""
        return (self.rank, self.how, self.stderr[-1:]) == (other.rank, other.how, other.stderr[-1:])

    @property
    def exit_code(self) -> int:
        """What a launcher exits with for it: the worker's own code, 128 + N for signal N."""
        return 128 - self.code if self.code < 0 else self.code


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a round was made. `at` is the Unix time at which it was noticed, on the node that noticed it."""

    kind: CauseKind
    detail: str
    at: float


@dataclass(frozen=True, slots=True)
class Stop:
    """How the workers of the round before are stopped. `hold` is the first step that is not to be run.

    `signum`: what they are sent where nothing but a signal tells them. `hung`: some did not do as they were told.
    `urgent`: somebody has asked twice, nobody gets any grace.
    """

    mode: Literal["now", "boundary"] = "now"
    hold: int | None = None
    committed: bool = False
    tries: int = 0
    signum: int = signal.SIGTERM
    hung: bool = False
    urgent: bool = False

    def now(self, hung: bool = False) -> Stop:
        """No boundary any more."""
        return Stop("now", signum=self.signum, hung=hung)


@dataclass(frozen=True, slots=True)
class Participant:
    """A node of a running round; its ranks are first_rank … first_rank + num_workers - 1."""

    node: str
    host: str
    first_rank: int
    num_workers: int
    store: str
    role: str = "default"
    data_bytes: int = 0

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_workers)


@dataclass(frozen=True, slots=True)
class Source:
    """A node that holds parts of the round's snapshot, and the address of its store."""

    store: str
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the job ended: the exit code of every agent, and one sentence."""

    code: int
    message: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A wish of a user or node. kind "resize": new fixed sizes. "drain": `node` leaves. "end": the job ends.

    `signum`: the signal that a person or scheduler sent, for the workers. `urgent`: not for the first time.
    """

    id: str
    kind: Literal["resize", "drain", "end"]
    sizes: Mapping[str, int] | None = None
    node: str | None = None
    code: int = 0
    detail: str = ""
    signum: int = signal.SIGTERM
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """The round document. While gathering, `participants` and `parallel` are those of the round before.

    `racks`, `algorithm`, `inputs`: frozen when it was formed; see `core.inputs`.
    `evicted`: nodes that count as gone, whatever else is written of them. A node that comes back has a new name.
    `lacking`: why its snapshot is not a newer one, or there is none, if that is worth a word.
    `checkpoint`: read if there is no snapshot; `refused`: those that could not be. `saved`: the last step of which a
    durable checkpoint was published.
    `replicas`: on how many nodes each part of its snapshots shall be. `way`: how what it starts from gets to the nodes.
    `vain`: how many rounds in a row have failed alike, from one snapshot, without a newer one.
    `extents`: by dataset and node, which ones it held.
    `churn`: how often nodes came or went. `departures`: by host, how often of late, and the Unix time of the last.
    """

    number: int
    phase: Phase
    cause: Cause
    decider: str
    sizes: ParallelConfig
    participants: tuple[Participant, ...] = ()
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    spares: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    churn: int = 0
    departures: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    stop: Stop = Stop()
    failures: int = 0
    master: tuple[str, int] | None = None
    snapshot: SnapshotId | None = None
    sources: Mapping[str, Source] | None = None
    fallback: ParallelConfig | None = None
    verdict: Verdict | None = None
    first_failure: Failure | None = None
    racks: Mapping[str, str] = field(default_factory=dict)
    algorithm: int = 0
    inputs: str = ""
    replicas: int = 1
    way: Way = "least"
    checkpoint: Checkpoint | None = None
    refused: tuple[str, ...] = ()
    saved: int | None = None
    vain: int = 0
    lacking: str = ""
    extents: Mapping[str, Mapping[str, Spans]] = field(default_factory=dict)

    @property
    def start_step(self) -> int:
        """The first step of a running round."""
        return self.snapshot.step if self.snapshot else self.checkpoint.step if self.checkpoint else 0

    @property
    def origin(self) -> str:
        """What a running round starts from, in words."""
        if self.snapshot is not None:
            return f"from step {self.snapshot.step}, held in memory" + (f"; {self.lacking}" if self.lacking else "")
        why = self.lacking or "no living nodes hold a snapshot"
        if self.checkpoint is not None:
            return f"from step {self.checkpoint.step}: {why}, {self.checkpoint.url} is read"
        return f"from step 0: {why}"

    @property
    def news(self) -> str:
        """Of a running round, for people."""
        where = f"{self.parallel} on {len(self.nodes)} node(s)"
        return f"round {self.number}: {where}, {self.origin} ({self.cause.detail})"

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(p.node for p in self.participants)

    def participant(self, node: str) -> Participant | None:
        return next((p for p in self.participants if p.node == node), None)

    def placement(self, node: str) -> Placement:
        """Of datasets, as `node` sees it."""
        stores = {p.node: p.store for p in self.participants}
        return Placement(node, stores, {p.node: p.data_bytes for p in self.participants}, self.extents)

    def buddy_claim(self, node: str) -> BuddyClaim | None:
        """What `node` holds for others in this round; None where no copies are wanted or possible."""
        if len(self.participants) == 1:
            return None
        workers = tuple(participant.num_workers for participant in self.participants)
        return BuddyClaim(self.parallel, workers, self.replicas, self.nodes.index(node))

    def without(self, node: str) -> bool:
        """Whether the others go on without this node: it may see so before it knows that its key is gone."""
        left_out = self.phase == "running" and node not in (*self.nodes, *self.spares)
        return left_out or node in self.evicted

    def rank_nodes(self) -> tuple[str, ...]:
        """The node of each rank, rank 0 first."""
        return tuple(p.node for p in self.participants for _ in p.ranks)


@dataclass(frozen=True, slots=True)
class Ack:
    """A node's last word about a round.

    holding   wrote `hold` and then read `started`, the newest step begun here (None: no worker counts steps)
    gathered  no worker of an older round lives here; `holdings` are here, and `extents` of datasets;
              `master_port` listens already
    failed    `failure` happened here; `committed` is the newest step that this round had committed by then
    done      all workers here have exited with 0
    """

    node: str
    state: Literal["holding", "gathered", "failed", "done"]
    hold: int | None = None
    started: int | None = None
    done: bool = False
    holdings: tuple[Holding, ...] = ()
    master_port: int = 0
    failure: Failure | None = None
    committed: int | None = None
    extents: Mapping[str, Spans] = field(default_factory=dict)


def to_json(record: Member | Round | Ack | Request) -> Record:
    """The JSON document of a record, with its schema version."""
    plain = asdict(record)
    if isinstance(record, Round):
        plain["sizes"] = record.sizes.to_json()
        plain["parallel"] = record.parallel.to_json()
        plain["fallback"] = record.fallback and record.fallback.to_json()
        plain["snapshot"] = record.snapshot and record.snapshot.to_json()
        plain["sources"] = record.sources and {
            node: {"store": source.store, "holdings": [holding.to_json() for holding in source.holdings]}
            for node, source in record.sources.items()
        }
    if isinstance(record, Ack):
        plain["holdings"] = [holding.to_json() for holding in record.holdings]
    return {"v": SCHEMA, **plain}


def member_from_json(record: Record) -> Member:
    return Member(**_body(record))


def request_from_json(record: Record) -> Request:
    return Request(**_body(record))


def ack_from_json(record: Record) -> Ack:
    body = _body(record)
    body["holdings"] = tuple(Holding.from_json(holding) for holding in body["holdings"])
    body["failure"] = _failure(body["failure"])
    body["extents"] = {dataset: _spans(packed) for dataset, packed in body["extents"].items()}
    return Ack(**body)


def round_from_json(record: Record) -> Round:
    body = _body(record)
    body["cause"] = Cause(**body["cause"])
    body["stop"] = Stop(**body["stop"])
    body["participants"] = tuple(Participant(**p) for p in body["participants"])
    body["departures"] = {host: (int(one[0]), float(one[1])) for host, one in body["departures"].items()}
    body["checkpoint"] = body["checkpoint"] and Checkpoint(**body["checkpoint"])
    body["refused"] = tuple(body["refused"])
    body["spares"], body["evicted"] = tuple(body["spares"]), tuple(body["evicted"])
    for name in ("sizes", "parallel", "fallback"):
        body[name] = body[name] and ParallelConfig.from_json(body[name])
    body["master"] = body["master"] and (str(body["master"][0]), int(body["master"][1]))
    body["snapshot"] = body["snapshot"] and SnapshotId.from_json(body["snapshot"])
    body["sources"] = body["sources"] and {
        node: Source(source["store"], tuple(map(Holding.from_json, source["holdings"])))
        for node, source in body["sources"].items()
    }
    body["extents"] = {
        dataset: {node: _spans(packed) for node, packed in held.items()} for dataset, held in body["extents"].items()
    }
    verdict = body["verdict"]
    body["verdict"] = verdict and replace(Verdict(**verdict), failure=_failure(verdict["failure"]))
    body["first_failure"] = _failure(body["first_failure"])
    return Round(**body)


def _spans(packed: Iterable[Sequence[int]]) -> Spans:
    return tuple((int(first), int(count)) for first, count in packed)


def _failure(record: Record | None) -> Failure | None:
    return record and Failure(**{**record, "stderr": tuple(record["stderr"])})  # type: ignore[return-value]


def _body(record: Record) -> Record:
    if record.get("v") != SCHEMA:
        raise ValueError(f"record of schema {record.get('v')!r}, this is {SCHEMA}: run one version on all nodes")
    return {name: value for name, value in record.items() if name != "v"}
