"""From a device's memory into memory that other processes map: through pinned buffers, on a stream of its own.

A copy straight into pageable memory is slow and blocks the device's queue. Here the device fills one buffer while the
host copies the other one to its place; small tensors share a buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
import torch

from tenplexrun.worker.device import Bytes

BUFFER_BYTES = 32 << 20
NUM_BUFFERS = 2

Move = tuple[Bytes, torch.Tensor]
"""Where bytes are to be, and a tensor of as many uint8 on the device."""


class Copies(Protocol):
    """A device's queue of copies to the host, in order, behind all that the device was told to compute before."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory, uint8, that the device can write to by itself."""

    def copy(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one: `dest` is a part of a buffer, `source` uint8 on the device."""

    def mark(self) -> Callable[[], None]:
        """What returns when all that is queued by now has been done."""


class CudaCopies:
    """A side stream of a CUDA device."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._stream: torch.cuda.Stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._where))
        with torch.cuda.stream(self._stream):
            dest.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # its memory is not to be given away before

    def mark(self) -> Callable[[], None]:
        event: torch.cuda.Event = self._stream.record_event()
        return event.synchronize


def copies_of(where: torch.device) -> Copies | None:
    """None where tensors are in the host's memory already."""
    return CudaCopies(where) if where.type == "cuda" else None


class Stager:
    """`put` returns when all bytes are in their places. The buffers are made at its first use, and kept."""

    def __init__(self, copies: Copies, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._copies, self._buffer_bytes = copies, buffer_bytes
        self._buffers: deque[torch.Tensor] = deque()

    def put(self, moves: Iterable[Move]) -> None:
        if not self._buffers:
            self._buffers.extend(self._copies.buffer(self._buffer_bytes) for _ in range(NUM_BUFFERS))
        queued: deque[Callable[[], None]] = deque()
        for group in _groups(moves, self._buffer_bytes):
            if len(queued) == NUM_BUFFERS:
                queued.popleft()()
            queued.append(self._queue(group))
        while queued:
            queued.popleft()()

    def _queue(self, group: list[Move]) -> Callable[[], None]:
        """Have the device fill the buffer used longest ago. Returns what waits for it, and empties it."""
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        filled: list[tuple[Bytes, torch.Tensor]] = []
        start = 0
        for dest, source in group:
            part = buffer[start : start + len(dest)]
            self._copies.copy(part, source)
            filled.append((dest, part))
            start += len(dest)
        wait = self._copies.mark()

        def finish() -> None:
            wait()
            for dest, part in filled:
                np.copyto(dest, part.numpy())

        return finish


def _groups(moves: Iterable[Move], limit: int) -> Iterator[list[Move]]:
    """Cut and join moves so that each group fills a buffer of `limit` bytes, but for the last."""
    group: list[Move] = []
    room = limit
    for dest, source in moves:
        start = 0
        while start < len(dest):
            stop = min(start + room, len(dest))
            group.append((dest[start:stop], source[start:stop]))
            room -= stop - start
            start = stop
            if not room:
                yield group
                group, room = [], limit
    if group:
        yield group
