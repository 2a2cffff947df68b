"""Which streams of which workers go where: torchrun's -r, -t, --local-ranks-filter and duplicate filters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

STDOUT, STDERR = 1, 2
PREFIX = "[${rank}]: "


@dataclass(frozen=True, slots=True)
class Streams:
    """A choice of streams: bits 1 (stdout) and 2 (stderr), for all local ranks or by local rank."""

    default: int = 0
    by_rank: Mapping[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Streams:
        """ "3", or "0:1,12:3" where ranks that are not named have none. Raises ValueError."""
        if re.fullmatch("[0-3]", text):
            return cls(int(text))
        if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            raise ValueError(f"{text!r} is neither one of 0 to 3 nor LOCAL_RANK:0-3,...")
        pairs = (pair.split(":") for pair in text.split(","))
        return cls(0, {int(rank): int(streams) for rank, streams in pairs})

    def __bool__(self) -> bool:
        return bool(self.default or any((self.by_rank or {}).values()))

    def has(self, local_rank: int, stream: int) -> bool:
        chosen = self.default if self.by_rank is None else self.by_rank.get(local_rank, 0)
        return bool(chosen & stream)


@dataclass(frozen=True, slots=True)
class Output:
    """What becomes of the workers' output. With a `log_dir` every stream has a file there, whatever is shown.

    `shown`: local ranks on the terminal, None for all. `filters`: words by stream; a line with one of them also goes
    to a file that all ranks of the node share. `prefix`: `string.Template` of rank, local_rank and role_name.
    """

    log_dir: str | None = None
    redirects: Streams = Streams()
    tee: Streams = Streams()
    shown: frozenset[int] | None = None
    filters: Mapping[int, tuple[str, ...]] | None = None
    prefix: str = PREFIX

    @property
    def needs_files(self) -> bool:
        return bool(self.redirects or self.tee or any((self.filters or {}).values()))

    def on_terminal(self, local_rank: int, stream: int) -> bool:
        if self.shown is not None and local_rank not in self.shown:
            return False
        return self.tee.has(local_rank, stream) or not self.redirects.has(local_rank, stream)

    def words(self, stream: int) -> tuple[str, ...]:
        return tuple(filter(None, (self.filters or {}).get(stream, ())))
