"""The command line of `tenplexrun` as one checked value."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenplexrun.core.forming import impossible
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.errors import UsageError
from tenplexrun.flags import parser


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The dataset whose view is open before the workers start, for scripts that only read files."""

    dataset: str
    global_batch: int
    micro_batch: int
    seed: int


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds, in the order in which they may run out (checked): a lease, a stop, a rendezvous."""

    lease_s: float = 5.0
    join_window_s: float = 3.0
    grace_s: float = 30.0
    rendezvous_s: float = 600.0

    def __post_init__(self) -> None:
        if not 2 <= self.lease_s <= self.rendezvous_s:
            raise UsageError(
                f"lease of {self.lease_s:g} s and join_timeout of {self.rendezvous_s:g} s are in the wrong order; "
                f"need 2 <= lease <= join_timeout (--rdzv-conf)"
            )
        if min(self.join_window_s, self.grace_s) < 0:
            raise UsageError("last_call_timeout and --shutdown-timeout cannot be negative")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What one agent was asked to run. `entry`: the command is a script path, a module, or an executable."""

    command: tuple[str, ...]
    entry: str
    min_nodes: int
    max_nodes: int
    num_workers: int
    sizes: ParallelConfig
    run_id: str
    backend: str
    endpoint: str | None
    node_rank: int | None
    local_addr: str | None
    max_restarts: int
    role: str
    snapshot_every: int
    data: DataSpec | None
    view_mode: str
    secret_file: str
    log_dir: str | None
    events: str | None
    timeouts: Timeouts


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> JobSpec:
    """The job that a command line describes. Raises UsageError, one line, for whatever cannot be right."""
    args = parser().parse_args(argv)
    if args.script is None:
        raise UsageError("no script given; usage: tenplexrun [flags] train.py [its flags]")
    entry = "module" if args.module else "exec" if args.no_python else "path"
    if entry == "path" and not os.path.isfile(args.script):
        raise UsageError(f"there is no script {args.script!r} here; give a path, or -m for a module")
    min_nodes, max_nodes = _nnodes("1:1" if args.standalone else args.nnodes)
    num_workers = _num_workers(args.nproc_per_node)
    sizes = _sizes(args)
    reason = impossible(sizes, num_workers, min_nodes, max_nodes)
    if reason is not None:
        raise UsageError(reason)
    if args.max_restarts < 0:
        raise UsageError("--max-restarts cannot be negative")
    if args.snapshot_every < 1:
        raise UsageError("--snapshot-every is a whole number of steps of at least 1")
    backend, endpoint = _meeting(args)
    return JobSpec(
        command=(args.script, *args.script_args),
        entry=entry,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        num_workers=num_workers,
        sizes=sizes,
        run_id=_run_id(args.rdzv_id),
        backend=backend,
        endpoint=endpoint,
        node_rank=args.node_rank,
        local_addr=args.local_addr,
        max_restarts=args.max_restarts,
        role=args.role,
        snapshot_every=args.snapshot_every,
        data=_data(args),
        view_mode=args.view,
        secret_file=args.secret_file or os.path.join(environ.get("HOME", "/"), ".tenplexrun", "secret"),
        log_dir=args.log_dir,
        events=args.events,
        timeouts=_timeouts(args),
    )


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
    if text in ("auto", "cpu", "gpu", "xpu"):
        gpus = sum(os.path.exists(f"/dev/nvidia{index}") for index in range(64))
        if text in ("gpu", "xpu") and not gpus:
            raise UsageError(f"--nproc-per-node {text}: this node shows no such device; give a number")
        return gpus if text != "cpu" and gpus else os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--nproc-per-node {text!r} is neither a whole number of at least 1 nor auto, cpu or gpu")
    return int(text)


def _sizes(args: argparse.Namespace) -> ParallelConfig:
    try:
        return ParallelConfig(pp=args.pp, dp=1, cp=args.cp, ep=args.ep, tp=args.tp)
    except ValueError as error:
        raise UsageError(f"impossible layout: {error}") from None


def _meeting(args: argparse.Namespace) -> tuple[str, str | None]:
    """The backend, and the endpoint if one is named."""
    if args.standalone:
        return "c10d", None
    backend = args.rdzv_backend or "c10d"
    if backend == "static" and args.rdzv_endpoint is None:
        return backend, f"{args.master_addr}:{args.master_port}"
    endpoint = args.rdzv_endpoint
    if endpoint is None:
        if backend.startswith("etcd"):
            raise UsageError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT of the etcd that runs")
        return backend, None
    host, separator, port = endpoint.rpartition(":")
    if not separator:
        host, port = endpoint, "29400" if backend == "c10d" else "2379"
    if not host or not port.isdigit():
        raise UsageError(f"--rdzv-endpoint {endpoint!r} is not HOST:PORT")
    return backend, f"{host}:{port}"


def _run_id(text: str) -> str:
    if not text or any(not (c.isalnum() or c in "-_.") for c in text):
        raise UsageError(f"--rdzv-id {text!r}: use letters, digits, '-', '_' and '.'")
    return text


def _data(args: argparse.Namespace) -> DataSpec | None:
    if args.data is None:
        return None
    if args.global_batch is None or args.global_batch < 1:
        raise UsageError("--data needs --global-batch ROWS of at least 1: the order deals rows to steps")
    return DataSpec(args.data, args.global_batch, args.micro_batch or args.global_batch, args.data_seed)


def _timeouts(args: argparse.Namespace) -> Timeouts:
    known = {"join_timeout": "rendezvous_s", "last_call_timeout": "join_window_s", "lease": "lease_s"}
    given: dict[str, float] = {"grace_s": args.shutdown_timeout}
    for pair in filter(None, args.rdzv_conf.split(",")):
        name, _, value = pair.partition("=")
        if name.strip() not in known:
            continue  # torchrun's other settings have no meaning here
        try:
            given[known[name.strip()]] = float(value)
        except ValueError:
            raise UsageError(f"--rdzv-conf {name.strip()}={value!r} is not a number of seconds") from None
    return Timeouts(**given)
