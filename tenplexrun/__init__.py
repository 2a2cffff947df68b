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
from tenplexrun.core.layout import Shard, Stages
from tenplexrun.core.parallel import ParallelConfig

if TYPE_CHECKING:
    from tenplexrun.worker.agent import RoundStopped
    from tenplexrun.worker.job import Job, init

__version__ = "0.1.0"
__all__ = ["Job", "ParallelConfig", "RoundStopped", "Shard", "Stages", "__version__", "errors", "init"]

_WORKER = {"Job": "job", "RoundStopped": "agent", "init": "job"}


def __getattr__(name: str) -> Any:
    """The worker's side, imported when first asked for: it needs torch."""
    if name not in _WORKER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tenplexrun.worker.{_WORKER[name]}"), name)
