"""The worker's end of the agent: its socket and its control page."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tenplexrun.channel import BlockingChannel
from tenplexrun.core.control import DONE, ControlPage
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.errors import ProcessError
from tenplexrun.worker.launch import Launch

POLL_S = 0.001


class RoundStopped(SystemExit):
    """The round ends here: state is safe, the process shall leave. Ends the script with exit code 0."""

    def __init__(self, step: int) -> None:
        super().__init__(0)
        self.step = step


class Agent:
    """What a rank says to its node's agent. Raises WireError when the agent is gone."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._fence = threading.Lock()
        self._channel = BlockingChannel(launch.agent)
        self.page = _open_page(launch.control)
        reply = self._channel.request(
            "hello", rank=launch.rank, local_rank=launch.local_rank, round=launch.round, pid=os.getpid()
        )
        self.source: str | None = reply.get("index")  # of what `restore` will give, if some of it is here already

    def declare(self, layout: Layout, config: ParallelConfig, groups: dict[str, int]) -> tuple[list[str], bool]:
        """Reserve the round's slots. `groups`: the optimizer's group of each parameter.

        Returns the slots' paths, and whether snapshots have to be replicated; raises ArenaFullError when memory is
        short.
        """
        reply = self._channel.request("declare", layout=layout.to_json(), config=config.to_json(), groups=groups)
        return [str(path) for path in reply["slots"]], bool(reply["replicated"])

    def restore(self, declared: bool = True) -> dict[str, Any]:
        """Wait until all that this node needs of the chosen snapshot is here.

        {"snapshot": id or None, "index": path or None, "values": record or None, "consumed": samples, "step": step}
        Before anything is `declared` a durable checkpoint cannot be read: then {"url": its folder, "step": step}.
        """
        return self._channel.request("restore", declared=declared)

    def view(self, order: dict[str, Any]) -> str:
        """The folder that shows this rank's share of the data in this order."""
        return str(self._channel.request("view", order=order)["dir"])

    def event(self, name: str, **fields: Any) -> None:
        self._channel.notify("event", name=name, at=time.time(), **fields)

    def sealed(self, step: int, slot: int, values: dict[str, Any], last: bool) -> None:
        """This rank's part of `slot` is written. The node's lowest rank sends the values, for all. `last`: no more
        steps will come."""
        self.page.seal(self._launch.local_rank, step)
        values_once = values if self._launch.local_rank == 0 else None
        self._channel.notify("sealed", step=step, slot=slot, values=values_once, last=last)

    def may_start(self, step: int) -> bool:
        return self.page.may_start(self._launch.local_rank, step, self._fence)

    def park(self, step: int, save: Callable[[], None]) -> None:
        """Wait at the boundary before `step` until the hold is raised. Raises RoundStopped when told to leave.

        `save` is called once all nodes have agreed to stop here. Not before: where others have gone on, so must this
        rank, and a snapshot that only some have taken would never be whole.
        """
        while True:
            self.page.park(self._launch.local_rank, step)
            self.wait(lambda: step < self.page.hold or step == self.page.final, step)
            if step == self.page.final:
                save()
                self.wait(lambda: False, step)
            if self.may_start(step):
                return

    def done(self) -> None:
        """This rank runs no more steps."""
        self.page.publish_started(self._launch.local_rank, DONE, self._fence)

    def wait(self, ready: Callable[[], bool], step: int) -> None:
        """Poll until `ready`. Raises RoundStopped(step) when the round is told to leave."""
        while not ready():
            if self.page.leave:
                raise RoundStopped(step)
            time.sleep(POLL_S)


def _open_page(path: str) -> ControlPage:
    try:
        with open(path, "r+b") as file:
            return ControlPage(memoryview(mmap.mmap(file.fileno(), 0)))
    except (OSError, ValueError) as error:
        raise ProcessError(f"cannot map the control page {path}: {error}; is the agent alive?") from error
