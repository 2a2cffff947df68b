"""The checkpoint process of a node: has torch imported, reads slots and writes files, so that training need not wait.

Started as `checkpointer.main()` with JSON: {"socket": path of its control socket}. It answers there (`channel`):

    newest   {home, origin, refused, claim: job | null}         -> {checkpoint: {url, step} | null, notes}
    load     {url, step, layout, config, ranks, groups, slot}   -> {step, consumed, values, without, num_bytes}
    take     {tag, index, layout, config, ranks: by node, me}   -> {num_bytes}        copy this node's share
    write    {url, number, tag, groups}                         -> a part's record    what was taken
    cancel   {}                                                 -> {}
    prepare  {url, tag, layout, parts}                          -> {}
    publish  {home, url, step, tag, files, keep, jobs, last}    -> {removed: [step], problem: text | null}
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenplexrun import channel
from tenplexrun.core import records
from tenplexrun.core.layout import Layout
from tenplexrun.errors import CheckpointError, TenplexError
from tenplexrun.worker import folders, shares
from tenplexrun.worker.folders import Folder

if TYPE_CHECKING:
    from tenplexrun.worker import loading, saving

Record = dict[str, Any]
log = logging.getLogger(__name__)
NICE = 5  # training goes first


class Checkpointer:
    """One operation a method; blocking work runs in threads. At most one share is held at a time.

    torch is imported while nobody waits for it: to say that there is no checkpoint, and to copy, takes none.
    """

    def __init__(self) -> None:
        self._share: tuple[str, shares.Share] | None = None
        self._cancelled = threading.Event()
        self._ops: dict[str, Callable[[Record], Record]] = {
            "load": self._load,
            "write": self._write,
            "prepare": self._prepare,
            "publish": self._publish,
        }
        self._imports = asyncio.ensure_future(asyncio.to_thread(import_torch))

    async def handle(self, _: channel.Channel, op: str, args: Record) -> Record:
        """A `channel.Handler`."""
        if op == "hello":
            return {}
        if op == "newest":
            return await self._newest(args)
        if op == "cancel":
            return self._cancel()
        if op == "take":
            return await asyncio.to_thread(self._take, args)
        await asyncio.shield(self._imports)
        return await asyncio.to_thread(self._ops[op], args)

    async def _newest(self, args: Record) -> Record:
        home = args["home"]
        problem = await asyncio.to_thread(folders.trial, home) if home else None
        if home and args["claim"] and not problem:
            await asyncio.to_thread(folders.claim, home, args["claim"])
        warned = [f"no checkpoint can be written to {home} ({problem}): mend that; training goes on"] if problem else []
        candidates = await asyncio.to_thread(all_candidates, home, args["origin"])
        if not candidates:
            return {"checkpoint": None, "notes": [*warned, f"there is no checkpoint yet in {home}"]}
        await asyncio.shield(self._imports)
        found, notes = await asyncio.to_thread(loading.newest, candidates, args["refused"])
        return {"checkpoint": found and asdict(found), "notes": warned + notes}

    def _load(self, args: Record) -> Record:
        layout, config = Layout.from_json(args["layout"]), records.config(args["config"])
        where = args["url"], args["step"], layout, config, args["ranks"]
        return asdict(loading.read(*where, args["groups"], Path(args["slot"])))

    def _take(self, args: Record) -> Record:
        index, layout = Path(args["index"]), Layout.from_json(args["layout"])
        self._cancel()
        try:
            share = shares.take(index, layout, records.config(args["config"]), args["ranks"], args["me"])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the snapshot cannot be copied: {error}") from error
        finally:
            index.unlink(missing_ok=True)
        self._share = (args["tag"], share)
        return {"num_bytes": sum(piece.num_bytes for piece, _ in share.pieces)}

    def _write(self, args: Record) -> Record:
        taken, cancelled = self._share, self._cancelled
        if taken is None or taken[0] != args["tag"]:
            raise CheckpointError("a later checkpoint is written instead")
        self._share = None
        return saving.write(taken[1], Folder(args["url"]), args["number"], args["tag"], args["groups"], cancelled)

    def _cancel(self) -> Record:
        """What is being written ends in an error."""
        self._cancelled.set()
        self._cancelled, self._share = threading.Event(), None
        return {}

    def _prepare(self, args: Record) -> Record:
        saving.prepare(Folder(args["url"]), args["tag"], Layout.from_json(args["layout"]), args["parts"])
        return {}

    def _publish(self, args: Record) -> Record:
        folders.check_owner(args["home"], args["jobs"])
        saving.publish(Folder(args["url"]), args["tag"])
        try:
            removed = saving.prune(Folder(args["home"]), args["step"], args["files"], args["keep"], args["last"])
        except CheckpointError as error:
            return {"removed": [], "problem": str(error)}
        return {"removed": removed, "problem": None}


def all_candidates(home: str | None, origin: str | None) -> list[tuple[int, str]]:
    """Those below `home`, then `origin`, which must be one or have some. Raises CheckpointError."""
    found = folders.candidates(home) if home else []
    if not found and origin is not None:
        found = folders.candidates(origin)
        if not found:
            raise CheckpointError(f"there is no checkpoint in {origin}: it has no {folders.METADATA}")
    return found


def import_torch() -> None:
    global loading, saving
    from tenplexrun.worker import loading, saving


async def serve(socket: str) -> None:
    """Run until killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    server, _ = await channel.serve(f"unix:{socket}", Checkpointer().handle)
    await server.serve_forever()


def main() -> int:
    """Entry of the process. Returns its exit code."""
    logging.basicConfig(level=logging.WARNING, format="tenplexrun checkpoints: %(message)s")
    os.nice(NICE)
    try:
        asyncio.run(serve(json.loads(sys.argv[1])["socket"]))
    except TenplexError as error:
        log.error("%s", error)
        return error.exit_code
    return 0
