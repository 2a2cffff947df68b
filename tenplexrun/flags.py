"""The flags of `tenplexrun`: torchrun's names in both spellings, and ours, as one table."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from tenplexrun.errors import UsageError

BACKENDS = ("c10d", "static", "etcd", "etcd-v2")

_Row = tuple[str, str, dict[str, Any]]

TABLE: dict[str, tuple[_Row, ...]] = {
    "nodes and workers (as torchrun)": (
        ("--nnodes", "nodes of the job (default 1)", {"default": "1:1", "metavar": "N|MIN:MAX"}),
        ("--nproc-per-node", "workers of this node (default 1)", {"default": "1", "metavar": "N|auto|cpu|gpu"}),
        ("--node-rank", "order of this node among all (default: of arrival)", {"type": int}),
        ("--max-restarts", "worker failures that the job survives (default 0)", {"type": int, "default": 0}),
        ("--role", "a name for the workers, seen in their environment", {"default": "default"}),
        ("--monitor-interval", "accepted; exits are seen at once anyway", {"type": float, "default": 0.1}),
        ("--shutdown-timeout", "grace on every planned stop, seconds (default 30)", {"type": float, "default": 30.0}),
        ("--local-addr", "address of this node as the others reach it", {}),
    ),
    "rendezvous (as torchrun)": (
        ("--standalone", "one node with a private etcd", {"action": "store_true"}),
        (
            "--rdzv-backend",
            "c10d (default) and static: the node that the endpoint names hosts an etcd there; etcd: it runs already",
            {"choices": BACKENDS},
        ),
        ("--rdzv-endpoint", "default: a private etcd, for others to join", {"metavar": "HOST:PORT"}),
        ("--rdzv-id", "name of the job", {"default": "none", "metavar": "ID"}),
        ("--rdzv-conf", "join_timeout, last_call_timeout, lease: seconds", {"default": "", "metavar": "K=V,..."}),
        ("--master-addr", "with --rdzv-backend static: host of the endpoint", {"default": "127.0.0.1"}),
        ("--master-port", "with --rdzv-backend static: its port", {"type": int, "default": 29500}),
    ),
    "parallelism (dp is what the nodes give)": tuple(
        (f"--{axis}", f"size of the mesh axis {axis} (default 1)", {"type": int, "default": 1, "metavar": "N"})
        for axis in ("pp", "cp", "ep", "tp")
    ),
    "state and data": (
        ("--snapshot-every", "steps between snapshots in memory (default 1)", {"type": int, "default": 1}),
        (
            "--data",
            "dataset to show below $TENPLEX_DATA_DIR, for example bytes:DIR?glob=**/*.py&sample_bytes=129",
            {"metavar": "SPEC"},
        ),
        ("--global-batch", "rows of a step; with --data", {"type": int, "metavar": "ROWS"}),
        ("--micro-batch", "rows of a micro-batch; with --data (default: all)", {"type": int, "metavar": "ROWS"}),
        ("--data-seed", "seed of the order; with --data (default 0)", {"type": int, "default": 0}),
        ("--view", "how the data is shown (default auto)", {"default": "auto", "choices": ("auto", "fuse", "farm")}),
        (
            "--secret-file",
            "secret that the nodes of a job share (default ~/.tenplexrun/secret, made if missing)",
            {"metavar": "PATH"},
        ),
    ),
    "what is written": (
        ("--log-dir", "folder for the output of the workers and the events", {"metavar": "DIR"}),
        ("--events", "file for the events of this node, a JSON object a line", {"metavar": "PATH"}),
    ),
    "the program": (
        ("--module", "the script is a module, as in python -m", {"action": "store_true"}),
        ("--no-python", "the script is an executable", {"action": "store_true"}),
    ),
}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line. Abbreviations are refused: they would eat flags of the script."""
    root = _OneLineParser(
        prog="tenplexrun",
        allow_abbrev=False,
        description="Runs a training script on elastic nodes: what torchrun does, and the job goes on from memory "
        "when workers die and nodes come and go, at a new parallelism if need be.",
    )
    for title, rows in TABLE.items():
        group = root.add_argument_group(title)
        for name, text, options in rows:
            spellings = ["-m"] if name == "--module" else []
            spellings += dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
            group.add_argument(*spellings, help=text.replace("%", "%%"), **options)
    root.add_argument("script", nargs="?", help="training script")
    root.add_argument("script_args", nargs=argparse.REMAINDER, help="everything after it is the script's")
    return root
