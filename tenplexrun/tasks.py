"""asyncio tasks that are to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.2


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them, and return when all have ended, however they did.

    Again and again: before Python 3.12 `asyncio.wait_for` loses a cancellation that comes in the moment in which its
    work is done (https://github.com/python/cpython/issues/81839), and a task that loops would go on for ever.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
