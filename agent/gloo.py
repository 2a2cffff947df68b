"""A race in torch at the end of a program that is fast because all was imported before it began.

Destroying a gloo process group joins its threads without letting go of the GIL (pytorch issue 56297; 2.13 still does
so where the last reference is DDP's Reducer). A thread that at that moment drops the tensors of the last collective
wants the GIL: neither goes on. A third of plain DDP scripts ended so when forked; started cold, destroy_process_group
is slow enough the first time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from types import ModuleType
from typing import Any

THREAD = "pt_gloo_runloop"
POLL_S = 0.001
PATIENCE_S = 1.0


def idle_before_destroying(c10d: ModuleType, distributed: ModuleType) -> None:
    """Have `destroy_process_group` begin only when gloo's threads are idle, the GIL having been theirs to take."""
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        wait_for_threads()
        return destroy(*args, **kwargs)

    for module in (c10d, distributed):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def wait_for_threads() -> None:
    """Sleep, the GIL let go, until gloo's threads sleep too: with nobody to wait for they are through."""
    end = time.monotonic() + PATIENCE_S
    while True:
        time.sleep(POLL_S)
        if "R" not in _states() or time.monotonic() > end:
            return


def _states() -> str:
    """Of this process's gloo threads, as in /proc."""
    states = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name == THREAD:
                states.append(rest.split()[0])
    return "".join(states)
