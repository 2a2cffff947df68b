"""The servers of an etcd cluster, and changes of them (v3 API)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tenplexrun.agent.etcd import PLAIN, REQUEST_TIMEOUT_S, Unavailable
from tenplexrun.agent.etcd_v3 import EtcdV3, NotFoundError, V3Server
from tenplexrun.errors import CoordinationError


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of etcd's list. `name` is "" and `endpoint` None until it has started. `peer`: its URL for servers."""

    id: str
    name: str
    peer: str
    endpoint: str | None
    voter: bool


class Members:
    """Asks through `etcd`; all methods raise CoordinationError."""

    def __init__(self, etcd: EtcdV3) -> None:
        self.etcd = etcd

    async def list(self) -> list[Listed]:
        """As the server that is asked knows it: that needs no majority."""
        answer = await self.etcd.call("cluster/member/list", {})
        return [_listed(member) for member in answer["members"]]

    async def leader(self) -> str:
        """ "" while there is none."""
        answer = await self.etcd.call("maintenance/status", {})
        return str(answer.get("leader", ""))

    async def add(self, peer: str, learner: bool) -> Listed:
        """Add a server that will be at this URL. Repeating it, after an answer that was lost, is safe."""
        try:
            answer = await self.etcd.call("cluster/member/add", {"peerURLs": [peer], "isLearner": learner})
            return _listed(answer["member"])
        except CoordinationError:
            found = [listed for listed in await self.list() if listed.peer == peer]
            if not found:
                raise
            return found[0]

    async def remove(self, id: str) -> None:
        """That it is not there any more is fine. Its process ends by itself."""
        try:
            await self.etcd.call("cluster/member/remove", {"ID": id})
        except CoordinationError as error:
            if not isinstance(error.__cause__, NotFoundError):
                raise

    async def promote(self, id: str) -> None:
        """Give a learner its vote. etcd refuses while it lags behind."""
        await self.etcd.call("cluster/member/promote", {"ID": id})

    async def transfer(self, to: str) -> None:
        """Let another server lead; only the leader itself can do that."""
        leader = await self.leader()
        endpoint = next((listed.endpoint for listed in await self.list() if listed.id == leader), None)
        if endpoint is None:
            raise CoordinationError("no server of the etcd leads now")
        server = V3Server(endpoint, 2 * REQUEST_TIMEOUT_S, PLAIN, {})
        try:
            await asyncio.to_thread(server.call, "maintenance/transfer-leadership", {"targetID": to})
        except Unavailable as error:
            raise CoordinationError(f"the etcd at {endpoint} does not answer ({error})") from error


def _listed(member: Mapping[str, Any]) -> Listed:
    clients = member.get("clientURLs", [])
    endpoint = urlsplit(clients[0]).netloc if clients else None
    voter = not member.get("isLearner", False)
    return Listed(str(member["ID"]), member.get("name", ""), member["peerURLs"][0], endpoint, voter)
