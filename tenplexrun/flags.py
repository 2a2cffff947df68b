"""The flags of `tenplexrun` as one table: torchrun's (2.13) in both spellings, and ours. Each has variables, too.

A flag `--some-name` is also read from TENPLEXRUN_SOME_NAME, and torchrun's from PET_SOME_NAME; the command line wins,
then TENPLEXRUN_*. An empty variable counts as none. How our meaning of torchrun's flags compares: docs/torchrun.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tenplexrun.errors import UsageError


@dataclass(frozen=True, slots=True)
class Flag:
    """One row. `options` go to argparse; a `switch` takes no value; `short` is a one-letter spelling."""

    name: str
    help: str
    options: Mapping[str, Any] = field(default_factory=dict)
    short: str = ""
    switch: bool = False

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        return [*filter(None, [self.short]), *dict.fromkeys((self.name, f"--{self.dest}"))]


def filters(text: str) -> tuple[str, ...]:
    """Comma-separated words; two commas stand for one of a word."""
    mark = "\0"
    return tuple(word.replace(mark, ",") for word in text.replace(",,", mark).split(","))


def _whole(default: int | None = None, metavar: str = "N") -> dict[str, Any]:
    return {"type": int, "default": default, "metavar": metavar}


def _text(default: str | None = None, metavar: str | None = None) -> dict[str, Any]:
    return {"default": default, "metavar": metavar}


_FILTERS = {"type": filters, "default": (), "metavar": "WORD,..."}

TORCHRUN: dict[str, tuple[Flag, ...]] = {
    "nodes and workers (as torchrun)": (
        Flag("--nnodes", "nodes of the job (default 1)", _text("1:1", "N|MIN:MAX")),
        Flag("--nproc-per-node", "workers of this node (default 1)", _text("1", "N|auto|cpu|gpu|xpu")),
        Flag("--node-rank", "order of this node among all; equal ones by arrival (default 0)", _whole()),
        Flag("--max-restarts", "worker failures that the job survives (default 0)", _whole(0)),
        Flag("--role", "a name for the workers of this node, seen in their environment", _text("default")),
        Flag("--virtual-local-rank", "each worker sees one GPU, as device 0, and LOCAL_RANK=0", switch=True),
        Flag("--monitor-interval", "accepted; exits are seen at once anyway", {"type": float, "default": 0.1}),
        Flag(
            "--start-method",
            "accepted; workers are forked from a warm process",
            {"default": "spawn", "choices": ("spawn", "fork", "forkserver")},
        ),
        Flag("--numa-binding", "refused: bind with numactl or the scheduler", _text()),
    ),
    "stopping (as torchrun)": (
        Flag("--shutdown-timeout", "grace on every stop, seconds (default 30)", {"type": float, "metavar": "S"}),
        Flag(
            "--signals-to-handle",
            "signals that end this node's part (SIGINT and SIGQUIT: the job); SIGUSR1 and SIGUSR2, if not listed, "
            "are passed on to the workers (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
            _text("SIGTERM,SIGINT,SIGHUP,SIGQUIT", "NAME,..."),
        ),
    ),
    "rendezvous (as torchrun)": (
        Flag("--standalone", "one node with a private etcd", switch=True),
        Flag(
            "--rdzv-backend",
            "static and c10d: the node that the endpoint names hosts an etcd there; etcd: one runs there, its API is "
            "found out (etcd-v2, etcd-v3: this one)",
            _text("static", "NAME"),
        ),
        Flag(
            "--rdzv-endpoint", "where the nodes meet; none on a single node: a private etcd", _text("", "HOST:PORT,...")
        ),
        Flag("--rdzv-id", "name of the job", _text("none", "ID")),
        Flag(
            "--rdzv-conf",
            "join_timeout, last_call_timeout, lease: seconds; cert, key, cacert, user, password_file: of the etcd",
            _text("", "K=V,..."),
        ),
        Flag("--master-addr", "static, without an endpoint: its host", _text("127.0.0.1", "HOST")),
        Flag("--master-port", "static, without an endpoint: its port (default 29500)", _whole(metavar="PORT")),
        Flag("--local-addr", "address of this node as the others reach it", _text(None, "HOST")),
    ),
    "output of the workers (as torchrun)": (
        Flag("--log-dir", "folder for the output of the workers and the events", _text(None, "DIR")),
        Flag(
            "--redirects",
            "streams that go to files only: 1 stdout, 2 stderr, 3 both; for all, or by local rank: 0:1,12:3",
            _text("0", "STD"),
            short="-r",
        ),
        Flag("--tee", "streams that go to files and to the terminal", _text("0", "STD"), short="-t"),
        Flag("--local-ranks-filter", "local ranks that are shown on the terminal (default all)", _text("", "R,...")),
        Flag("--duplicate-stdout-filters", "lines with one of these words also go to a file of their own", _FILTERS),
        Flag("--duplicate-stderr-filters", "the same for stderr", _FILTERS),
        Flag("--event-log-handler", "null, or console: events on stderr, too", _text("null", "NAME")),
        Flag("--logs-specs", "refused: plug-ins of torchrun are not loaded", _text()),
    ),
    "the program (as torchrun)": (
        Flag("--module", "the script is a module, as in python -m", short="-m", switch=True),
        Flag("--no-python", "the script is an executable", switch=True),
        Flag("--run-path", "the script is a path, whatever --no-python says", switch=True),
    ),
}

OURS: dict[str, tuple[Flag, ...]] = {
    "parallelism (dp is what the nodes give)": (
        *(
            Flag(f"--{axis}", f"size of the mesh axis {axis} (default 1)", _whole(1))
            for axis in ("pp", "cp", "ep", "tp")
        ),
        Flag("--etp", "tensor parallelism of the experts (default 0: as --tp where it fits, else 1)", _whole(0)),
        Flag("--dp-shard", "HSDP: ranks that share one copy of the state (default 0: all of dp)", _whole(0)),
        Flag(
            "--mesh-order",
            "axes of the mesh, outermost first; tp is the last (default pp-dp-cp-tp)",
            _text("pp-dp-cp-tp", "A-B-C-D"),
        ),
    ),
    "state and data": (
        Flag(
            "--node-labels",
            "where this node stands, as rack=NAME: what it lacks comes from its own rack first",
            _text(None, "rack=NAME"),
        ),
        Flag(
            "--replicas",
            "distinct nodes that hold each part of a snapshot, so that one fewer may be lost at once; 1: no copies but "
            "those of data parallelism (default 2; all, if there are fewer)",
            _whole(2),
        ),
        Flag(
            "--replica-check",
            "what to do when nodes hold different bytes of what data parallelism should keep equal: warn (default), "
            "strict: also end the job with 76, or off",
            {"default": "warn", "choices": ("warn", "strict", "off")},
        ),
        Flag(
            "--state-files",
            "what a rank may write for one step below $TENPLEX_STATE_DIR, in bytes, or as 64M or 2G: for scripts whose "
            "state is files of their own (default 0: none are kept)",
            _text("0", "BYTES"),
        ),
        Flag(
            "--snapshot-every",
            "steps, or seconds as 30s, between snapshots in memory; auto: as often as costs 2% of the time (default 1)",
            _text("1", "N|Ns|auto"),
        ),
        Flag(
            "--checkpoint-dir",
            "folder or fsspec URL, the same on all nodes, for durable checkpoints in the format of "
            "torch.distributed.checkpoint; the newest one there is what a job starts from",
            _text(None, "URL"),
        ),
        Flag("--checkpoint-every", "steps (500) or seconds (600s) between them (default 600s)", _text(None, "N|Ns")),
        Flag("--checkpoint-keep", "how many of them are kept (default 2)", _whole(2)),
        Flag(
            "--checkpoint-from", "a checkpoint to start from while there is none of the job's own", _text(None, "URL")
        ),
        Flag(
            "--data",
            "dataset to show below $TENPLEX_DATA_DIR, for example bytes:DIR?glob=**/*.py&sample_bytes=129",
            _text(None, "SPEC"),
        ),
        Flag("--global-batch", "rows of a step; with --data", _whole(metavar="ROWS")),
        Flag("--micro-batch", "rows of a micro-batch; with --data (default: all)", _whole(metavar="ROWS")),
        Flag("--data-seed", "seed of the order; with --data (default 0)", _whole(0)),
        Flag(
            "--view", "how the data is shown (default auto)", {"default": "auto", "choices": ("auto", "fuse", "farm")}
        ),
        Flag(
            "--view-window",
            "how much of a rank's data is fetched ahead where this node lacks it, and, without FUSE, written as packed "
            "files for each round; the same on all nodes (default 256M)",
            _text("256M", "BYTES"),
        ),
        Flag(
            "--data-memory",
            "how much of datasets this node keeps in shared memory; what no node has room for stays where it is "
            "(default auto: half of what is free)",
            _text("auto", "BYTES"),
        ),
        Flag(
            "--secret-file",
            "secret that the nodes of a job share (default ~/.tenplexrun/secret, made if missing)",
            _text(None, "PATH"),
        ),
        *(
            Flag(f"--tls-{name}", f"PEM file: {text}", _text(None, "FILE"))
            for name, text in (
                ("cert", "this node's certificate, for TLS between our own ports; with --tls-key and --tls-ca"),
                ("key", "its private key"),
                ("ca", "the authority that has signed the certificates of all nodes"),
            )
        ),
    ),
    "changing nodes": (
        Flag(
            "--max-churn",
            "how often nodes may come and go before the job ends; --max-restarts counts failures of workers apart "
            "(default: no limit)",
            _whole(),
        ),
    ),
    "to measure against": (
        Flag("--central", "state moves by way of one node, that of rank 0; only for measuring", switch=True),
        Flag(
            "--migrate-all",
            "every node fetches all that its ranks need, also what it has; only for measuring",
            switch=True,
        ),
    ),
    "workers that hang": (
        Flag(
            "--hang-timeout",
            "how long a worker may be stopped, or run no step to its end, before it counts as failed. auto (default): "
            "stopped 10 s or 10 steps, standing still 300 s or 20 steps, whichever is longer; SECONDS: for both; off",
            _text("auto", "auto|off|SECONDS"),
        ),
    ),
    "how workers start": (
        Flag("--cold-start", "each worker is a fresh interpreter: slower to start and restart", switch=True),
        Flag(
            "--preload",
            "module to import before workers are forked, for example transformers; may be repeated, or A,B",
            {"action": "extend", "type": lambda text: text.split(","), "default": [], "metavar": "MODULE"},
        ),
    ),
    "what is written": (
        Flag("--events", "file for the events of this node, a JSON object a line", _text(None, "PATH")),
    ),
}

WITHOUT_PET = ("--numa-binding", "--logs-specs")  # torchrun reads no variable for them
TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no")


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        near = [name for name in self._option_string_actions if unknown.startswith("--") and name.startswith(unknown)]
        hint = f"; write {near[0]} in full" if near else ""
        raise UsageError(f"{message}{hint}; see {self.prog} --help")


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of the command line, with the defaults that variables give. Raises UsageError naming a bad variable.

    Abbreviations of flags are refused: they would eat flags of the script.
    """
    root = _OneLineParser(
        prog="tenplexrun",
        allow_abbrev=False,
        description="Runs a training script on elastic nodes: what torchrun does, and the job goes on from memory "
        "when workers die and nodes come and go, at a new parallelism if need be.",
        epilog="Each flag --some-name is also read from the variable TENPLEXRUN_SOME_NAME, torchrun's from "
        "PET_SOME_NAME; the command line wins.",
    )
    for titles, prefixes in ((TORCHRUN, ("TENPLEXRUN_", "PET_")), (OURS, ("TENPLEXRUN_",))):
        for title, flags in titles.items():
            group = root.add_argument_group(title)
            for flag in flags:
                action: dict[str, Any] = {"action": "store_true"} if flag.switch else {}
                group.add_argument(*flag.spellings, help=flag.help.replace("%", "%%"), **flag.options, **action)
                mine = prefixes[:1] if flag.name in WITHOUT_PET else prefixes
                names = [prefix + flag.dest.upper() for prefix in mine]
                given = next((name for name in names if environ.get(name)), None)
                if given is not None:
                    root.set_defaults(**{flag.dest: _value(flag, given, environ[given])})
    root.add_argument("script", nargs="?", help="training script")
    root.add_argument("script_args", nargs=argparse.REMAINDER, help="everything after it is the script's")
    return root


def _value(flag: Flag, variable: str, text: str) -> Any:
    if flag.switch:
        word = text.strip().lower()
        if word not in TRUE + FALSE:
            raise UsageError(f"{variable}={text!r} is none of {', '.join(TRUE + FALSE)}")
        return word in TRUE
    choices = flag.options.get("choices")
    if choices and text not in choices:
        raise UsageError(f"{variable}={text!r} is none of {', '.join(choices)}")
    try:
        return flag.options.get("type", str)(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r} is no value for {flag.name}") from None
