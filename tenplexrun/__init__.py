"""tenplexrun: torchrun for jobs that must survive changing machines.

    import tenplexrun
    job = tenplexrun.init()                                  # process group, device mesh
    state = job.state(model=model, optimizer=optimizer)      # what must survive
    loader = job.loader("bytes:/data?sample_bytes=129", global_batch=64, micro_batch=4)
    for step, batch in job.steps(loader, until=1000):
        ...

Importing this package imports no torch; `init` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenplexrun import errors

if TYPE_CHECKING:
    from tenplexrun.core.layout import Shard, Stages
    from tenplexrun.core.parallel import ParallelConfig
    from tenplexrun.worker.agent import RoundStopped
    from tenplexrun.worker.dcp_storage import StorageReader, StorageWriter
    from tenplexrun.worker.job import Job, init

__version__ = "0.1.0"
__all__ = [
    "Job",
    "ParallelConfig",
    "RoundStopped",
    "Shard",
    "Stages",
    "StorageReader",
    "StorageWriter",
    "__version__",
    "errors",
    "init",
]

_HOMES = {
    "Job": "worker.job",
    "ParallelConfig": "core.parallel",
    "RoundStopped": "worker.agent",
    "Shard": "core.layout",
    "Stages": "core.layout",
    "StorageReader": "worker.dcp_storage",
    "StorageWriter": "worker.dcp_storage",
    "init": "worker.job",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: the worker's side needs torch, and the launcher none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tenplexrun.{_HOMES[name]}"), name)
