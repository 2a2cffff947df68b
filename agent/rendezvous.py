"""Joining a run: each launch has an epoch of its own, so that nothing of an older one is ever read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tenplexrun.core.rounds import Member, Round, round_from_json, to_json
from tenplexrun.core.terms import Difference, differences
from tenplexrun.errors import CompareFailedError, RunGoneError, UsageError
from tenplexrun.ports import Coordination, KeyValue, Lease

RETRY_S = 0.2
Gone = Callable[[str], Awaitable[bool]]


def run_folder(run_id: str) -> str:
    return f"runs/{run_id}"


def current_key(run_id: str) -> str:
    """Key whose value names the run's current epoch."""
    return f"{run_folder(run_id)}/current"


@dataclass(frozen=True, slots=True)
class Charter:
    """What a node must have in common with those of the run. `proof`: see `token_proof`. `terms`: see `core.terms`, of
    the node on `host`."""

    proof: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)
    host: str = ""

    def current(self, epoch: str) -> str:
        """The value of `current_key`."""
        return json.dumps({"epoch": epoch, **asdict(self)})

    def check(self, run_id: str, current: KeyValue, note: Callable[[str], None]) -> None:
        """May this node join? `note` is told of what merely differs. Raises UsageError, one line."""
        record = json.loads(current.value)
        job = Charter(record["proof"], record["terms"], record["host"])
        if job.proof != self.proof:
            raise UsageError(f"the nodes of the run {run_id} have another secret; give all the same --secret-file")
        bad, unlike = differences(job.terms, self.terms)
        sides = f"[{self.host}] and on {job.host}, which began the run {run_id}"
        if bad:
            raise UsageError(f"flags differ between this node {sides}: {_listed(bad)}; give all nodes the same")
        if unlike:
            note(f"not the same on this node {sides}: {_listed(unlike)}")


def _listed(found: Sequence[Difference]) -> str:
    return ", ".join(map(str, found))


async def run_ids(coordination: Coordination) -> list[str]:
    """Names of all runs that there are records of."""
    keys = await coordination.list("runs")
    return sorted(key.split("/")[1] for key in keys if key.endswith("/current"))


async def current_epoch(coordination: Coordination, run_id: str, own: str = "") -> str | None:
    """Folder of the epoch that is open now: members live in it, and its last round has not ended.

    `own`: the folder of a caller that was a member. It is open without members, too: they were all taken for dead.
    """
    current = await coordination.get(current_key(run_id))
    if current is None:
        return None
    folder = f"{run_folder(run_id)}/{json.loads(current.value)['epoch']}"
    # A decider is a member: with one, a thousand nodes that join need not all list a thousand members.
    lives = folder == own or await coordination.get(f"{folder}/decider") or await coordination.list(f"{folder}/members")
    if not lives:
        return None
    round_ = await coordination.get(f"{folder}/round")
    if round_ is not None and round_from_json(json.loads(round_.value)).phase == "ended":
        return None
    return folder


async def join_run(
    coordination: Coordination,
    run_id: str,
    member: Member,
    ttl_s: float,
    gone: Gone | None = None,
    own: str = "",
    charter: Charter | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[str, Lease]:
    """Become a member of the run's open epoch, or of a new one. Returns the epoch's folder and the member's lease.

    `gone`: whether nobody listens at a member's link any more. A run of which that is true for all has been killed.
    `own`: the folder of a node that was fenced out and comes back: to this epoch or, with RunGoneError, to none.
    `charter`: raises UsageError where the run's is another: such a node would fail every round. `note`: see there.
    """
    charter = charter or Charter()
    document, patient_until = json.dumps(to_json(member)), time.monotonic() + ttl_s
    while True:
        seen = await coordination.get(current_key(run_id))
        folder = await current_epoch(coordination, run_id, own)
        if own and folder != own:
            raise RunGoneError(f"the run {run_id} has ended, or was started anew, while this node was away")
        if folder is None and time.monotonic() < patient_until and await _lives_on(coordination, run_id, gone):
            await asyncio.sleep(RETRY_S)
            continue
        if folder is not None and (folder == own or not await _is_dead(coordination, folder, gone)):
            if seen is not None:
                charter.check(run_id, seen, note)
            lease = await coordination.hold(f"{folder}/members/{member.node}", document, ttl_s)
            if await _kept(lease, _is_current(coordination, run_id, folder)):
                return folder, lease
            continue
        epoch = uuid.uuid4().hex[:12]
        current = charter.current(epoch)
        folder = f"{run_folder(run_id)}/{epoch}"
        # The member first: an epoch without one counts as left behind, and anybody may replace it.
        lease = await coordination.hold(f"{folder}/members/{member.node}", document, ttl_s)
        if await _kept(lease, _name_epoch(coordination, run_id, seen, current)):
            return folder, lease


async def _is_current(coordination: Coordination, run_id: str, folder: str) -> bool:
    return await current_epoch(coordination, run_id) == folder


async def _name_epoch(coordination: Coordination, run_id: str, seen: KeyValue | None, document: str) -> bool:
    """Whether the run's record is now this one, in place of what was `seen`."""
    try:
        if seen is None:
            await coordination.create(current_key(run_id), document)
        else:
            await coordination.swap(current_key(run_id), document, seen.token)
    except CompareFailedError:
        return False
    return True


async def _kept(lease: Lease, wanted: Awaitable[bool]) -> bool:
    """Whether the lease is wanted. Else, and where that can't be told, it is let go: refreshed for ever, it would stand
    in the way of the next try."""
    wish = False
    try:
        wish = await wanted
    finally:
        if not wish:
            await lease.release()
    return wish


@dataclass(frozen=True, slots=True)
class Held:
    """What a member knows of its run: the epoch's folder, the round as it has seen it last, its charter."""

    run_id: str
    folder: str
    round: KeyValue
    charter: Charter


async def resume(
    coordination: Coordination, held: Held, member: Member, ttl_s: float
) -> Lease | Literal["moved", "ended"]:
    """The key of a living member is gone: it ran out in an outage, somebody removed it, or the store came back empty.

    While the run is still in the round held, the member is written again under the same name. "moved": the others go on
    without this node. Raises RunGoneError.
    """
    run_id, known = held.run_id, round_from_json(json.loads(held.round.value))
    if known.phase == "ended":
        return "ended"
    if await coordination.get(current_key(run_id)) is None:
        await _restore(coordination, held)
    current = await coordination.get(current_key(run_id))
    if current is None or held.folder != f"{run_folder(run_id)}/{json.loads(current.value)['epoch']}":
        raise RunGoneError(f"the run {run_id} was started anew while etcd, or this node, was away; start it again")
    standing = await _standing(coordination, held.round.key, known, member.node)
    if standing is not None:
        return standing
    lease = await coordination.hold(f"{held.folder}/members/{member.node}", json.dumps(to_json(member)), ttl_s)
    standing = await _standing(coordination, held.round.key, known, member.node)  # or they went on at that moment
    if standing is None:
        return lease
    await lease.release()
    return standing


async def _restore(coordination: Coordination, held: Held) -> None:
    """An emptied store: every node puts back what it holds, and the first one wins. The round comes first, so that an
    epoch that is named is never without it."""
    current = held.charter.current(held.folder.rsplit("/", 1)[1])
    for key, text in ((held.round.key, held.round.value), (current_key(held.run_id), current)):
        with contextlib.suppress(CompareFailedError):
            await coordination.create(key, text)


async def _standing(coordination: Coordination, key: str, known: Round, node: str) -> Literal["moved", "ended"] | None:
    """What has become of the round that this node knows. None: it is still that one, whoever decides now."""
    found = await coordination.get(key)
    if found is None:
        raise RunGoneError("the run has ended, and its records are removed, while this node was away")
    round_ = round_from_json(json.loads(found.value))
    if round_.phase == "ended":
        return "ended"
    return "moved" if round_.without(node) or round_.number != known.number else None


async def _lives_on(coordination: Coordination, run_id: str, gone: Gone | None) -> bool:
    """Whether the nodes of an epoch without members are there: their keys have run out while etcd was down."""
    current = await coordination.get(current_key(run_id))
    if current is None or gone is None:
        return False
    found = await coordination.get(f"{run_folder(run_id)}/{json.loads(current.value)['epoch']}/round")
    if found is None or (round_ := round_from_json(json.loads(found.value))).phase == "ended":
        return False
    return not all(await asyncio.gather(*(gone(participant.store) for participant in round_.participants)))


async def _is_dead(coordination: Coordination, folder: str, gone: Gone | None) -> bool:
    """Whether nobody listens at any member's link. The decider is asked first: mostly it answers for all."""
    if gone is None:
        return False
    decider = await coordination.get(f"{folder}/decider")
    if decider is not None and not await gone(str(json.loads(decider.value)["link"])):
        return False
    members = await coordination.list(f"{folder}/members")
    links = [str(json.loads(found.value)["link"]) for found in members.values()]
    return all(await asyncio.gather(*map(gone, links)))


async def bury(coordination: Coordination, folder: str, node: str) -> None:
    """Remove what a node that is proved dead holds."""
    await coordination.delete(f"{folder}/members/{node}")
    held = await coordination.get(f"{folder}/decider")
    if held is not None and json.loads(held.value)["node"] == node:
        with contextlib.suppress(CompareFailedError):
            await coordination.delete(held.key, held.token)


async def leave_run(coordination: Coordination, folder: str, lease: Lease) -> bool:
    """End the membership. Returns whether others are left; the last one takes the epoch's records along."""
    await lease.release()
    if await coordination.list(f"{folder}/members"):
        return True
    await coordination.delete_folder(folder)
    return False


def read_secret(path: Path) -> bytes:
    """The job's secret; made if it is missing. Raises UsageError if others than the owner can read it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(os.urandom(32).hex().encode())
        except FileExistsError:
            pass
        if path.stat().st_mode & 0o077:
            raise UsageError(f"others can read the secret in {path}; chmod 600 it")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(
            f"cannot use the secret file {path}: {error.strerror}; name another with --secret-file"
        ) from None
    if len(secret) < 16:
        raise UsageError(f"the secret in {path} has fewer than 16 bytes; write a longer one")
    return secret


def launch_token(secret: bytes, run_id: str) -> str:
    """What every port of this run asks for: HMAC-SHA256 of the run's name under the secret, hex."""
    return hmac.new(secret, f"tenplexrun/{run_id}".encode(), hashlib.sha256).hexdigest()


def token_proof(token: str) -> str:
    """What the run's record tells of its token: enough to see that another node has the same, not to use it."""
    return hmac.new(token.encode(), b"tenplexrun/proof", hashlib.sha256).hexdigest()[:16]
