"""Files behind URLs: any that fsspec knows, read by range.

Credentials, endpoints and whatever else a server needs are fsspec's own configuration (files below ~/.config/fsspec,
variables FSSPEC_<PROTOCOL>_<OPTION>), and that of its packages.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tenplexrun.errors import DataChangedError, DataError

PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Before the second attempt and so on."""
TIMEOUT_S = 60.0
"""Of one attempt."""
PART_BYTES = 8 << 20
"""Longer ranges are read in parts, side by side."""
HTTP_AT_ONCE = 16
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ImportError, ValueError)
"""Errors that another attempt does not mend."""
_LATER = (408, 425, 429)
"""HTTP's statuses that ask for another attempt, beside 5xx."""

Range = tuple[str, int, int]
"""URL, first byte, the byte after the last."""
T = TypeVar("T")

_systems: dict[int, Any] = {}
"""File systems that have been used, by id. They are kept, since one that a fork has inherited closes its parent's
connections when it is collected."""


def is_url(path: str) -> bool:
    return "://" in path


def fetch(ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, read side by side; only what fails is asked for again.

    Raises DataError that names the URL and the reason; DataChangedError for a file that is no longer that long."""
    parts = [
        (number, (url, at, min(at + PART_BYTES, end)))
        for number, (url, begin, end) in enumerate(ranges)
        for at in range(begin, end, PART_BYTES)
    ]
    found: list[list[bytes]] = [[] for _ in ranges]
    for (number, _), data in zip(parts, _fetch([part for _, part in parts]), strict=True):
        found[number].append(data)
    return [pieces[0] if len(pieces) == 1 else b"".join(pieces) for pieces in found]


def _fetch(parts: Sequence[Range]) -> list[bytes]:
    found: list[bytes] = [b""] * len(parts)
    todo = list(range(len(parts)))
    for attempt in range(len(PAUSES_S) + 1):
        failed: list[tuple[int, bytes | BaseException]] = []
        for number, answer in zip(todo, _answers([parts[number] for number in todo]), strict=True):
            if isinstance(answer, BaseException) or _is_short(parts[number], answer):
                failed.append((number, answer))
            else:
                found[number] = answer
        if not failed:
            break
        number, answer = failed[0]
        if isinstance(answer, bytes):
            _check_size(*parts[number])
            answer = EOFError(f"{len(answer)} bytes of {parts[number][2] - parts[number][1]}")
        try:
            _wait_or_raise(parts[number][0], answer, attempt)
        except DataError:
            if not isinstance(answer, asyncio.TimeoutError):
                _check_size(*parts[number])
            raise
        todo = [number for number, _ in failed]
    return found


def _answers(parts: Sequence[Range]) -> list[bytes | BaseException]:
    """Bytes or an error of each."""
    by_system: dict[int, list[int]] = {}
    places = [_place(url) for url, _, _ in parts]
    for number, (system, _) in enumerate(places):
        by_system.setdefault(id(system), []).append(number)
    found: list[bytes | BaseException] = [b""] * len(parts)
    for numbers in by_system.values():
        system = places[numbers[0]][0]
        columns = ([places[n][1] for n in numbers], [parts[n][1] for n in numbers], [parts[n][2] for n in numbers])
        try:
            answers = system.cat_ranges(*columns, on_error="return", **_limit(system), **_width(system))
        except Exception as error:  # whatever a backend raises
            answers = [error] * len(numbers)
        for number, answer in zip(numbers, answers, strict=True):
            found[number] = answer if isinstance(answer, BaseException) else bytes(answer)
    return found


def _is_short(part: Range, data: bytes) -> bool:
    url, begin, end = part
    if len(data) > end - begin:
        raise DataError(f"{url}: its server sends whole files where a range is asked for; take one that serves ranges")
    return len(data) < end - begin


def _check_size(url: str, begin: int, end: int) -> None:
    """Raises DataChangedError if there is no byte before `end` any more; nothing if nobody knows."""
    system, path = _place(url)
    try:
        [size] = system.sizes([path], **_limit(system))
    except Exception as error:  # whatever a backend raises
        if _is_gone(_real(url, error)):
            raise changed(url, "has gone") from error
        return
    if size is not None and size < end:
        raise changed(url, "has shrunk")


def changed(path: str, how: str) -> DataChangedError:
    return DataChangedError(f"{path} {how} since the job began; restore it, and start the job again")


def read_file(url: str) -> bytes:
    [size] = sizes([url])
    return fetch([(url, 0, size)])[0]


def write_file(url: str, data: bytes) -> None:
    """Appears as a whole where the server stores objects. Raises DataError."""
    system, path = _place(url)
    _attempt(url, lambda: system.pipe_file(path, data, **_limit(system)))


def sizes(urls: Sequence[str]) -> list[int]:
    """Bytes of each file; all on one server. Raises DataError for one that is not there."""
    if not urls:
        return []
    system, paths = _place(urls[0])[0], [_place(url)[1] for url in urls]
    found = _attempt(urls[0], lambda: system.sizes(paths, **_limit(system), **_width(system)))
    for url, size in zip(urls, found, strict=True):
        if size is None:
            raise DataError(f"{url}: its server does not say how long it is; take one that does")
    return [int(size) for size in found]


def is_file(url: str) -> bool:
    """Whether it is a file: not a folder, nor something that ends with a slash."""
    system, path = _place(url)
    return not url.endswith("/") and _attempt(url, lambda: system.info(path, **_limit(system)))["type"] == "file"


def files_below(root: str) -> Mapping[str, int | None]:
    """Sizes of the files below a folder, by their names relative to it; None where the listing does not say."""
    system, path = _place(root.rstrip("/") + "/")
    found = _attempt(root, lambda: system.find(path, detail=True, **_limit(system)))
    base = len(path.rstrip("/")) + 1
    return {name[base:]: info.get("size") for name, info in found.items() if info.get("type") == "file"}


class File(io.RawIOBase):
    """To read, seek and slice. What is read is fetched with what follows it, `ahead` bytes together."""

    def __init__(self, url: str, ahead: int) -> None:
        self.name = url
        [self._size] = sizes([url])
        self._ahead, self._at, self._first, self._kept = ahead, 0, 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def __getitem__(self, part: slice) -> bytes:
        """From its begin to its end, both given."""
        self.seek(part.start)
        found = bytearray()
        while len(found) < part.stop - part.start and (more := self.read(part.stop - part.start - len(found))):
            found += more
        return bytes(found)

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        if not self._first <= self._at < self._first + len(self._kept):
            end = min(self._size, self._at + max(count, self._ahead))
            self._first, [self._kept] = self._at, fetch([(self.name, self._at, end)])
        data = memoryview(self._kept)[self._at - self._first :][:count]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _place(url: str) -> tuple[Any, str]:
    """The file system, and the path in it. Raises DataError for a URL that fsspec does not know."""
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{url}: {error}; correct the URL, or install fsspec and its package for it on all nodes"
        ) from error
    _systems[id(system)] = system
    return system, path


def _limit(system: Any) -> dict[str, float]:
    return {"timeout": TIMEOUT_S} if getattr(system, "async_impl", False) else {}


def _width(system: Any) -> dict[str, int]:
    """How many requests at once: a small HTTP server drops what more there are, and they wait for seconds."""
    kinds = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    return {"batch_size": HTTP_AT_ONCE} if "http" in kinds else {}


def _attempt(url: str, call: Callable[[], T]) -> T:
    for attempt in range(len(PAUSES_S) + 1):
        try:
            return call()
        except Exception as error:  # whatever a backend raises
            _wait_or_raise(url, error, attempt)
    raise AssertionError("the last attempt returns or raises")


def _wait_or_raise(url: str, error: BaseException, attempt: int) -> None:
    error = _real(url, error)
    status = getattr(error, "status", None)  # HTTP's
    if _is_gone(error):
        raise DataError(f"{url} does not exist: correct the URL") from error
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, _FINAL) or (status is not None and 400 <= status < 500 and status not in _LATER):
        raise DataError(f"{url}: {reason}; correct the URL, or fsspec's settings for it") from error
    if attempt == len(PAUSES_S):
        raise DataError(
            f"{url}: {reason}, also at attempt {attempt + 1}; is its server up, reached from this node, and does it "
            "allow this?"
        ) from error
    time.sleep(PAUSES_S[attempt])


def _real(url: str, error: BaseException) -> BaseException:
    """fsspec says of whatever goes wrong with HTTP that there is no such file."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None and "http" in url.partition("://")[0]:
        return error.__cause__
    return error


def _is_gone(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or getattr(error, "status", None) == 404
