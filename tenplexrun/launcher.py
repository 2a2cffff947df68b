"""From a job's specification to its verdict on this node: starts the slow things first, then puts the node together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tenplexrun.agent import error_file
from tenplexrun.agent.cold import reason_for_cold_start
from tenplexrun.agent.events import EventLog
from tenplexrun.agent.learnt import LearntModules
from tenplexrun.agent.pool import Pool
from tenplexrun.agent.processes import Processes
from tenplexrun.agent.rendezvous import launch_token, read_secret
from tenplexrun.agent.script import Command
from tenplexrun.agent.signals import Signals
from tenplexrun.agent.sweep import make_node_dir, sweep
from tenplexrun.config import JobSpec
from tenplexrun.core.output import Output
from tenplexrun.core.rounds import Verdict

if TYPE_CHECKING:
    from tenplexrun.node import Node

KINDS = {"path": "script", "module": "module", "exec": "program"}


def run(spec: JobSpec) -> Verdict:
    """Take this node's part in the job, to the end."""
    return asyncio.run(_run(spec))


async def _run(spec: JobSpec) -> Verdict:
    began = time.monotonic()
    secret = read_secret(Path(spec.secret_file))
    sweep()
    node = uuid.uuid4().hex[:8]
    events = EventLog(node, _events_path(spec, node), spec.events_on_stderr)
    output = _output(spec, events)
    node_dir = make_node_dir(node)
    processes = await Processes.start(node_dir)
    try:
        pool = _pool(spec, processes, events)
        await pool.start()
        from tenplexrun.node import Node  # while the pool is busy importing, too

        parts = Node(spec, node, node_dir, processes, pool, events, launch_token(secret, spec.run_id), output, began)
        verdict = await _interruptible(parts)
        _tell(events, verdict)
        return verdict
    finally:
        await processes.close()
        events.close()


def _pool(spec: JobSpec, processes: Processes, events: EventLog) -> Pool:
    """The warm pool: with what is known of the script's imports, or cold where a warm one would be wrong."""
    command = Command(KINDS[spec.entry], spec.command, os.getcwd())  # type: ignore[arg-type]
    threads = {"OMP_NUM_THREADS": "1"} if spec.num_workers > 1 else {}
    reason = "asked for" if spec.cold_start else reason_for_cold_start(command, {**threads, **os.environ})
    if reason is not None:
        events.say(f"cold start, a restart will take seconds: {reason}")
        return Pool(processes, command, cold=True)
    known = LearntModules(command, os.environ)

    def on_learnt(modules: Sequence[str], refused: Mapping[str, str]) -> None:
        events.emit("learnt", modules=list(modules), refused=dict(refused))
        known.add(modules, refused)

    return Pool(processes, command, (*spec.preload, *known.modules), on_learnt=on_learnt)


async def _interruptible(node: Node) -> Verdict:
    """Run the node. A signal that comes before its agent is there to hear it ends the start."""
    got: list[signal.Signals] = []

    def on_signal(signum: signal.Signals) -> None:
        got.append(signum)
        running.cancel()

    running = asyncio.ensure_future(node.run(Signals(node.spec.signals, on_signal)))
    try:
        return await running
    except asyncio.CancelledError:
        if not got:
            raise
        return Verdict(128 + got[0], f"ended by {got[0].name} before the job began here")


def _output(spec: JobSpec, events: EventLog) -> Output:
    """Files that are asked for without a folder get one, as torchrun makes one."""
    output = spec.output
    if output.log_dir is None and output.needs_files:
        output = replace(output, log_dir=tempfile.mkdtemp(prefix="tenplexrun-logs-"))
        events.say(f"output of the workers in {output.log_dir}; choose with --log-dir")
    for note in spec.notes:
        events.say(note)
    return output


def _events_path(spec: JobSpec, node: str) -> Path | None:
    if spec.events is not None:
        return Path(spec.events)
    return None if spec.output.log_dir is None else Path(spec.output.log_dir) / f"events-{node}.jsonl"


def _tell(events: EventLog, verdict: Verdict) -> None:
    events.emit("verdict", code=verdict.code, message=verdict.message)
    events.say(f"ended with exit code {verdict.code}: {verdict.message}")
    if verdict.failure is not None:
        for line in error_file.describe(verdict.failure):
            print(f"    {line}", file=sys.stderr)
        error_file.hand_on(verdict.failure, os.environ)
