"""A pair for `torch.distributed.checkpoint` (DCP) whose storage is the memory of the job's nodes.

    dcp.save(state, storage_writer=tenplexrun.StorageWriter())      # a snapshot, committed when all nodes have it
    reader = tenplexrun.StorageReader()
    if reader.step is not None:                                     # there is something to go on from
        dcp.load(state, storage_reader=reader)

A save is a snapshot: of DTensors as their placements say, of plain tensors as replicas, of which the lowest rank's
counts, and of plain values, which must be the same on all ranks.
"""

from __future__ import annotations

import functools
import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.futures import Future

from tenplexrun.core import durable, records
from tenplexrun.core import values as plain
from tenplexrun.core.layout import Layout
from tenplexrun.core.pace import Interval, Turns
from tenplexrun.core.pieces import layout_name
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.snapshots import arena_map
from tenplexrun.errors import LayoutError, StateLostError, UsageError
from tenplexrun.worker import device
from tenplexrun.worker.agent import Agent
from tenplexrun.worker.boundary import Boundary
from tenplexrun.worker.exchange import agree
from tenplexrun.worker.launch import Launch, Place, parallel_from_env
from tenplexrun.worker.placements import check_local, local, spec_of
from tenplexrun.worker.slots import SlotWriter, Snapshot

Flat = Mapping[str, Any]
"""A state dict as DCP flattens it."""


class _Memory:
    """What this process saves to and loads from: one round's."""

    def __init__(self) -> None:
        launch = Launch.from_env(os.environ)
        if not launch.agent:
            raise UsageError(
                "tenplexrun.StorageWriter and StorageReader use the memory of the job's nodes: start the script with "
                "`tenplexrun`, or give torch.distributed.checkpoint a path instead"
            )
        config = parallel_from_env(os.environ, launch.world_size)
        where = device.pick(int(os.environ.get("LOCAL_RANK", "0")))
        self._launch, self._agent = launch, Agent(launch)
        self._place = Place(config, config.coord(launch.rank), where)
        self._boundary: Boundary | None = None
        self._layout, self._step = Layout(()), 0
        self._now: tuple[dict[str, torch.Tensor], dict[str, Any]] = {}, {}

    @functools.cached_property
    def found(self) -> dict[str, Any]:
        """What there is to go on from: see `Agent.restore`; or the durable checkpoint's "url" and "step"."""
        return self._agent.restore(declared=self._boundary is not None)

    def save(self, flat: Flat, step: int | None) -> None:
        """Take a snapshot. Raises LayoutError, UsageError, ArenaFullError; RoundStopped where the round ends."""
        tensors = {_own(name): tensor for name, tensor in flat.items() if isinstance(tensor, torch.Tensor)}
        others = {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}
        consumed = records.whole(others.get("consumed", 0), "`consumed`, the samples read so far,")
        values = plain.encode({durable.DCP: others})
        if self._boundary is None:
            self._begin(tensors, values)
        boundary = self._boundary
        assert boundary is not None
        if changed := sorted({spec.fqn for spec in self._layout.tensors} ^ tensors.keys()):
            name = changed[0].removeprefix(_own(""))
            raise LayoutError(
                f"the state has other tensors than at its first save in this round ({name} came or went); keep them"
            )
        step = self._step + 1 if step is None else step
        if step <= self._step:
            raise UsageError(f"step {step} was saved after step {self._step}; give steps that grow, or none")
        self._step = step
        position = {"step": step, "consumed": consumed}
        self._now = {name: local(tensor).detach() for name, tensor in tensors.items()}, {**values, **position}
        boundary.after(step)

    def _begin(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        launch, place = self._launch, self._place
        specs = tuple(
            spec_of(name, tensor, place.config, {}, None, "first") for name, tensor in sorted(tensors.items())
        )
        own = Layout(specs)
        own.check(place.config)
        for name, tensor in tensors.items():
            check_local(own, name, local(tensor), place)
        store = PrefixStore(f"tenplexrun/{launch.round}", _get_default_store())
        self._layout = agree(store, place.config, launch.rank, own, dict(values))
        slots, _ = self._agent.declare(self._layout, place.config, {})
        self._step = int(self._agent.restore()["step"])
        arena = arena_map(self._layout, place.config, launch.node_ranks)
        threads = launch.threads if place.device.type == "cpu" else 1
        writer = SlotWriter(slots, arena, self._layout, place, threads)
        turns = Turns(Interval(steps=1), self._step, by_word=False)
        self._boundary = Boundary(self._agent, writer, turns, None, lambda _: self._now)

    def loaded(self, step: int, num_bytes: int, began: float) -> None:
        self._agent.event("restored", step=step, num_bytes=num_bytes, seconds=time.monotonic() - began)


@functools.cache
def _memory() -> _Memory:
    return _Memory()


def _own(name: str) -> str:
    """How a tensor of a state dict is called in the arena."""
    return f"{durable.DCP}/{name}"


class StorageWriter(storage.StorageWriter):
    """`dcp.save` takes a snapshot into the nodes' shared memory, at its speed.

    It returns when this rank's part is written; a later one waits until all nodes have committed it. `step` numbers it
    for people, and must grow; by default it counts. Raises UsageError outside the launcher, LayoutError for tensors on
    a mesh that the launcher knows nothing of, or whose names change. Pipeline stages that hold different names need
    `job.state`.
    """

    def __init__(self, step: int | None = None) -> None:
        self._step = step
        self._memory = _memory()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never taken for a path that dcp.save was given

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A name is not needed: there is one newest snapshot."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._memory.save(_flat(planner), self._step)
        self._step = None
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """The nodes commit it by themselves."""


class StorageReader(storage.StorageReader):
    """`dcp.load` fills a state dict from the newest snapshot that was committed, at
    whatever layout this round has; or, where the round began with a durable checkpoint, from that.

    `step`: the snapshot's number; None where there is nothing to go on from. Raises UsageError outside the launcher,
    StateLostError where the round has moved less here than the state dict needs.
    """

    def __init__(self) -> None:
        self._memory = _memory()
        found = self._memory.found
        self._plain: storage.StorageReader | None = None
        self.step: int | None = None
        if "url" in found:
            url = str(found["url"])
            self._plain = FsspecReader(url) if "://" in url else FileSystemReader(url)
        if self._plain is not None or found["snapshot"] is not None:
            self.step = int(found["step"])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A name is not needed: there is one newest snapshot."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        if self._plain is not None:
            return self._plain.read_metadata()
        if self.step is None:
            raise StateLostError("nothing has been saved yet: ask `StorageReader().step is not None` before dcp.load")
        self._began, self._snapshot = time.monotonic(), Snapshot(self._memory.found["index"])
        path = Path(self._memory.found["index"]).with_name(layout_name(self._snapshot.index.snapshot.digest))
        layout = Layout.from_json(json.loads(path.read_bytes()))
        described: dict[str, Any] = {}
        for spec in layout.tensors:
            regions = [piece.region for piece in self._snapshot.pieces(spec.fqn)]
            chunks = [dcp.ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.lengths)) for r in regions]
            properties = dcp.TensorProperties(dtype=getattr(torch, spec.dtype))
            name = spec.fqn.removeprefix(_own(""))
            described[name] = dcp.TensorStorageMetadata(properties, torch.Size(spec.shape), chunks)
        self._values = plain.decode(self._memory.found["values"])[durable.DCP]
        return dcp.Metadata({**described, **dict.fromkeys(self._values, dcp.BytesStorageMetadata())})

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._plain is not None:
            self._plain.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._plain is not None:
            return self._plain.read_data(plan, planner)
        _check_covered(plan, _flat(planner))
        num_bytes = 0
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                content = io.BytesIO()
                torch.save(self._values[name], content)
                content.seek(0)
                planner.load_bytes(item, content)
                continue
            index = item.storage_index.index
            assert index is not None
            source = self._snapshot.view(self._snapshot.pieces(_own(name))[index])
            box = Region(tuple(item.storage_offsets), tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            target.copy_(source[box.slices])
            planner.commit_tensor(item, target)
            num_bytes += target.nbytes
        assert self.step is not None
        self._memory.loaded(self.step, num_bytes, self._began)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _flat(planner: Any) -> Flat:
    found = getattr(planner, "state_dict", None)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{type(planner).__name__} has no flat state dict; take a planner derived from torch's default"
        )
    return found


def _check_covered(plan: LoadPlan, flat: Flat) -> None:
    """Raise StateLostError for a tensor of which something would stay as it is."""
    read: dict[str, list[Region]] = {}
    for item in plan.items:
        if item.type == LoadItemType.TENSOR:
            begin = tuple(item.dest_index.offset or (0,) * len(item.lengths))
            offsets = tuple(a + b for a, b in zip(begin, item.dest_offsets, strict=True))
            read.setdefault(item.dest_index.fqn, []).append(Region(offsets, tuple(item.lengths)))
    for name, tensor in flat.items():
        for chunk in _create_chunk_list(tensor) if isinstance(tensor, torch.Tensor) else ():
            missing = subtract(Region(tuple(chunk.offsets), tuple(chunk.sizes)), read.get(name, ()))
            if missing:
                raise StateLostError(
                    f"tensor {name} {missing[0]} is not on this node: shard it as it was when it was saved"
                )
