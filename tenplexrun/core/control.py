"""The control page: the few words through which a node's agent and its workers agree on a step boundary.

A buffer of native int64 words shared by all of them; every word has one writer. Words are read and written through
`memoryview.cast("q")`, which does not tear. Header: magic, hold, committed, leave, beat, round, number of local ranks,
pinned, final; then for each local rank: started, parked, sealed, spare.

Stopping is write–verify–park. A worker at the boundary before step k publishes `started = k`, fences, then reads
`hold`, and parks if k >= hold. An agent writes `hold = S`, fences, then reads what was started: a rank that did not
see S is seen itself. Where a rank may have begun S or a later step, S is raised and the parked ones go on. The fence
(any lock of the caller's own process, taken and given back) is needed on x86 too: a load may pass an earlier store.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from tenplexrun.errors import LayoutError

NONE = -1
"""No step yet."""
MAX = 2**63 - 1
NO_HOLD = MAX
"""Value of `hold` when no step is held."""
DONE = MAX
"""Value of `started` of a rank that has run its last step."""

Fence = AbstractContextManager[object]
"""A lock of the caller's process, as `threading.Lock()`."""

_MAGIC = 0x7470_7863_746C_0002  # "tpxctl", version 2
_HOLD, _COMMITTED, _LEAVE, _BEAT, _ROUND, _RANKS, _PINNED, _FINAL = range(1, 9)
_HEADER_WORDS = 9
_RANK_WORDS = 4
_STARTED, _PARKED, _SEALED = range(3)
_WORD_BYTES = 8


def num_bytes(num_ranks: int) -> int:
    """Size of the page of a node with `num_ranks` local ranks."""
    return (_HEADER_WORDS + _RANK_WORDS * num_ranks) * _WORD_BYTES


class ControlPage:
    """A view of a page that `create` has set up. Raises LayoutError when the buffer holds no such page.

    `release` gives the buffer back, so that a mapping beneath it can be closed.
    """

    __slots__ = ("_words", "num_ranks")

    def __init__(self, buffer: memoryview) -> None:
        if buffer.nbytes < num_bytes(0):
            raise LayoutError(f"a control page has at least {num_bytes(0)} bytes, this one has {buffer.nbytes}")
        usable = buffer.nbytes - buffer.nbytes % _WORD_BYTES
        words = buffer.cast("B")[:usable].cast("q")
        ranks = words[_RANKS]
        if words[0] != _MAGIC or ranks < 0 or num_bytes(ranks) > buffer.nbytes:
            words.release()
            raise LayoutError("this is no control page of this version; start agent and workers from one installation")
        self._words = words
        self.num_ranks = ranks

    @classmethod
    def create(cls, buffer: memoryview, round_number: int, num_ranks: int) -> ControlPage:
        """Set up a page for a new round: no hold, nothing committed, no rank started.

        Raises LayoutError when the buffer is smaller than `num_bytes(num_ranks)`.
        """
        if buffer.nbytes < num_bytes(num_ranks):
            raise LayoutError(f"a control page of {num_ranks} ranks needs {num_bytes(num_ranks)} bytes")
        words = buffer.cast("B")[: num_bytes(num_ranks)].cast("q")
        header = [_MAGIC, NO_HOLD, NONE, 0, 0, round_number, num_ranks, NONE, NONE]
        for index, word in enumerate(header + [NONE] * (_RANK_WORDS * num_ranks)):
            words[index] = word
        words.release()
        return cls(buffer)

    def release(self) -> None:
        self._words.release()

    # Words that the agent writes.

    @property
    def hold(self) -> int:
        """First step that must not be run; `NO_HOLD` when all may."""
        return self._words[_HOLD]

    @property
    def committed(self) -> int:
        """Step of this round's newest committed snapshot, or `NONE`."""
        return self._words[_COMMITTED]

    @committed.setter
    def committed(self, step: int) -> None:
        self._words[_COMMITTED] = step

    @property
    def final(self) -> int:
        """The hold that all nodes have agreed on, so that nobody passes it: what is held is saved then; or `NONE`."""
        return self._words[_FINAL]

    @final.setter
    def final(self, step: int) -> None:
        self._words[_FINAL] = step

    @property
    def leave(self) -> bool:
        """Whether parked workers shall end."""
        return self._words[_LEAVE] != 0

    @leave.setter
    def leave(self, value: bool) -> None:
        self._words[_LEAVE] = int(value)

    @property
    def beat(self) -> int:
        """The agent's monotonic clock when it was last alive, ns."""
        return self._words[_BEAT]

    @beat.setter
    def beat(self, now_ns: int) -> None:
        self._words[_BEAT] = now_ns

    @property
    def pinned(self) -> int:
        """The slot that is being read for a durable checkpoint and must not be written over, or `NONE`."""
        return self._words[_PINNED]

    @pinned.setter
    def pinned(self, slot: int) -> None:
        self._words[_PINNED] = slot

    @property
    def round(self) -> int:
        return self._words[_ROUND]

    def propose_hold(self, step: int, fence: Fence) -> int:
        """Hold `step` and all after it (`NO_HOLD` lets go). Returns `max_started()` as read after the fence.

        The hold stands on this node if that is below `step`; otherwise propose a later one.
        """
        self._words[_HOLD] = step
        with fence:
            pass
        return self.max_started()

    def max_started(self) -> int:
        """The last step that any local rank may have begun, or `NONE`. Ranks that are done do not count.

        A rank parked before step k has published k but begun k - 1 at most.
        """
        newest = NONE
        for rank in range(self.num_ranks):
            started = self.started(rank)
            if started != DONE:
                newest = max(newest, started - (self.parked(rank) == started))
        return newest

    def all_parked(self, step: int) -> bool:
        """Whether every local rank is parked before `step` or done."""
        return all(self.started(rank) == DONE or self.parked(rank) == step for rank in range(self.num_ranks))

    def all_done(self) -> bool:
        return all(self.started(rank) == DONE for rank in range(self.num_ranks))

    def all_sealed(self) -> int:
        """The newest step whose snapshot every local rank has written its part of, or `NONE`."""
        return min((self.sealed(rank) for rank in range(self.num_ranks)), default=NONE)

    # Words that the worker of `local_rank` writes.

    def started(self, local_rank: int) -> int:
        """The step the rank is at, `NONE` before the first, `DONE` after the last."""
        return self._words[self._at(local_rank) + _STARTED]

    def parked(self, local_rank: int) -> int:
        """The step before which the rank waits, or `NONE`."""
        return self._words[self._at(local_rank) + _PARKED]

    def sealed(self, local_rank: int) -> int:
        """The newest step whose snapshot the rank has written its part of, or `NONE`."""
        return self._words[self._at(local_rank) + _SEALED]

    def publish_started(self, local_rank: int, step: int, fence: Fence) -> None:
        """The rank is about to run `step` (or `DONE`), no longer parked; read `hold` after this, and only then."""
        base = self._at(local_rank)
        self._words[base + _STARTED] = step
        self._words[base + _PARKED] = NONE
        with fence:
            pass

    def read_hold(self) -> int:
        return self.hold

    def may_start(self, local_rank: int, step: int, fence: Fence) -> bool:
        """Publish `step`, then tell whether it may be run; if not, `park`.

        A parked rank that sees the hold raised must ask again here: the hold may have come back meanwhile.
        """
        self.publish_started(local_rank, step, fence)
        return step < self.hold

    def park(self, local_rank: int, step: int) -> None:
        """The rank has done all steps before `step`, and waits."""
        self._words[self._at(local_rank) + _PARKED] = step

    def seal(self, local_rank: int, step: int) -> None:
        """The rank has written its part of the snapshot at `step`."""
        self._words[self._at(local_rank) + _SEALED] = step

    def _at(self, local_rank: int) -> int:
        if not 0 <= local_rank < self.num_ranks:
            raise LayoutError(f"local rank {local_rank} is not on a control page of {self.num_ranks} ranks")
        return _HEADER_WORDS + _RANK_WORDS * local_rank
