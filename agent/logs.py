"""Workers' output: from their pipes to our own, line by line, and to files.

The event loop reads, a thread writes, so that a slow terminal or disk holds the workers up (as it would without us) but
never the agent. A line is written whole, with its rank in front, however many ranks write at once. Of a progress bar,
which redraws a line by carriage returns, the newest state is shown each second, and the last one always. Files get
every byte as it came: LOG_DIR/round_N/rank_R/{stdout,stderr}.log, and under torchrun's names,
LOG_DIR/RUN_ID_NODE/attempt_N/LOCAL_RANK/, where N is the round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from tenplexrun.core.output import STDERR, STDOUT, Output

CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 20
MAX_UNWRITTEN_BYTES = 8 << 20  # beyond it the workers wait
PROGRESS_S = 1.0
TAIL_LINES = 20
FLUSH_TIMEOUT_S = 30.0  # without any progress
KEPT_ROUNDS = 2


class WorkerLogs:
    """All output of this node's workers. Construct it in the event loop; `close` writes out what is left.

    `output` says what is shown and kept, `fds` are the terminal's stdout and stderr. `alias` is a folder beside the
    rounds' ones, of this launch and node alone, with torchrun's names: links ALIAS/attempt_N/LOCAL_RANK.
    """

    def __init__(self, output: Output | None = None, fds: tuple[int, int] = (1, 2), alias: str = ""):
        self._output, self._fds, self._alias = output or Output(), fds, alias
        self._writer = _Writer(self._resume)
        self._streams: dict[tuple[int, int], tuple[_Stream, _Stream]] = {}  # stdout, stderr by (round, rank)

    def open(
        self, round_number: int, rank: int, local_rank: int | None = None, role: str = "default"
    ) -> tuple[int, int]:
        """Descriptors of pipes for a new worker's stdout and stderr. The caller closes them after the fork.

        Raises OSError when the log files cannot be made.
        """
        for key in [key for key in self._streams if key[0] <= round_number - KEPT_ROUNDS]:
            del self._streams[key]
        local_rank = rank if local_rank is None else local_rank
        names = {"rank": rank, "local_rank": local_rank, "role_name": role}
        prefix = Template(self._output.prefix).safe_substitute(names).encode()
        folder = self.folder(round_number, rank)
        write_ends, streams = [], []
        for bit, name, fd in zip((STDOUT, STDERR), ("stdout", "stderr"), self._fds, strict=True):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            shown = fd if self._output.on_terminal(local_rank, bit) else None
            words = tuple(word.encode() for word in self._output.words(bit))
            stream = _Stream(
                read_end,
                prefix,
                shown,
                _open_file(folder and folder / f"{name}.log"),
                self._writer,
                words,
                _open_file(folder and folder.parent / f"filtered_{name}.log") if words else None,
            )
            stream.resume()
            write_ends.append(write_end)
            streams.append(stream)
        if folder is not None and self._alias:
            _link(folder, folder.parent.parent / self._alias / f"attempt_{round_number}" / str(local_rank))
        self._streams[round_number, rank] = streams[0], streams[1]
        return write_ends[0], write_ends[1]

    def folder(self, round_number: int, rank: int) -> Path | None:
        """Where the files of a worker are; None without a log folder."""
        log_dir = self._output.log_dir
        return None if log_dir is None else Path(log_dir, f"round_{round_number}", f"rank_{rank}")

    def tail(self, round_number: int, rank: int) -> list[str]:
        """The last lines of a worker's stderr, also those that a dead worker has left in the pipe."""
        streams = self._streams.get((round_number, rank))
        if streams is None:
            return []
        for stream in streams:
            stream.drain()
        return streams[1].last_lines()

    def close_round(self, round_number: int) -> None:
        """Read all that the round's workers wrote. They have ended: what is in the pipes is all that will come."""
        streams = [stream for key, pair in self._streams.items() if key[0] == round_number for stream in pair]
        for stream in streams:
            stream.drain()
            stream.end()

    async def close(self) -> None:
        """Read and write out all that is left."""
        for round_number in {key[0] for key in self._streams}:
            self.close_round(round_number)
        await self._writer.close()

    def _resume(self) -> None:
        for pair in self._streams.values():
            for stream in pair:
                stream.resume()


def _open_file(path: Path | None) -> int | None:
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _link(folder: Path, name: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    name.symlink_to(os.path.relpath(folder, name.parent), target_is_directory=True)


@dataclass(slots=True, eq=False)
class _Stream:
    """One pipe. `fd` is where its lines are shown, `file` the descriptor of its log file, `filtered` that of the file
    for lines with one of `words`."""

    pipe: int
    prefix: bytes
    fd: int | None
    file: int | None
    writer: _Writer
    words: tuple[bytes, ...] = ()
    filtered: int | None = None
    ended: bool = False
    partial: bytes = b""
    drawn: bytes | None = None  # the state of an unfinished line that has been shown
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    timer: asyncio.TimerHandle | None = None

    def resume(self) -> None:
        if not self.ended:
            asyncio.get_running_loop().add_reader(self.pipe, self._readable)

    def drain(self) -> None:
        """Read what is there now, whether or not it can be written at once."""
        while not self.ended and self._read():
            pass

    def last_lines(self) -> list[str]:
        lines = [*self.recent, _shown(self.partial)] if self.partial else [*self.recent]
        return [line.decode(errors="replace") for line in lines[-TAIL_LINES:]]

    def end(self) -> None:
        """At its end, or given up on."""
        if self.ended:
            return
        self.ended = True
        asyncio.get_running_loop().remove_reader(self.pipe)
        os.close(self.pipe)
        if self.timer is not None:
            self.timer.cancel()
        if self.partial:
            self._show([self.partial])
            self.partial = b""
        for file in filter(None, (self.file, self.filtered)):
            self.writer.close_file(file)

    def _readable(self) -> None:
        self._read()
        if self.writer.is_full and not self.ended:
            asyncio.get_running_loop().remove_reader(self.pipe)

    def _read(self) -> bool:
        try:
            data = os.read(self.pipe, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.end()
            return False
        if self.file is not None:
            self.writer.write(self.file, data)
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        *lines, self.partial = (self.partial + data).split(b"\n")
        if lines:
            self._show(lines)
        if b"\r" in self.partial:
            self.partial = self.partial[max(0, self.partial.rfind(b"\r", 0, -1)) :]  # older states were drawn over
            if self.timer is None:
                self.timer = asyncio.get_running_loop().call_later(PROGRESS_S, self._show_progress)
        elif len(self.partial) > MAX_LINE_BYTES:
            self._show([self.partial])
            self.partial = b""

    def _show_progress(self) -> None:
        self.timer = None
        state = _shown(self.partial)
        if b"\r" in self.partial and state and state != self.drawn:
            self._write(self.fd, [state])
            self.drawn = state

    def _show(self, lines: list[bytes]) -> None:
        shown = [_shown(line) if b"\r" in line else line for line in lines]
        self.recent.extend(shown[-TAIL_LINES:])
        if shown[0] == self.drawn:
            del shown[0]
        self.drawn = None
        self._write(self.fd, shown)
        if self.words:
            self._write(self.filtered, [line for line in shown if any(word in line for word in self.words)])

    def _write(self, fd: int | None, lines: list[bytes]) -> None:
        if lines and fd is not None:
            self.writer.write(fd, self.prefix + (b"\n" + self.prefix).join(lines) + b"\n")


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a line that was redrawn by carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class _Writer:
    """Writes in a thread of its own. `on_space` is called in the loop when there is room again."""

    def __init__(self, on_space: Callable[[], None]) -> None:
        self._on_space = on_space
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()
        self._unwritten = 0
        self._broken: set[int] = set()
        self._done = asyncio.Event()
        threading.Thread(target=self._run, name="log writer", daemon=True).start()

    @property
    def is_full(self) -> bool:
        return self._unwritten > MAX_UNWRITTEN_BYTES

    def write(self, fd: int, data: bytes) -> None:
        self._unwritten += len(data)
        self._queue.put((fd, data))

    def close_file(self, fd: int) -> None:
        self._queue.put((fd, None))

    async def close(self) -> None:
        """Return when all is written, or nothing can be for a long time."""
        self._queue.put((-1, None))
        left = -1
        while not self._done.is_set() and left != self._unwritten:
            left = self._unwritten
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._done.wait(), FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            fd, data = self._queue.get()
            if data is not None:
                self._write_all(fd, data)
                self._call(self._written, len(data))
            elif fd >= 0:
                os.close(fd)
            else:
                self._call(self._done.set)
                return

    def _write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and fd not in self._broken:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # our own terminal, made non-blocking by some other program
                select.select([], [fd], [])
            except OSError as error:
                self._broken.add(fd)
                if fd != 2:
                    with contextlib.suppress(OSError):
                        print(f"tenplexrun: output is lost from here on: {error.strerror}", file=sys.stderr)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has gone
            self._loop.call_soon_threadsafe(function, *args)

    def _written(self, num_bytes: int) -> None:
        was_full = self.is_full
        self._unwritten -= num_bytes
        if was_full and not self.is_full:
            self._on_space()
