"""The command line of `tenplexrun` as one checked value."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenplexrun import devices, formats, rdzv
from tenplexrun.core.forming import impossible
from tenplexrun.core.output import PREFIX, STDERR, STDOUT, Output, Streams
from tenplexrun.core.pace import Interval
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Way
from tenplexrun.errors import UsageError
from tenplexrun.flags import parser
from tenplexrun.rdzv import Meeting, Timeouts
from tenplexrun.tls import Tls


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The dataset whose view is open before the workers start, for scripts that only read files."""

    dataset: str
    global_batch: int
    micro_batch: int
    seed: int


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Durable checkpoints: written to `home` (None: none are), `keep` of them stay; `origin` is one to start from."""

    home: str | None
    origin: str | None
    every: Interval
    keep: int


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What one agent was asked to run. `entry`: the command is a script path, a module, or an executable.

    `preload`: modules for the warm pool, which `cold_start` does without. `signals`: those that end this node's part.
    `notes`: what the person at the terminal should know.
    """

    command: tuple[str, ...]
    entry: str
    cold_start: bool
    preload: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    num_workers: int
    sizes: ParallelConfig
    run_id: str
    meeting: Meeting
    node_rank: int | None
    rack: str | None
    local_addr: str | None
    max_restarts: int
    max_churn: int | None
    role: str
    virtual_local_rank: bool
    signals: tuple[signal.Signals, ...]
    snapshot_every: Interval
    checkpoints: CheckpointSpec | None
    replicas: int
    replica_check: str
    way: Way
    state_bytes: int
    data: DataSpec | None
    view_mode: str
    view_window_bytes: int
    data_bytes: int | None
    secret_file: str
    tls: Tls | None
    output: Output
    events: str | None
    events_on_stderr: bool
    timeouts: Timeouts
    notes: tuple[str, ...]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> JobSpec:
    """The job that a command line describes. Raises UsageError, one line, for whatever cannot be right."""
    return check(parser(environ).parse_args(argv), environ)


def check(args: argparse.Namespace, environ: Mapping[str, str]) -> JobSpec:
    """The job that parsed flags describe. Raises UsageError, as `parse`."""
    _refuse(args)
    command, entry = _command(args, environ)
    min_nodes, max_nodes = _nnodes("1:1" if args.standalone else args.nnodes)
    num_workers = _num_workers(args.nproc_per_node)
    sizes = _sizes(args)
    reason = impossible(sizes, num_workers, min_nodes, max_nodes)
    if reason is not None:
        raise UsageError(reason)
    conf = rdzv.read_conf(args.rdzv_conf)
    meeting = rdzv.find_meeting(args, max_nodes, conf)
    return JobSpec(
        command=command,
        entry=entry,
        cold_start=args.cold_start,
        preload=tuple(args.preload),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        num_workers=num_workers,
        sizes=sizes,
        run_id=rdzv.run_id(args.rdzv_id, meeting),
        meeting=meeting,
        node_rank=args.node_rank,
        rack=_rack(args.node_labels),
        local_addr=args.local_addr and args.local_addr.strip("[]"),
        max_restarts=args.max_restarts,
        max_churn=args.max_churn,
        role=args.role,
        virtual_local_rank=args.virtual_local_rank,
        signals=_signals(args.signals_to_handle),
        snapshot_every=_every("--snapshot-every", args.snapshot_every),
        checkpoints=_checkpoints(args),
        replicas=args.replicas,
        replica_check=args.replica_check,
        way="central" if args.central else "migrate-all" if args.migrate_all else "least",
        state_bytes=_num_bytes("--state-files", args.state_files),
        data=_data(args),
        view_mode=args.view,
        view_window_bytes=_num_bytes("--view-window", args.view_window),
        data_bytes=None if args.data_memory == "auto" else _num_bytes("--data-memory", args.data_memory),
        secret_file=args.secret_file or os.path.join(environ.get("HOME", "/"), ".tenplexrun", "secret"),
        tls=_tls(args),
        output=_output(args, environ),
        events=args.events,
        events_on_stderr=args.event_log_handler == "console",
        timeouts=rdzv.timeouts(args, conf, environ),
        notes=_notes(num_workers, conf, environ),
    )


def _refuse(args: argparse.Namespace) -> None:
    """What needs a plug-in or machinery that is not here: in one line, before anything starts."""
    if args.numa_binding is not None:
        raise UsageError("--numa-binding is not supported; bind with numactl or your scheduler")
    if args.logs_specs is not None:
        raise UsageError("--logs-specs: plug-ins of torchrun are not loaded; see --log-dir, --redirects and --tee")
    if args.event_log_handler not in ("null", "console", "dynamic_rendezvous"):
        raise UsageError(
            f"--event-log-handler {args.event_log_handler!r}: handlers of plug-ins are not loaded; use null, console, "
            f"or --events FILE"
        )
    if args.max_restarts < 0:
        raise UsageError("--max-restarts cannot be negative")
    if args.node_rank is not None and args.node_rank < 0:
        raise UsageError("--node-rank cannot be negative")
    if args.max_churn is not None and args.max_churn < 0:
        raise UsageError("--max-churn cannot be negative")
    if args.state_files != "0" and (args.checkpoint_dir or args.checkpoint_from):
        raise UsageError("--state-files excludes --checkpoint-dir and --checkpoint-from: they are for job.state")
    if args.central and args.migrate_all:
        raise UsageError("--central and --migrate-all exclude each other")
    if args.replicas < 1:
        raise UsageError("--replicas is a number of nodes of at least 1")
    if not _has_cwd():
        raise UsageError("the folder that this was started in is gone; cd to one that exists")


def _tls(args: argparse.Namespace) -> Tls | None:
    files = [args.tls_cert, args.tls_key, args.tls_ca]
    if not any(files):
        return None
    if not all(files):
        raise UsageError("--tls-cert, --tls-key and --tls-ca go together: give all three, or none")
    tls = Tls(*map(os.path.abspath, files))
    tls.server()  # a file that cannot be used is better known now
    return tls


def _every(flag: str, text: str) -> Interval:
    try:
        return Interval.parse(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _command(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """argv and what kind of entry it is."""
    if args.script is None:
        raise UsageError("no script given; usage: tenplexrun [flags] train.py [its flags]")
    command = (args.script, *args.script_args)
    no_python = args.no_python and not args.run_path
    module = args.module and not args.run_path
    if no_python and module:
        raise UsageError("--no-python and --module contradict each other; give one")
    if no_python:
        return command, "exec"
    if not module and not os.path.exists(args.script):
        raise UsageError(f"there is no script {args.script!r} here; give a path, or -m for a module")
    if not module and Path(args.script).is_fifo():
        raise UsageError(f"the script {args.script!r} is a pipe, and every worker of every round reads it; give a file")
    python = environ.get("PYTHON_EXEC")
    if python and not args.run_path and os.path.realpath(python) != os.path.realpath(sys.executable):
        return (python, "-u", *(["-m"] if module else []), *command), "exec"  # torchrun's variable: another interpreter
    return command, "module" if module else "path"


def _has_cwd() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes {text!r} is neither N nor MIN:MAX") from None
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {text!r}: need 1 <= MIN <= MAX")
    return least, most


def _num_workers(text: str) -> int:
    if text in devices.WORDS:
        return devices.count(text)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc-per-node {text!r} is neither a whole number of at least 1 nor auto, cpu, gpu or xpu")
    return int(text)


def _sizes(args: argparse.Namespace) -> ParallelConfig:
    try:
        sizes = {name: getattr(args, name) for name in ("pp", "cp", "ep", "tp", "etp", "dp_shard")}
        order = tuple(args.mesh_order.split("-"))
        if order[-1:] != ("tp",):
            raise UsageError("--mesh-order ends with tp: a tensor-parallel group stays inside a node")
        return ParallelConfig.least({**sizes, "order": order})
    except ValueError as error:
        raise UsageError(f"impossible layout: {error}") from None


def _rack(labels: str | None) -> str | None:
    if labels is None:
        return None
    name, _, rack = labels.partition("=")
    if name != "rack" or not rack or "," in rack:
        raise UsageError(f"--node-labels {labels!r}: write rack=NAME; no other label means anything yet")
    return rack


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle: {name!r} is no signal that can be handled")
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))


def _output(args: argparse.Namespace, environ: Mapping[str, str]) -> Output:
    streams = {}
    for name in ("redirects", "tee"):
        try:
            streams[name] = Streams.parse(getattr(args, name))
        except ValueError as error:
            raise UsageError(f"--{name}: {error}") from None
    words = args.local_ranks_filter.split(",") if args.local_ranks_filter else []
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--local-ranks-filter {args.local_ranks_filter!r} is not a list of ranks like 0,1,2")
    if args.log_dir is not None and os.path.isfile(args.log_dir):
        raise UsageError(f"--log-dir {args.log_dir!r} is a file; name a folder")
    template = environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    return Output(
        log_dir=args.log_dir,
        redirects=streams["redirects"],
        tee=streams["tee"],
        shown=frozenset(map(int, words)) if words else None,
        filters={STDOUT: args.duplicate_stdout_filters, STDERR: args.duplicate_stderr_filters},
        prefix=PREFIX if template is None else template,
    )


def _checkpoints(args: argparse.Namespace) -> CheckpointSpec | None:
    every = _every("--checkpoint-every", args.checkpoint_every or "600s")
    if every == Interval():
        raise UsageError("--checkpoint-every takes a number of steps, as 500, or of seconds, as 600s")
    if args.checkpoint_keep < 1:
        raise UsageError("--checkpoint-keep is a whole number of at least 1")
    if "" in (args.checkpoint_dir, args.checkpoint_from):
        raise UsageError("--checkpoint-dir and --checkpoint-from name a folder or a URL; one is empty")
    if args.checkpoint_every and not args.checkpoint_dir:
        raise UsageError("--checkpoint-every needs --checkpoint-dir URL: without it no checkpoint is written")
    if args.checkpoint_dir is None and args.checkpoint_from is None:
        return None
    return CheckpointSpec(_url(args.checkpoint_dir), _url(args.checkpoint_from), every, args.checkpoint_keep)


def _url(text: str | None) -> str | None:
    """Paths do not depend on where a process runs."""
    protocol, _, rest = (text or "").partition("://")
    if rest:
        from fsspec import available_protocols  # only where it is needed: `--help` is to be quick

        if "::" not in protocol and protocol not in available_protocols():
            raise UsageError(f"{text}: fsspec knows no {protocol}://; give a path, or one of its protocols (s3, gs, …)")
    return text if text is None or "://" in text or "::" in text else os.path.abspath(text)


def _data(args: argparse.Namespace) -> DataSpec | None:
    if args.data is None:
        return None
    if args.global_batch is None or args.global_batch < 1:
        raise UsageError("--data needs --global-batch ROWS of at least 1: the order deals rows to steps")
    formats.open_dataset(args.data)  # what is wrong with it should be said now, not when all has been started
    return DataSpec(args.data, args.global_batch, args.micro_batch or args.global_batch, args.data_seed)


def _num_bytes(flag: str, text: str) -> int:
    """A number of bytes, with K, M, G or T for powers of 1,024."""
    digits, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or unit not in ("", "K", "M", "G", "T"):
        raise UsageError(f"{flag} {text!r} is no number of bytes such as 64M or 2G")
    return int(digits) << 10 * ("", "K", "M", "G", "T").index(unit)


def _notes(num_workers: int, conf: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    if num_workers > 1 and not environ.get("OMP_NUM_THREADS"):
        notes.append("OMP_NUM_THREADS=1 for each worker, as torchrun does; set it to tune")
    unknown = rdzv.unknown(conf)
    if unknown:
        notes.append(f"--rdzv-conf: {', '.join(unknown)} is not known here and changes nothing")
    return tuple(notes)
