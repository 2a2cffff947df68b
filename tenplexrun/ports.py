"""What the agent asks of the world around it. Adapters implement these; `cli` wires them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tenplexrun.core.durable import Checkpoint

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key of the coordination store. `token` changes with every write and never comes back."""

    key: str
    value: str
    token: str


class Lease(Protocol):
    """A key that lives while its holder does. `lost` is set when the store let it expire or somebody removed it."""

    lost: asyncio.Event

    @property
    def key(self) -> str: ...
    async def release(self) -> None:
        """Stop refreshing and delete the key."""


class Coordination(Protocol):
    """A small, strongly consistent key-value store (etcd). Keys are slash-separated, without a leading slash.

    All methods raise CoordinationError when the store cannot be reached within a bounded time,
    CompareFailedError when a comparison was lost.
    """

    @property
    def connected_s(self) -> float:
        """For how long the store has answered without a break, seconds. Leases may have run out in a break."""

    async def get(self, key: str) -> KeyValue | None: ...
    async def put(self, key: str, value: str) -> KeyValue: ...
    async def create(self, key: str, value: str) -> KeyValue:
        """Write a key that must not exist."""

    async def swap(self, key: str, value: str, token: str) -> KeyValue:
        """Compare-and-swap: write only if the key's token is still `token`."""

    async def delete(self, key: str, token: str | None = None) -> None:
        """Delete a key (a missing one is fine); with `token`, only if it is still that one."""

    async def delete_folder(self, prefix: str) -> None:
        """Delete all keys below the folder `prefix`; a missing one is fine."""

    async def list(self, prefix: str) -> Mapping[str, KeyValue]:
        """All keys below the folder `prefix`, recursively."""

    async def hold(self, key: str, value: str, ttl_s: float) -> Lease:
        """Create a leased key that must not exist, and keep it alive from a thread of its own."""

    def watch(self, prefix: str) -> AsyncIterator[Mapping[str, KeyValue]]:
        """The whole content of `prefix` (a folder or a single key): now, and again after each change.

        Level-triggered: changes may be merged, the last state is never missed. Outages are waited out.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to fork: its whole environment, the command after the launcher's own flags, its streams."""

    local_rank: int
    env: Mapping[str, str]
    stdout_fd: int
    stderr_fd: int


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """`code` is the exit code, or -N for death by signal N (as in `subprocess`). `at` is Unix time, seconds."""

    pid: int
    code: int
    at: float


class WorkerPool(Protocol):
    """Forks workers from a process that has torch imported."""

    exits: asyncio.Queue[WorkerExit]

    async def listen(self, host: str) -> int:
        """Bind and listen on a port of the system's choice, for the next round's TCPStore. Returns the port."""

    async def spawn(self, workers: Sequence[WorkerSpec], host_store: bool) -> list[int]:
        """Fork one process each and return pids. `host_store`: first fork the host of the round's TCPStore
        on the socket of the last `listen`."""

    def signal(self, pid: int, signum: int) -> None: ...
    async def sweep(self) -> None:
        """Kill and reap everything that an ended round left: the TCPStore's host, orphans."""


class StoreClient(Protocol):
    """The node's own tensor store. Records are those of `tenplexrun.core.snapshots`."""

    async def open_round(
        self, round_number: int, layout: Record, config: Record, ranks: Sequence[int], buddy: Record | None = None
    ) -> Record:
        """Reserve the two slots of a round for this node's `ranks` and, by the `BuddyClaim` `buddy`, for others.
        Returns {"slots": [path, path], "own", "buddy": bytes of a slot, "replicated": whether any node owes anything}.
        Raises ArenaFullError with the bytes needed and free."""

    async def seal(
        self, round_number: int, step: int, slot: int, values: Record, without: Sequence[str] = ()
    ) -> Record:
        """`slot` is written, but for the tensors `without`: checksum it and make it a snapshot. Returns its id."""

    async def replicate(self, round_number: int, step: int, slot: int, stores: Sequence[str], num_bytes: int) -> Record:
        """All nodes have sealed this snapshot, this one in `slot`: fetch what it owes, `num_bytes`, from the others'
        `stores` (rank 0's node first). Returns {"num_bytes", "seconds"}. Raises WireError when a holder did not
        deliver, StoreError when the round is over."""

    async def digests(self, round_number: int, step: int) -> Record:
        """Of a snapshot that this node has sealed: `core.replicas.digests` of what other nodes have, too."""

    async def checksums(self, round_number: int, step: int, key: str) -> list[Sequence[object]]:
        """The same in full, of one group: [fqn, region, checksum] each."""

    async def commit(self, round_number: int, step: int) -> None:
        """This snapshot is sealed by all, and on enough nodes: older ones, and other rounds', may be dropped."""

    async def inventory(self) -> list[Record]:
        """What is here and passes its checksums: a list of `Holding` records."""

    async def pull(
        self,
        round_number: int,
        snapshot: Record,
        layout: Record,
        claim: Record,
        fetches: Sequence[Record],
        buddy: Record | None = None,
        after: Record | None = None,
    ) -> Record:
        """Fetch regions from peers' stores, with which this round starts, and keep them with their snapshot until the
        round's first commit. `buddy`: as for `open_round`. `after`: not before the sources hold this claim.
        Returns {"num_bytes", "seconds", "num_fetches"}."""

    async def progress(self) -> Record:
        """{"num_bytes", "total_bytes"} of the pulls under way; both 0 when there are none."""

    async def abandon(self) -> None:
        """End all pulls: a newer round has other plans. They raise WireError, and leave nothing."""

    async def index(self, snapshot: Record) -> str:
        """Path of a JSON file that lists where the local pieces of a snapshot lie."""

    async def layout(self, digest: str, peers: Sequence[str]) -> Record:
        """The layout of this digest, from here or from one of the peers' stores."""

    async def metrics(self, text: str) -> None:
        """What the store serves for Prometheus besides its own numbers, from now on."""


class CheckpointClient(Protocol):
    """The node's checkpoint process. All raise CheckpointError when something cannot be read or written, ProcessError
    when the process has died."""

    def joined(self, job: str) -> None:
        """The name of the job from now on: the folder of its run."""

    async def newest(self, refused: Collection[str]) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that can be read, `refused` folders left out, and what is to be said of others."""

    async def load(
        self,
        checkpoint: Checkpoint,
        layout: Record,
        config: Record,
        ranks: Sequence[int],
        groups: Mapping[str, int],
        slot: str,
    ) -> Record:
        """Fill a slot file with what these ranks need. Returns {"step", "consumed", "values", "without", "num_bytes"}.
        Raises LayoutError when it is of another model."""

    async def take(
        self, tag: str, index: str, layout: Record, config: Record, ranks: Sequence[Sequence[int]], me: int
    ) -> int:
        """Copy the share of node `me`, of the nodes with these ranks, of the snapshot in `index`. Returns its bytes."""

    async def write(self, step: int, number: int, tag: str, groups: Mapping[str, int]) -> Record:
        """Write what was taken for `tag` as part `number`. Returns the part's record."""

    async def cancel(self) -> None: ...
    async def prepare(self, step: int, tag: str, layout: Record, parts: Sequence[Record]) -> None:
        """All parts are written: check them, and write what makes them a checkpoint aside."""

    async def publish(self, step: int, tag: str, files: Sequence[str], last: bool) -> Record:
        """Make what was prepared a checkpoint, and remove old ones. `last`: none of a later step is under way. Returns
        {"removed", "problem"}."""


class ViewClient(Protocol):
    """The node's dataset view."""

    async def show(
        self,
        round_number: int,
        order: Record,
        dp_rank: int,
        dp_size: int,
        consumed: int,
        placement: Record | None = None,
    ) -> str:
        """Show one dp rank's share of the global order from `consumed` on. Returns the directory. `placement`: by which
        this node keeps its part of the dataset (`core.extents.Placement`)."""

    async def held(self) -> Record:
        """By dataset the extents that are here, as `core.extents.Spans`."""

    async def drop(self, round_number: int) -> None:
        """Readers of this round have left."""
