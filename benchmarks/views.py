"""What data.py runs: a view's process, and an HTTP server that is far away."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launchers import ROOT
from states import DEADLINE_S

sys.path.insert(0, str(ROOT / "tests"))
from file_servers import FileServer

from tenplexrun.vfs.client import ViewClient


class View:
    """A view's process on a node's folder, and the rounds that are shown."""

    def __init__(self, home: Path) -> None:
        self._socket, self._round = home / "view.sock", 0
        config = {"dir": str(home), "socket": str(self._socket), "mode": "auto"}
        self._process = subprocess.Popen([sys.executable, "-m", "tenplexrun.vfs.server", json.dumps(config)], cwd="/")
        self.mode = self._ask(lambda client: client.hello())["mode"]

    def next_round(self, order: dict[str, Any], size: int = 1, consumed: int = 0) -> tuple[Path, float]:
        """Show rank 0's share, and drop the round before. Returns the folder and the seconds until it was there."""

        async def show(client: ViewClient) -> tuple[Path, float]:
            await client.hello()
            began = time.perf_counter()
            folder = Path(await client.show(self._round, order, 0, size, consumed))
            seconds = time.perf_counter() - began
            await client.drop(self._round - 1)
            return folder, seconds

        self._round += 1
        return self._ask(show)

    def _ask(self, question: Callable[[ViewClient], Awaitable[Any]]) -> Any:
        async def asking() -> Any:
            client = ViewClient(str(self._socket))
            try:
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(asyncio.wait_for(asking(), DEADLINE_S))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)


@contextmanager
def view(home: Path) -> Iterator[View]:
    home.mkdir()
    made = View(home)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def server(root: Path, delay_s: float) -> Iterator[str]:
    """The URL of a folder, served by a process of its own, which waits before each answer."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(root, delay_s, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(root: Path, delay_s: float, ready: Any) -> None:
    made = FileServer(root)
    made.delay_s = delay_s
    ready.send(made.url)
    made.serve_forever()
