"""Tasks end, even where a cancellation gets lost."""

from __future__ import annotations

import asyncio
import contextlib

from tenplexrun.tasks import end


def test_a_task_that_loses_cancellations_ends_all_the_same() -> None:
    lost = 0

    async def loop() -> None:
        nonlocal lost
        while True:
            if lost < 2:  # as `asyncio.wait_for` did before Python 3.12
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
                lost += 1
            else:
                await asyncio.sleep(60)

    async def fail() -> None:
        raise ValueError("is not raised again")

    async def test() -> None:
        done = asyncio.ensure_future(asyncio.sleep(0))
        tasks = [asyncio.ensure_future(loop()), asyncio.ensure_future(fail()), done]
        await asyncio.sleep(0.01)
        await end(tasks)
        assert all(task.done() for task in tasks)

    asyncio.run(asyncio.wait_for(test(), 30))
    assert lost == 2
