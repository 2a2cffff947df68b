"""The process of the dataset view: `python -m tenplexrun.vfs.server '{"dir": ..., "socket": ..., "mode": "auto"}'`.

`dir` is the node's directory: samples go to its `extents/`, the view to its `view/`, the store's folder is `arena/`.
`socket` is the path of the control socket (protocol of `tenplexrun.channel`), `mode` one of auto, fuse, farm, `store`
the socket of the node's store, if there is one, `patience_s` how long readers wait for rows that cannot be fetched,
`window_bytes` how much of a rank's data is fetched ahead, and how much
a farm writes in a round. What is shown is noted in `views.json`, so that a
process started after a kill -9 shows the same again. SIGTERM and SIGINT unmount and end with exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tenplexrun import channel
from tenplexrun.core.extents import Placement, spans
from tenplexrun.core.order import DataOrder
from tenplexrun.errors import DataError, ProcessError, TenplexError, UsageError
from tenplexrun.vfs import farm
from tenplexrun.vfs.data import PATIENCE_S, Data, Reader
from tenplexrun.vfs.extents import present
from tenplexrun.vfs.nodes import Directory, Live
from tenplexrun.vfs.outage import Tell
from tenplexrun.vfs.rows import Limits
from tenplexrun.vfs.state import Snapshots
from tenplexrun.vfs.view import Catalogued, fitting, tree
from tenplexrun.vfs.window import window

Record = dict[str, Any]
MODES = ("auto", "fuse", "farm")
MAX_WAITING = 64
_STOP_S = 5.0


class Surface(Protocol):
    """Where trees become visible: `vfs.mount.Mount` or `vfs.farm.Farm`."""

    def start(self) -> None: ...
    def show(self, group: str, name: str, directory: Directory, current: bool) -> None: ...
    def drop(self, group: str, name: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """`serving` answers the kernel as long as the view is mounted; a farm needs nobody, but room: `limit_bytes`."""

    surface: Surface
    mode: str
    reason: str
    serving: Callable[[], Awaitable[None]] | None = None
    stop: Callable[[], None] = lambda: None
    limit_bytes: int | None = None


class Reporter:
    """Tells the agents that are connected what went wrong, as the notification "failed", and stderr if none is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.listeners: weakref.WeakSet[channel.Channel] = weakref.WeakSet()
        self._loop = loop

    def __call__(self, message: str) -> None:
        self._say("failed", message)

    def tell(self, kind: str, **fields: Any) -> None:
        """The same from other threads, also what is no failure."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if "message" in fields:
                self._loop.call_soon_threadsafe(self._say, kind, fields["message"])
            else:
                self._loop.call_soon_threadsafe(self._notify, kind, fields)

    def _say(self, kind: str, message: str) -> None:
        if all(listener.closed for listener in self.listeners):
            with contextlib.suppress(OSError):  # whoever read our messages may have gone
                print(f"dataset view: {message}", file=sys.stderr)
        self._notify(kind, {"message": message})

    def _notify(self, kind: str, fields: Record) -> None:
        for listener in list(self.listeners):
            listener.notify(kind, **fields)


@dataclass(frozen=True, slots=True)
class Config:
    """See the module's docstring."""

    home: Path
    socket: str
    mode: str
    window_bytes: int
    store: str | None = None
    patience_s: float = 60.0

    @classmethod
    def parse(cls, text: str) -> Config:
        """Raises UsageError."""
        try:
            record = json.loads(text)
            home, socket, mode = Path(record["dir"]).resolve(), str(record["socket"]), str(record.get("mode", "auto"))
            window_bytes, patience_s = (
                int(record.get("window_bytes", farm.WINDOW_BYTES)),
                record.get("patience_s", 60.0),
            )
            config = cls(home, socket, mode, window_bytes, record.get("store"), float(patience_s))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the configuration should be one JSON object with dir, socket, mode: {error!r}") from None
        if mode not in MODES:
            raise UsageError(f"mode {mode!r} should be one of {', '.join(MODES)}")
        return config


def choose(config: Config, report: Callable[[str], None]) -> Chosen:
    """Mount, or fall back to files. Raises DataError where mode="fuse" and FUSE cannot be had."""
    refused, home, mode, path = "asked for", config.home, config.mode, config.home / "view"
    if mode != "farm":
        try:
            return _mount(path, Directory({"state": Live(Snapshots(home / "arena"))}), report)
        except DataError as error:
            refused = str(error)
    if mode == "fuse":
        raise DataError(f"{refused}; install FUSE, allow /dev/fuse, or let the view be files (mode farm)")
    surface = farm.Farm(path)
    surface.start()
    return Chosen(surface, "farm", refused, limit_bytes=config.window_bytes)


def _mount(path: Path, root: Directory, report: Callable[[str], None]) -> Chosen:
    if not os.path.exists("/dev/fuse"):
        raise DataError("there is no /dev/fuse")
    try:
        from tenplexrun.vfs.mount import Mount
    except ImportError as error:
        raise DataError(f"pyfuse3 cannot be imported ({error})") from error
    mount = Mount(path, root, report)
    mount.start()
    return Chosen(mount, "fuse", f"mounted at {path}", mount.run, mount.stop)


class Views:
    """What is shown, and the operations on it."""

    def __init__(self, chosen: Chosen, config: Config, tell: Tell) -> None:
        self._chosen, self._config, self._tell = chosen, config, tell
        self._shown: dict[tuple[int, int], list[Record]] = {}  # by round and dp rank
        self._root = config.home / "view"
        self._opened: dict[str, Data] = {}
        self._readers: dict[str, Data] = {}  # by the name of a view
        self._lock = asyncio.Lock()
        self._note = config.home / "views.json"
        self._waiting = ThreadPoolExecutor(MAX_WAITING, "reader")

    async def handle(self, _: channel.Channel, op: str, args: Record) -> Record:
        """Answer one request. Raises what the operation raises, DataError for an unknown one."""
        if op == "hello":
            return {"mode": self._chosen.mode, "reason": self._chosen.reason}
        if op == "show":
            async with self._lock:
                return {"dir": await self.show(args, PATIENCE_S)}
        if op == "rows":
            return {"files": await self.rows(str(args["view"]), args["ids"], args["begin"])}
        if op == "drop":
            return self.drop(int(args["round"]))
        if op == "describe":
            return await self.describe(str(args["spec"]))
        if op == "held":
            return {"held": self.held()}
        raise DataError(f"the dataset view knows no operation {op!r}; do all parts come from one installation?")

    async def describe(self, spec: str) -> Record:
        async with self._lock:
            samples = (await self._open(spec)).samples
        return {
            "num_samples": samples.num_samples,
            "sample_bytes": samples.sample_bytes,
            "fingerprint": samples.fingerprint,
        }

    def held(self) -> Record:
        """By dataset the extents that are here."""
        return {data.key: spans(sorted(present(data.keeper.home))) for data in self._opened.values()}

    async def show(self, request: Record, patience_s: float) -> str:
        """Show one rank's share; asked twice for the same, the same directory. The first order of a round is its
        `current` one. `num_samples` and `fingerprint` may be missing; DataError where they are not the dataset's.
        `bare` beside them: see `vfs.view.tree`. The first reader of a dataset waits so long for its extents."""
        try:
            number, rank, size = (int(request[name]) for name in ("round", "dp_rank", "dp_size"))
            record, consumed = dict(request["order"]), int(request["consumed"])
            placement = None if request.get("placement") is None else Placement.from_json(request["placement"])
            spec, bare = str(record.pop("dataset")), bool(record.pop("bare", False))
            data = await self._open(spec)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a request to show data: {request!r:.300} ({error!r})") from error
        order = _complete(record, data.samples)
        request = {**request, "order": {"dataset": spec, **order.to_json(), "bare": bare}}
        whole = {**request, "order": {**request["order"], "bare": False}}
        shown = self._shown.setdefault((number, rank), [])
        for index, other in enumerate(shown):
            if other in (request, whole):
                return str(self._root / _group(rank) / _name(number, index))
        name = f"{_group(rank)}/{_name(number, len(shown))}"
        reader = Reader(name, self._root / name, order, rank, size, consumed, bare)
        plan = data.follow(placement)
        samples = await asyncio.to_thread(data.reader, plan, reader, patience_s)
        self._readers[name] = data
        steps = window(order, rank, size, consumed)
        directory = tree(steps if bare else fitting(steps, samples, self._chosen.limit_bytes), samples, bare)
        await self._put(_group(rank), _name(number, len(shown)), directory, not shown)
        shown.append(request)
        self._write_note()
        return str(reader.root)

    async def _put(self, group: str, name: str, directory: Directory, current: bool) -> None:
        if self._chosen.limit_bytes is None:
            self._chosen.surface.show(group, name, directory, current)
        else:  # it writes files, whose rows may have to come from elsewhere
            await asyncio.to_thread(self._chosen.surface.show, group, name, directory, current)

    async def rows(self, view: str, ids: list[int], begin: int | None) -> list[str]:
        """The files with rows that a reader of a view does not find in this node's extents."""
        data = self._readers.get(view)
        if data is None:
            raise DataError(f"no view {view} is shown; its round is over")
        loop, wanted = asyncio.get_running_loop(), np.array(ids, dtype=np.int64)
        return await loop.run_in_executor(self._waiting, data.rows.find, view, wanted, begin)

    def drop(self, number: int) -> Record:
        for key in [key for key in self._shown if key[0] == number]:
            for index in range(len(self._shown.pop(key))):
                name = f"{_group(key[1])}/{_name(number, index)}"
                self._chosen.surface.drop(_group(key[1]), _name(number, index))
                if (data := self._readers.pop(name, None)) is not None:
                    data.leave(name)
        self._write_note()
        return {}

    async def restore(self) -> None:
        """Show again what a predecessor showed that was killed."""
        with contextlib.suppress(FileNotFoundError):
            for request in json.loads(self._note.read_text()):
                await self.show(request, 0.0)

    def close(self) -> None:
        for data in self._opened.values():
            data.stop()
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._note.unlink(missing_ok=True)

    async def _open(self, spec: str) -> Data:
        if spec not in self._opened:
            config = self._config
            sockets, limits = (config.socket, config.store), Limits(config.window_bytes, config.patience_s)
            self._opened[spec] = await asyncio.to_thread(
                Data, spec, config.home / "extents", sockets, limits, self._tell
            )
        return self._opened[spec]

    def _write_note(self) -> None:
        new = self._note.with_suffix(".new")
        new.write_text(json.dumps([request for shown in self._shown.values() for request in shown]))
        new.replace(self._note)


def _group(dp_rank: int) -> str:
    return f"dp-{dp_rank:04d}"


def _name(round_number: int, index: int) -> str:
    return f"round-{round_number}" if index == 0 else f"round-{round_number}.{index + 1}"


def _complete(record: Record, catalogue: Catalogued) -> DataOrder:
    record = {name: value for name, value in record.items() if value is not None and value != ""}
    of_dataset = {"num_samples": catalogue.num_samples, "fingerprint": catalogue.fingerprint}
    order = DataOrder.from_json({**of_dataset, **record})
    DataOrder.from_json({**record, **of_dataset}).check_continues(order)
    return order


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT. Raises ProcessError when somebody else unmounts the view."""
    home, socket = config.home, config.socket
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    report = Reporter(asyncio.get_running_loop())
    chosen = choose(config, report)
    views = Views(chosen, config, report.tell)

    async def handle(caller: channel.Channel, op: str, args: Record) -> Record:
        if op not in ("hello", "rows"):  # which others ask, too: a patrol, readers
            report.listeners.add(caller)
        return await views.handle(caller, op, args)

    kernel = asyncio.ensure_future(chosen.serving() if chosen.serving else stop.wait())
    try:
        await views.restore()
        await channel.serve(f"unix:{socket}", handle)
        await asyncio.wait({kernel, asyncio.ensure_future(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            why = kernel.exception() or "somebody else unmounted it"
            raise ProcessError(f"the dataset view {home / 'view'} has ended: {why}; start it again")
    finally:
        views.close()
        chosen.stop()
        await asyncio.wait({kernel}, timeout=_STOP_S)
        chosen.surface.close()
        Path(socket).unlink(missing_ok=True)


def main() -> None:
    """Read the configuration in argv[1] and serve. Errors are one line; the exit code is the error's."""
    try:
        asyncio.run(serve(Config.parse(sys.argv[1] if len(sys.argv) == 2 else "")))
    except TenplexError as error:
        print(f"dataset view: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
