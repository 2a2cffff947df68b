"""Joining a run: each launch has an epoch of its own, so that nothing of an older one is ever read."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from tenplexrun.core.rounds import Member, round_from_json, to_json
from tenplexrun.errors import CompareFailedError, UsageError
from tenplexrun.ports import Coordination, Lease

Gone = Callable[[str], Awaitable[bool]]


def run_folder(run_id: str) -> str:
    return f"runs/{run_id}"


def current_key(run_id: str) -> str:
    """Key whose value names the run's current epoch."""
    return f"{run_folder(run_id)}/current"


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
    content = await coordination.list(folder)
    if folder != own and not any(key.startswith(f"{folder}/members/") for key in content):
        return None
    round_ = content.get(f"{folder}/round")
    if round_ is not None and round_from_json(json.loads(round_.value)).phase == "ended":
        return None
    return folder


async def join_run(
    coordination: Coordination, run_id: str, member: Member, ttl_s: float, gone: Gone | None = None, own: str = ""
) -> tuple[str, Lease]:
    """Become a member of the run's open epoch, or of a new one. Returns the epoch's folder and the member's lease.

    `gone`: whether nobody listens at a member's link any more. A run of which that is true for all has been killed.
    `own`: the folder of a node that was fenced out and comes back.
    """
    document = json.dumps(to_json(member))
    while True:
        seen = await coordination.get(current_key(run_id))
        folder = await current_epoch(coordination, run_id, own)
        if folder is not None and (folder == own or not await _is_dead(coordination, folder, gone)):
            lease = await coordination.hold(f"{folder}/members/{member.node}", document, ttl_s)
            if await current_epoch(coordination, run_id) == folder:
                return folder, lease
            await lease.release()
            continue
        epoch = uuid.uuid4().hex[:12]
        folder = f"{run_folder(run_id)}/{epoch}"
        # The member first: an epoch without one counts as left behind, and anybody may replace it.
        lease = await coordination.hold(f"{folder}/members/{member.node}", document, ttl_s)
        try:
            if seen is None:
                await coordination.create(current_key(run_id), json.dumps({"epoch": epoch}))
            else:
                await coordination.swap(current_key(run_id), json.dumps({"epoch": epoch}), seen.token)
            return folder, lease
        except CompareFailedError:
            await lease.release()


async def _is_dead(coordination: Coordination, folder: str, gone: Gone | None) -> bool:
    members = await coordination.list(f"{folder}/members")
    links = [str(json.loads(found.value)["link"]) for found in members.values()]
    return gone is not None and all(await asyncio.gather(*map(gone, links)))


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
