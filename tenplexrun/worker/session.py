"""One round of a job under an agent: declare the state, restore it, pass the boundaries."""

from __future__ import annotations

import time
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tenplexrun.core.layout import Layout
from tenplexrun.core.pace import Interval, Pace, Turns
from tenplexrun.core.snapshots import arena_map
from tenplexrun.errors import StateLostError
from tenplexrun.worker.agent import Agent
from tenplexrun.worker.ahead import Ahead, Source
from tenplexrun.worker.boundary import Boundary, Words
from tenplexrun.worker.data import Loader
from tenplexrun.worker.exchange import agree, merged
from tenplexrun.worker.launch import Launch, Place
from tenplexrun.worker.slots import SlotWriter, Snapshot
from tenplexrun.worker.state import State


class Session:
    """`begin` restores and gives the first step; then `before` each step, `committed` after it, `finish` at the end."""

    def __init__(
        self, agent: Agent, launch: Launch, place: Place, state: State, loader: Loader, source: Source | None
    ) -> None:
        self._agent, self._launch, self._place, self._source = agent, launch, place, source
        self._state, self._loader = state, loader
        # on a GPU one: another thread would have another current device and stream
        self._threads = launch.threads if place.device.type == "cpu" else 1
        self._start = 0
        self._store = PrefixStore(f"tenplexrun/{launch.round}", _get_default_store())

    def begin(self) -> int:
        """Agree on the layout, reserve slots, restore. Returns the step to go on with.

        Raises LayoutError, ArenaFullError or StateLostError, on all ranks that it concerns.
        """
        self._agent.event("built")
        layout = self._agree()
        slots, replicated = self._agent.declare(layout, self._place.config, self._groups())
        self._start = self._restore(layout)
        arena = arena_map(layout, self._place.config, self._launch.node_ranks)
        writer = SlotWriter(slots, arena, layout, self._place, self._threads)
        Ahead(writer.ranges())
        turns, words = self._pacing(replicated)
        self._boundary = Boundary(self._agent, writer, turns, words, self._read)
        return self._start

    def before(self, step: int) -> None:
        """Returns when `step` may run. Raises RoundStopped."""
        self._boundary.before(step)

    def first_step_done(self, seconds: float) -> None:
        self._agent.event("first_step", step=self._start, seconds=seconds)

    def finish(self, step: int) -> None:
        """All steps before `step` are done, and no more will come."""
        if self._launch.checkpoints:
            self._boundary.finish(step)
        else:
            self._boundary.after(step)
        self._agent.done()

    def _pacing(self, replicated: bool) -> tuple[Turns, Words | None]:
        """How often snapshots are taken, as rank 0 was told, and its words where steps alone do not say it."""
        store = self._store
        if self._launch.rank == 0:
            store.set("every", str(self._launch.snapshot_every))
        every = Interval.parse(store.get("every").decode())
        by_word = every.steps is None or replicated
        turns = Turns(every, self._start, by_word)
        if not by_word:
            return turns, None
        pace = Pace(every, self._start, time.monotonic()) if self._launch.rank == 0 else None
        return turns, Words(store, self._agent, pace)

    def _agree(self) -> Layout:
        """The union of all ranks' layouts; on the way, that what a snapshot keeps once is the same on all."""
        once = self._state.values()
        once.pop("seed")
        return agree(self._store, self._place.config, self._launch.rank, self._state.layout(), once)

    def _groups(self) -> dict[str, int]:
        return merged(self._store, self._place.config, self._launch.rank, self._state.groups())

    def _restore(self, layout: Layout) -> int:
        reply = self._agent.restore()
        maps = self._source.end() if self._source is not None else None
        if reply["snapshot"] is None:
            self._loader.begin(0)
            return 0
        began = time.monotonic()
        snapshot = Snapshot(reply["index"], maps)
        targets = self._state.blank()
        filled, num_bytes = snapshot.fill(targets, layout, self._place, self._threads)
        snapshot.maps.let_go()
        missing = sorted(set(targets) - set(filled) - self._state.stream_names)
        if missing:
            raise StateLostError(
                f"snapshot {snapshot.index.snapshot} has no {', '.join(missing[:3])}"
                f"{' and others' if len(missing) > 3 else ''}; restore the same model and optimizer, or start a new run"
            )
        values, step = reply["values"], int(reply["step"])
        self._state.adopt(filled, values)
        derived = self._state.adopt_streams(filled, int(values.get("seed", 0)), step)
        self._loader.begin(int(reply["consumed"]), values.get("order"))
        self._agent.event(
            "restored", step=step, num_bytes=num_bytes, seconds=time.monotonic() - began, derived_seed=derived
        )
        return step

    def _read(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        position = {"step": step, "consumed": self._loader.consumed, "order": self._loader.order.to_json()}
        return self._state.read(), {**self._state.values(), **position}
