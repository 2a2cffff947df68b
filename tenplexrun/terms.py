"""A node's flags as `core.terms` compares them between nodes."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from tenplexrun.config import JobSpec
from tenplexrun.core.terms import NONE


def terms_of(spec: JobSpec) -> dict[str, str]:
    """Of each flag that all nodes should have alike, and of the script, what this node was given."""
    checkpoints, data, sizes = spec.checkpoints, spec.data, spec.sizes
    script, *arguments = spec.command
    terms: dict[str, object] = {
        **{f"--{axis}": getattr(sizes, axis) for axis in ("pp", "cp", "ep", "tp", "etp")},
        "--dp-shard": sizes.dp_shard,
        "--mesh-order": "-".join(sizes.order),
        "--snapshot-every": spec.snapshot_every,
        "--state-files": spec.state_bytes,
        "--view-window": spec.view_window_bytes,
        "--replicas": spec.replicas,
        "--replica-check": spec.replica_check,
        "--max-restarts": spec.max_restarts,
        "--nnodes": f"{spec.min_nodes}:{spec.max_nodes}",
        "--tls-ca": "given" if spec.tls else NONE,
        "the script": script,
        "the script's content": _content(spec),
        "its arguments": shlex.join(arguments),
    }
    if checkpoints is not None:
        terms |= {"--checkpoint-dir": checkpoints.home or NONE, "--checkpoint-from": checkpoints.origin or NONE}
        terms |= {"--checkpoint-every": checkpoints.every, "--checkpoint-keep": checkpoints.keep}
    if data is not None:
        terms |= {"--data": data.dataset, "--data-seed": data.seed}
        terms |= {"--global-batch": data.global_batch, "--micro-batch": data.micro_batch}
    return {name: str(value) for name, value in terms.items()}


def _content(spec: JobSpec) -> str:
    """A short digest."""
    path = Path(spec.command[0])
    if spec.entry != "path" or not path.is_file():
        return NONE
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
    except OSError:
        return NONE  # what is wrong with it is said where it is run
