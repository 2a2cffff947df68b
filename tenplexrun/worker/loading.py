"""A durable checkpoint's reading side: which one to go on from, and a node's part of it into a slot of its arena.

Checkpoints that plain torch has written will do, too: see `worker.foreign`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from tenplexrun.core import durable
from tenplexrun.core.arena import Entry, arena_map
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.regions import Region, subtract
from tenplexrun.errors import CheckpointError
from tenplexrun.worker import device
from tenplexrun.worker.dcp import Directory, load, read_directory
from tenplexrun.worker.folders import Folder, Stored, reason
from tenplexrun.worker.foreign import Names, check, foreign_names, foreign_values, own_names, whole_number

Record = dict[str, Any]
THREADS = 4


def newest(
    candidates: Sequence[tuple[int, str]], refused: Collection[str]
) -> tuple[durable.Checkpoint | None, list[str]]:
    """The first of `candidates` (step, folder) that can be read; none if there are none.

    `refused` folders are passed over. Returns it with what is to be said of others. Raises CheckpointError when there
    are checkpoints, and none can be read.
    """
    problems: list[str] = []
    for step, url in candidates:
        try:
            if url in refused:
                raise CheckpointError(f"{url} could not be loaded")
            found = _check(Folder(url), step)
            return found, [f"{problem}; the checkpoint before it is taken" for problem in problems]
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"no checkpoint can be read: {'; '.join(problems)}. Mend or remove them, or name another --checkpoint-dir"
        )
    return None, []


def _check(folder: Folder, step: int) -> durable.Checkpoint:
    """Raises CheckpointError unless all files are there and long enough. `step`: 0 if it is not known."""
    directory = read_directory(folder)
    for name, size in directory.files.items():
        try:
            found = folder.fs.info(folder.at(name))["size"]
        except Exception as error:
            raise CheckpointError(f"{folder.url}/{name} is missing ({reason(error)})") from error
        if found < size:
            raise CheckpointError(f"{folder.url}/{name} has {found} bytes, needs {size}")
    step = step or whole_number(folder, directory, "step")
    return durable.Checkpoint(folder.url, step, whole_number(folder, directory, "consumed"))


@dataclass(frozen=True, slots=True)
class Loaded:
    """`values`: as a snapshot has them. `without`: random streams that the checkpoint has not."""

    step: int
    consumed: int
    values: Record
    without: tuple[str, ...]
    num_bytes: int


def read(
    url: str,
    step: int,
    layout: Layout,
    config: ParallelConfig,
    ranks: Iterable[int],
    groups: Mapping[str, int],
    slot: Path,
) -> Loaded:
    """Fill `slot` with what these global ranks hold of the checkpoint of `step`: each chunk is read once.

    `groups`: the optimizer's param group of each parameter. Raises LayoutError, with the names, where the checkpoint
    is of another model; CheckpointError where it cannot be read, or a checksum does not hold.
    """
    folder = Folder(url)
    directory = read_directory(folder)
    names = own_names(layout) if durable.VALUES in directory.values else foreign_names(layout, directory)
    absent = check(url, directory, layout, names)
    if durable.VALUES in directory.values:
        values = json.loads(load(folder.read(directory.values[durable.VALUES]), f"the values of {url}"))
    else:
        found = foreign_values(folder, directory, names, groups)
        values = {**found, "step": step, "consumed": whole_number(folder, directory, "consumed")}
    streams = tuple(sorted(fqn for fqn in absent if layout.spec(fqn).at is not None))
    entries = [entry for entry in arena_map(layout, config, ranks).entries if entry.fqn not in streams]
    slots = Slots(np.asarray(np.memmap(slot, dtype=np.uint8, mode="r+")), entries)
    for fqn in absent - {*streams}:
        slots.put_all(fqn, fqn in names.existing)
    _fill(Chunks(folder, directory), names, sorted({entry.fqn for entry in entries} - absent), slots)
    return Loaded(step, int(values["consumed"]), values, streams, sum(entry.num_bytes for entry in entries))


class Slots:
    """The entries of a slot file, by tensor."""

    def __init__(self, data: device.Bytes, entries: Iterable[Entry]) -> None:
        self._views: dict[str, list[tuple[Region, torch.Tensor]]] = {}
        for entry in entries:
            part = data[entry.offset : entry.offset + entry.num_bytes]
            view = device.tensor_of(part, entry.dtype, entry.region.lengths)
            self._views.setdefault(entry.fqn, []).append((entry.region, view))

    def regions(self, fqn: str) -> list[Region]:
        return [region for region, _ in self._views.get(fqn, ())]

    def put(self, fqn: str, region: Region, tensor: torch.Tensor) -> None:
        """Copy what is wanted of `tensor`, which is `region` of `fqn`."""
        for own, view in self._views.get(fqn, ()):
            common = own.intersect(region)
            if common is not None:
                view[common.relative_to(own).slices].copy_(tensor[common.relative_to(region).slices])

    def put_all(self, fqn: str, value: Any) -> None:
        for _, view in self._views.get(fqn, ()):
            view.fill_(value)


class Chunks:
    """Reads chunks, and proves them where the checkpoint has checksums."""

    def __init__(self, folder: Folder, directory: Directory) -> None:
        self._folder, self.directory = folder, directory
        self._checksums: dict[str, str] = {}
        for key, stored in directory.values.items():
            if key.startswith(durable.CHECKSUMS):
                self._checksums.update(json.loads(load(folder.read(stored), f"{key} of {folder.url}")))

    def tensor(self, fqn: str, chunk: Stored, dtype: str) -> torch.Tensor:
        """Raises CheckpointError where it is not what it should be."""
        where = f"{fqn} {chunk.region} of {self._folder.url}"
        tensor: torch.Tensor = load(self._folder.read(chunk), where)
        assert chunk.region is not None
        fits = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == chunk.region.lengths
        if not fits or device.dtype_name(tensor.dtype) != dtype:
            raise CheckpointError(f"{where} is not what its metadata says")
        checksum = self._checksums.get(f"{fqn} {chunk.region}")
        if checksum is not None and f"{xxhash.xxh3_64_intdigest(device.bytes_of(tensor).data):016x}" != checksum:
            raise CheckpointError(f"{where} fails its checksum: {chunk.file} is damaged")
        return tensor

    def value(self, key: str) -> Any:
        return load(self._folder.read(self.directory.values[key]), f"{key} of {self._folder.url}")


def _fill(chunks: Chunks, names: Names, fqns: Iterable[str], slots: Slots) -> None:
    """Raises CheckpointError for gaps, too."""

    def one(fqn: str) -> None:
        key, wanted = names.keys[fqn], slots.regions(fqn)
        stored = chunks.directory.tensors.get(key)
        if stored is None:
            slots.put_all(fqn, chunks.value(key))
            return
        held = [(chunk.region, chunk) for chunk in stored.chunks if chunk.region is not None]
        for region in wanted:
            missing = subtract(region, [own for own, _ in held])
            if missing:
                raise CheckpointError(f"{fqn} {missing[0]} is in no file of the checkpoint")
        for own, chunk in held:
            if any(own.intersect(region) is not None for region in wanted):
                slots.put(fqn, own, chunks.tensor(fqn, chunk, stored.dtype))

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(one, fqns):
            pass
