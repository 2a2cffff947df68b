"""Links between agents: every node reports sealed snapshots to the decider, which answers with commits.

A link that breaks is also the fastest news of a death: where the other end's port then refuses connections, its
agent is gone, and nobody waits for the lease.

    hello {token, node, link}   -> host_etcd {learner}
    sealed {round, step, held, committed, last, digests}   -> replicate {round, step}   -> committed {round, step,
    checkpoint}   -> checksums {round, step, key}
    written {round, step, part | error}

`last`: no more steps will come. `digests`: of what other nodes have, too, see `core.replicas`; where they differ, the
decider asks for `checksums`. `checkpoint`: null, or a tag, and each node writes its part of a durable checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tenplexrun import channel
from tenplexrun.agent.agreement import Agreement
from tenplexrun.agent.durable import Collector
from tenplexrun.channel import Channel
from tenplexrun.core.commits import Commits, News
from tenplexrun.core.replicas import Comparison, Split
from tenplexrun.core.rounds import Round
from tenplexrun.errors import TenplexError, WireError
from tenplexrun.tasks import end
from tenplexrun.tls import Tls

PROBE_TIMEOUT_S = 1.0
RETRY_S = 0.2
FIRST_PROBE_S, LAST_PROBE_S = 0.02, 1.0
INVITE_TIMEOUT_S, CHECKSUMS_TIMEOUT_S = 40.0, 20.0

OnCommit = Callable[[int, int, "str | None"], Awaitable[None]]
OnLost = Callable[[str, str], Awaitable[None]]
OnReplicate = Callable[[int, int], None]
OnInvite = Callable[[bool], Awaitable[None]]


async def _ignore(*_: object) -> None:
    """Nobody is bound yet."""


async def is_gone(address: str) -> bool:
    """Whether nobody listens there any more. Silence proves nothing: then the lease judges."""
    host, port = channel.split_host_port(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_TIMEOUT_S)
        writer.close()
        return False
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False


@dataclass(slots=True)
class _Peer:
    node: str
    link: str


class Links:
    """Both ends. `bind` names who is told."""

    def __init__(self, node: str, token: str, tls: Tls | None = None) -> None:
        self.node, self.address = node, ""
        self._token = token
        self._server_tls = tls.server() if tls else None
        self._client_tls = tls.client() if tls else None
        self._on_commit: OnCommit = _ignore
        self._on_lost: OnLost = _ignore
        self.on_replicate: OnReplicate = lambda round_number, step: None
        """Called on every node once all have sealed a snapshot of which some owe parts to others."""
        self.on_invite: OnInvite = _ignore
        """Called where the decider wants a server of the run's etcd; `learner`: without a vote at first."""
        self._peers: dict[Channel, _Peer] = {}
        self.agreement: Agreement | None = None
        self._commits, self._comparison = Commits(-1), Comparison()
        self._end = (-1, -1)  # round and step of the last snapshot
        self._collector: Collector | None = None
        self._followed: str | None = None
        self._decider: Channel | None = None
        self._last_report: dict[str, Any] | None = None
        self._committed = (-1, -1)  # round, step
        self._follower: asyncio.Task[None] | None = None
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def bind(self, on_commit: OnCommit, on_lost: OnLost, collector: Collector | None = None) -> None:
        """`on_commit(round, step, checkpoint)` runs on every node; `on_lost(node, link)` when an agent is proved gone.
        `collector`: of durable checkpoints, for when this node decides."""
        self._on_commit, self._on_lost, self._collector = on_commit, on_lost, collector

    async def start(self, host: str) -> str:
        """Listen on a port that the system assigns. Returns the address."""
        address = channel.join_host_port(host, 0)
        self._server, self.address = await channel.serve(address, self._serve, tls=self._server_tls)
        return self.address

    async def close(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        self._followed = None
        await end([*self._tasks, *filter(None, [self._follower])])
        for peer in [*self._peers, *filter(None, [self._decider])]:
            await peer.close()

    # --- every node -----------------------------------------------------------------------------------------------

    def seen(self, round_: Round) -> None:
        """The round as it is now: whom to follow, and what to expect of whom if this node decides."""
        self.follow(round_.decider)
        mine = round_.phase == "running" and round_.decider == self.address
        if self._collector is not None:
            self._collector.expect(round_, mine)
        if mine:
            self.expect(round_.number, round_.nodes)

    def follow(self, decider: str) -> None:
        """Keep a link to the decider that listens at this address."""
        if decider == self._followed:
            return
        self._followed = decider
        if self._follower is not None:
            self._follower.cancel()
        self._follower = asyncio.ensure_future(self._keep(decider))

    async def rename(self, node: str) -> None:
        """Go on as another node, which has reported nothing yet: the decider must hear the name again."""
        self.node, self._last_report, self._followed = node, None, None
        if self._follower is not None:
            self._follower.cancel()
        if self._decider is not None:
            await self._decider.close()

    def ends(self, round_number: int, step: int) -> None:
        """The snapshot of this step is this node's last one."""
        self._end = (round_number, step)

    def report(self, round_number: int, step: int, held: bool = True, digests: Mapping[str, str] | None = None) -> None:
        """This node has sealed its part of a snapshot; `held`: and has what it owes of it. Said again to whoever
        decides later, with the newest commit heard of: not all may have heard of that."""
        committed = self._committed[1] if self._committed[0] == round_number else None
        last = self._end == (round_number, step)
        self._last_report = {"round": round_number, "step": step, "held": held, "committed": committed, "last": last}
        self._last_report["digests"] = digests or {}
        if self._decider is not None:
            self._decider.notify("sealed", **self._last_report)

    def written(self, round_number: int, step: int, record: dict[str, Any]) -> None:
        """What became of this node's part of a durable checkpoint: {"part"} or {"error"}."""
        if self._decider is not None:
            self._decider.notify("written", round=round_number, step=step, **record)

    async def _keep(self, address: str) -> None:
        while address == self._followed:
            with contextlib.suppress(TenplexError):
                link = await channel.connect(address, self._from_decider, PROBE_TIMEOUT_S, self._client_tls)
                try:
                    hello = await link.request("hello", 5.0, token=self._token, node=self.node, link=self.address)
                    self._decider = link
                    if self._last_report is not None:
                        link.notify("sealed", **self._last_report)
                    await link.wait_closed()
                    self._probe(str(hello["node"]), address)
                finally:
                    self._decider = None
                    await link.close()
            await asyncio.sleep(RETRY_S)

    async def _from_decider(self, _link: Channel, op: str, args: dict[str, Any]) -> dict[str, Any] | None:
        if op == "checksums" and self.agreement is not None:
            where = int(args["round"]), int(args["step"]), str(args["key"])
            return {"checksums": await self.agreement.checksums(*where)}
        if op == "replicate":
            self.on_replicate(int(args["round"]), int(args["step"]))
        elif op == "host_etcd":
            await self.on_invite(bool(args["learner"]))
        elif op == "committed":
            self._committed = int(args["round"]), int(args["step"])
            if self._last_report is not None and self._last_report["round"] == self._committed[0]:
                self._last_report["committed"] = self._committed[1]
            await self._on_commit(*self._committed, args["checkpoint"])
        else:
            raise WireError(f"the decider has no business to ask {op!r}")
        return None

    # --- the decider ----------------------------------------------------------------------------------------------

    def expect(self, round_number: int, nodes: Iterable[str]) -> None:
        """A round runs with these nodes: their reports make its commits."""
        commits = self._commits_of(round_number)
        self._announce(commits, commits.expect(nodes))
        self._comparison.expected = frozenset(nodes)
        self._look_into(self._comparison.settle())

    async def _serve(self, link: Channel, op: str, args: dict[str, Any]) -> dict[str, Any] | None:
        if op == "hello":
            if not hmac.compare_digest(str(args.get("token", "")).encode(), self._token.encode()):
                raise WireError("this job's token is missing or wrong; all nodes need the same --secret-file")
            self._peers[link] = _Peer(str(args["node"]), str(args["link"]))
            self._spawn(self._until_closed(link))
            return {"node": self.node}
        peer = self._peers.get(link)
        if op not in ("sealed", "written") or peer is None:
            raise WireError(f"no such message on a link, or no token was shown: {op!r}")
        if op == "written":
            if self._collector is not None:
                self._collector.part(peer.node, int(args.pop("round")), int(args.pop("step")), args)
            return None
        commits = self._commits_of(int(args["round"]))
        known = None if args["committed"] is None else int(args["committed"])
        if args["last"] and self._collector is not None:
            self._collector.end = (commits.round, int(args["step"]))
        news = commits.report(peer.node, int(args["step"]), bool(args["held"]), known)
        if news == News():  # said again after a break: so is the answer
            self._tell(commits, commits.known, [link])
        self._announce(commits, news)
        if commits is self._commits:
            self._look_into(self._comparison.report(peer.node, int(args["step"]), args["digests"]))
        return None

    def _look_into(self, splits: Iterable[Split]) -> None:
        if self.agreement is not None:
            for split in splits:
                self._spawn(self.agreement.look_into(self._commits.round, split, self._checksums))

    async def _checksums(self, node: str, round_number: int, step: int, key: str) -> list[Any]:
        """What a node has. Raises what it raised."""
        link = next((link for link, peer in self._peers.items() if peer.node == node), None)
        if link is None:
            raise WireError(f"no link to {node}")
        answer = await link.request("checksums", CHECKSUMS_TIMEOUT_S, round=round_number, step=step, key=key)
        return list(answer["checksums"])

    def _commits_of(self, round_number: int) -> Commits:
        if round_number > self._commits.round:
            self._commits, self._comparison = Commits(round_number), Comparison()
        # What is said of an older round is counted nowhere.
        return self._commits if round_number == self._commits.round else Commits(round_number)

    def _announce(self, commits: Commits, news: News) -> None:
        tag = None
        if self._collector is not None and news.commit is not None and news.commit > commits.heard:
            tag = self._collector.begin(commits.round, news.commit, self.linked())
        self._tell(commits, news, self._peers, tag)

    def _tell(self, commits: Commits, news: News, links: Iterable[Channel], checkpoint: str | None = None) -> None:
        for link in links:
            if news.commit is not None:
                link.notify("committed", round=commits.round, step=news.commit, checkpoint=checkpoint)
            if news.replicate is not None:
                link.notify("replicate", round=commits.round, step=news.replicate)

    async def _until_closed(self, link: Channel) -> None:
        await link.wait_closed()
        peer = self._peers.pop(link)
        if self._collector is not None:
            self._collector.lost(peer.node)
        self._probe(peer.node, peer.link)

    async def invite(self, address: str, learner: bool) -> None:
        """Have the node whose link listens at this address host a server of the etcd. Raises what it raised."""
        if address == self.address:
            await self.on_invite(learner)
            return
        link = next((link for link, peer in self._peers.items() if peer.link == address), None)
        if link is None:
            raise WireError(f"no link to {address}")
        await link.request("host_etcd", INVITE_TIMEOUT_S, learner=learner)

    def linked(self) -> set[str]:
        """The nodes that have a link to this one."""
        return {self.node, *(peer.node for peer in self._peers.values())}

    # --- both -----------------------------------------------------------------------------------------------------

    def _probe(self, node: str, address: str) -> None:
        if node != self.node and not self._closing:
            self._spawn(self._report_if_gone(node, address))

    async def _report_if_gone(self, node: str, address: str) -> None:
        """A process that dies closes its sockets one by one: when its link has broken, its port may still answer."""
        pause = FIRST_PROBE_S
        while not (gone := await is_gone(address)) and pause < LAST_PROBE_S:
            await asyncio.sleep(pause)
            pause *= 2
        if gone:
            await self._on_lost(node, address)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
