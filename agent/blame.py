"""What is reported when a worker fails, hangs, or waits for what cannot be had: who, where, how, and its last lines."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenplexrun.agent import error_file, probe
from tenplexrun.agent.logs import WorkerLogs
from tenplexrun.agent.workers import End
from tenplexrun.core.hang import Hang
from tenplexrun.core.rounds import Failure
from tenplexrun.errors import ProcessError, TenplexError, WorkerHungError


@dataclass(frozen=True, slots=True)
class Blame:
    """For the workers of one round on one node. `home`: where their error files are if there are no logs on disk."""

    node: str
    host: str
    round: int
    first_rank: int
    logs: WorkerLogs
    home: Path

    def ended(self, end: End) -> Failure:
        error, age_s = error_file.read(self.error_path(end.local_rank)), time.time() - end.exit.at
        return self._failure(end.local_rank, end.exit.pid, end.exit.code, end.exit.at, error=error, age_s=age_s)

    def hung(self, hang: Hang, pid: int) -> Failure:
        local_rank = hang.ranks[0]
        folder = self._folder(local_rank) if probe.catches(pid, probe.DUMP) else None
        stacks = f"stacks in {folder / 'stderr.log'}" if folder else "stacks in the output of its node"
        return self._failure(local_rank, pid, WorkerHungError.exit_code, time.time(), hung=f"{hang}; {stacks}")

    def node_itself(self, what: str, error: TenplexError) -> Failure:
        """Something that the workers wait for has failed here."""
        lines = (f"{what} on node {self.node}: {error}",)
        code, record = error.exit_code, error_file.final(error)
        return Failure(self.node, self.host, self.first_rank, 0, 0, code, time.time(), lines, record)

    def error_path(self, local_rank: int) -> Path:
        """TORCHELASTIC_ERROR_FILE of a rank."""
        rank = self.first_rank + local_rank
        return (self._folder(local_rank) or self.home / "errors" / f"{self.round}-{rank}") / "error.json"

    def _folder(self, local_rank: int) -> Path | None:
        return self.logs.folder(self.round, self.first_rank + local_rank)

    def _failure(self, local_rank: int, pid: int, code: int, at: float, **more: Any) -> Failure:
        rank = self.first_rank + local_rank
        lines = tuple(self.logs.tail(self.round, rank))
        return Failure(self.node, self.host, rank, local_rank, pid, code, at, lines, **more)


def of_system(error: OSError) -> ProcessError:
    """What a system call refused, and what to do where that is known."""
    hint = "; raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""
    return ProcessError(": ".join(filter(None, (error.filename, error.strerror))) + hint)
