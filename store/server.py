"""The store's process: control over a Unix socket for its agent, TCP for other nodes' stores.

Started as `python -m tenplexrun.store.server CONFIG`, CONFIG being JSON:

    {"dir": node directory (the arena is its folder "arena"), "host": the address to serve peers on,
     "token_file": file with the run's token, "socket": path of the control socket,
     "limit_bytes": what the arena may reserve at most (optional),
     "timeout_s": the longest wait for any progress of a peer (optional, 20),
     "tls": {"cert", "key", "ca"}, for peers (optional, none)}

It answers on the control socket once it is ready; "hello" tells the peers' port. Killed and started again on the same
directory, it goes on with all that was sealed, at the same port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tenplexrun import channel
from tenplexrun.core import records
from tenplexrun.core.buddies import buddies
from tenplexrun.core.layout import Layout
from tenplexrun.core.records import Record
from tenplexrun.core.replicas import digests
from tenplexrun.core.snapshots import BuddyClaim, Claim, SnapshotId
from tenplexrun.errors import LayoutError, StoreError, TenplexError, UsageError
from tenplexrun.store.arena import Arena
from tenplexrun.store.peers import PeerServer
from tenplexrun.store.pulls import Order, PullJob
from tenplexrun.store.replication import ReplicaJob
from tenplexrun.store.shelf import RowsJob, Shelf
from tenplexrun.store.transfer import Peers
from tenplexrun.store.web import Counters
from tenplexrun.tls import Tls

log = logging.getLogger(__name__)

PATIENCE = 2
"""Sources that went away are asked again for so many times the longest wait for any progress."""
DATA_TIMEOUT_S = 5.0
"""As `timeout_s`, for samples of datasets."""
MAX_FETCHES = 8
ABANDON_S = 2.0
"""The longest wait for a pull that was cancelled: one that is just connecting sees it late."""


@dataclass(frozen=True, slots=True)
class Config:
    """See the module's docstring. `timeout_s`: the longest wait for any progress of a peer."""

    folder: Path
    host: str
    token: str
    socket: str
    limit_bytes: int | None
    timeout_s: float
    tls: Tls | None

    @classmethod
    def parse(cls, text: str) -> Config:
        """Raises UsageError."""
        try:
            needed, optional = ("dir", "host", "token_file", "socket"), ("limit_bytes", "timeout_s", "tls")
            known = records.fields(json.loads(text), "the config", needed, optional)
            return cls(
                Path(records.text(known["dir"], "dir")) / "arena",
                records.text(known["host"], "host"),
                records.text(Path(known["token_file"]).read_text().strip(), "the token"),
                records.text(known["socket"], "socket"),
                None if known.get("limit_bytes") is None else records.whole(known["limit_bytes"], "limit_bytes"),
                float(known.get("timeout_s", 20.0)),
                None if known.get("tls") is None else Tls(**known["tls"]),
            )
        except (LayoutError, OSError, ValueError, TypeError) as error:
            raise UsageError(f"the store cannot start: {error}") from error


class Control:
    """Answers the agent: one operation a method of `ports.StoreClient`. Blocking work runs in threads."""

    def __init__(self, arena: Arena, peers: Peers, port: int, counters: Counters) -> None:
        self._arena, self._peers, self._port, self._counters = arena, peers, port, counters
        self._pulls: dict[PullJob, asyncio.Future[Record]] = {}
        self._replicating: ReplicaJob | None = None
        self._one_replication = asyncio.Lock()
        self._fetching = ThreadPoolExecutor(MAX_FETCHES, "rows")
        self._ops: dict[str, Callable[[Record], Awaitable[Record]]] = {
            "hello": self._hello,
            "open_round": self._open_round,
            "seal": self._seal,
            "replicate": self._replicate,
            "commit": self._commit,
            "inventory": self._inventory,
            "pull": self._pull,
            "digests": self._digests,
            "checksums": self._checksums,
            "progress": self._progress,
            "abandon": self._abandon,
            "index": self._index,
            "layout": self._layout,
            "fetch": self._fetch,
            "metrics": self._metrics,
        }

    async def handle(self, _: channel.Channel, op: str, args: Record) -> Record:
        """A `channel.Handler`."""
        if op not in self._ops:
            raise StoreError(f"the store has no operation {op!r}: run one release everywhere")
        try:
            return await self._ops[op](args)
        except KeyError as error:
            raise StoreError(f"{op!r} lacks the argument {error}: run one release everywhere") from error

    async def _hello(self, _: Record) -> Record:
        return {"port": self._port, "pid": os.getpid()}

    async def _metrics(self, args: Record) -> Record:
        self._counters.agents = records.text(args["text"], "metrics")
        return {}

    async def _open_round(self, args: Record) -> Record:
        layout = Layout.from_json(args["layout"])
        claim = Claim.from_json({"config": args["config"], "ranks": args["ranks"]})
        buddy = None if args.get("buddy") is None else BuddyClaim.from_json(args["buddy"])
        self._abandon_replication()
        slots = await asyncio.to_thread(self._arena.open_round, _whole(args, "round"), layout, claim, buddy)
        return {"slots": [str(path) for path in slots], **self._arena.sizes(), "replicated": _replicated(layout, buddy)}

    async def _seal(self, args: Record) -> Record:
        where = _whole(args, "round"), _whole(args, "step"), _whole(args, "slot"), args["values"], args["without"]
        return (await asyncio.to_thread(self._arena.seal, *where)).to_json()

    async def _replicate(self, args: Record) -> Record:
        """One at a time; what an older call has left is ended first, since it writes to the same places."""
        self._abandon_replication()
        async with self._one_replication:
            where = _whole(args, "round"), _whole(args, "step"), _whole(args, "slot")
            job = ReplicaJob(self._arena, self._peers, where, args["stores"])
            self._replicating = job
            try:
                done = await asyncio.to_thread(job.run)
                self._counters.received(done["num_bytes"])
                return done
            finally:
                job.cancel()

    def _abandon_replication(self) -> None:
        if self._replicating is not None:
            self._replicating.cancel()

    async def _commit(self, args: Record) -> Record:
        await asyncio.to_thread(self._arena.commit, _whole(args, "round"), _whole(args, "step"))
        return {}

    async def _inventory(self, _: Record) -> Record:
        await self._abandon({})
        return {"holdings": [holding.to_json() for holding in await asyncio.to_thread(self._arena.inventory)]}

    async def _pull(self, args: Record) -> Record:
        order = Order.from_json(args, self._arena.layout)
        job = PullJob(self._arena, self._peers, order, PATIENCE * self._peers.timeout_s)
        running = asyncio.ensure_future(asyncio.to_thread(job.run))
        self._pulls[job] = running
        running.add_done_callback(lambda _: self._ended(job))
        try:
            done = await asyncio.shield(running)
            self._counters.received(done["num_bytes"])
            return done
        finally:
            job.cancel()  # matters where this task was cancelled: the agent has gone

    async def _fetch(self, args: Record) -> Record:
        """Samples for the view: never waits long, since they are to be had elsewhere, too."""
        peers = replace(self._peers, timeout_s=min(self._peers.timeout_s, DATA_TIMEOUT_S))
        # in threads of its own: peers that stall must not hold up what the job's state waits for
        done = await asyncio.get_running_loop().run_in_executor(self._fetching, RowsJob(peers, args).run)
        self._counters.received(done["num_bytes"])
        return done

    def _ended(self, job: PullJob) -> None:
        running = self._pulls.pop(job)
        if not running.cancelled():
            running.exception()  # whoever asked may have gone

    async def _abandon(self, _: Record) -> Record:
        """A new round has other plans: end what is under way, and give back its memory."""
        self._abandon_replication()
        for job in self._pulls:
            job.cancel()
        if self._pulls:
            await asyncio.wait(self._pulls.values(), timeout=ABANDON_S)
        return {}

    async def _digests(self, args: Record) -> Record:
        groups, checksums = await asyncio.to_thread(self._arena.alike, _whole(args, "round"), _whole(args, "step"))
        return {"digests": digests(groups, checksums)}

    async def _checksums(self, args: Record) -> Record:
        groups, checksums = await asyncio.to_thread(self._arena.alike, _whole(args, "round"), _whole(args, "step"))
        places = groups.get(records.text(args["key"], "the key of a group"), ())
        return {"checksums": [[fqn, region.to_json(), checksums[fqn, region]] for fqn, region in places]}

    async def _progress(self, _: Record) -> Record:
        going = [job.progress for job in self._pulls]
        return {"num_bytes": sum(p.num_bytes for p in going), "total_bytes": sum(p.total_bytes for p in going)}

    async def _index(self, args: Record) -> Record:
        return {"path": str(self._arena.index_path(SnapshotId.from_json(args["snapshot"])))}

    async def _layout(self, args: Record) -> Record:
        digest = records.text(args["digest"], "a digest")
        layout = self._arena.layout(digest)
        if layout is None:
            layout = await asyncio.to_thread(self._peers.layout, digest, args["peers"])
        return {"layout": layout.to_json()}


def _replicated(layout: Layout, buddy: BuddyClaim | None) -> bool:
    """Whether any node of the round owes anything: then commits take their time."""
    return buddy is not None and any(buddies(layout, buddy.config, buddy.workers, buddy.replicas))


def _whole(args: Record, name: str) -> int:
    return records.whole(args[name], f"the argument {name!r}")


async def serve(config: Config) -> None:
    """Run until killed: whatever is on disk is whole at any moment, so there is nothing to do at the end.

    Raises StoreError when an address cannot be had.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle: the state outlives the workers
    arena = Arena.open(config.folder, config.limit_bytes)
    counters = Counters()
    server_tls, client_tls = (config.tls.server(), config.tls.client()) if config.tls else (None, None)
    shelf = Shelf(config.folder.parent / "extents")
    peer_server = PeerServer(arena, config.token.encode(), config.timeout_s, counters, server_tls, shelf)
    # Killed and started again, it must be where its peers know it to be.
    remembered = config.folder / "port"
    port = peer_server.start(config.host, int(remembered.read_text()) if remembered.exists() else 0)
    remembered.write_text(str(port))
    control = Control(arena, Peers(config.token, config.timeout_s, client_tls), port, counters)
    server, _ = await channel.serve(f"unix:{config.socket}", control.handle)
    await server.serve_forever()


def main() -> int:
    """Entry of the store's process. Returns its exit code."""
    logging.basicConfig(level=logging.WARNING, format="tenplexrun store: %(message)s")
    try:
        asyncio.run(serve(Config.parse(sys.argv[1] if len(sys.argv) == 2 else "")))
    except TenplexError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
