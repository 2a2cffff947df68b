"""A durable checkpoint's writing side: write this node's share of a snapshot, and publish what all have written.

Nothing is a checkpoint before its `.metadata` is there, which appears last, by rename.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tenplexrun.core import durable
from tenplexrun.core import values as plain
from tenplexrun.core.layout import Layout
from tenplexrun.core.regions import Region, subtract
from tenplexrun.errors import CheckpointError
from tenplexrun.worker import device
from tenplexrun.worker.dcp import Directory, Tensor, metadata_bytes
from tenplexrun.worker.folders import METADATA, Folder, Stored, reason
from tenplexrun.worker.shares import Share

Record = dict[str, Any]
DATA = ".distcp"
WRITTEN = re.compile(rf"__\d+_[0-9a-f]{{8}}{re.escape(DATA)}|{re.escape(METADATA)}\.[0-9a-f]{{8}}\.tmp")
"""Names that only we give; plain torch's are __0_0.distcp."""


def write(
    share: Share, folder: Folder, number: int, tag: str, groups: Mapping[str, int], cancelled: threading.Event
) -> Record:
    """Write part `number` of a checkpoint. Part 0 has the values. Returns the part's record: see `prepare`.

    `groups`: see `leaves`. Raises CheckpointError; then nothing of the part is left, as far as that is possible.
    """
    name = f"__{number}_{tag}{DATA}"
    checksums = {f"{piece.fqn} {piece.region}": f"{piece.checksum:016x}" for piece, _ in share.pieces}
    values: list[tuple[durable.Path, Any]] = [((durable.OWN, f"checksums.{number}"), json.dumps(checksums))]
    values += leaves(share.values, groups) if number == 0 else []
    try:
        folder.fs.makedirs(folder.path, exist_ok=True)
        with _new_file(folder, name) as file:
            written = [[list(path), *_append(file, value)] for path, value in values]
            regions = []
            for piece, data in share.pieces:
                if cancelled.is_set():
                    raise CheckpointError("the round has ended")
                tensor = device.tensor_of(data, piece.dtype, piece.region.lengths)
                regions.append([piece.fqn, piece.region.to_json(), *_append(file, tensor)])
            size = file.tell()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder.url}/{name} cannot be written: {reason(error)}") from error
    return {"file": name, "num_bytes": size, "regions": regions, "values": written}


def leaves(values: Record, groups: Mapping[str, int]) -> list[tuple[durable.Path, Any]]:
    """A snapshot's values as plain torch has them: places in the nested state dict, and plain values.

    `groups`: the optimizer's param group of each parameter.
    """
    nested = plain.decode(values)
    found: list[tuple[durable.Path, Any]] = [((durable.OWN, "values"), json.dumps(values))]
    found += [((name,), nested[name]) for name in ("step", "consumed") if name in nested]
    for number, group in enumerate(nested.get("optimizer", ())):
        names = sorted(fqn for fqn, own in groups.items() if own == number)
        whole = {"params": names, **group}
        found += [(("optimizer", "param_groups", number, key), value) for key, value in whole.items()]
    found += list(_flat(("scheduler",), nested.get("scheduler", {})))
    named = nested.get(durable.DCP, {})  # as `dcp.save` was given them, "step" maybe among them
    return [each for each in found if each[0][0] not in named] + [((name,), value) for name, value in named.items()]


def _flat(path: durable.Path, value: Any) -> Iterator[tuple[durable.Path, Any]]:
    """As DCP flattens: mappings, and lists that hold mappings, are entered."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat((*path, str(key)), inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat((*path, index), inner)
    else:
        yield path, value


def prepare(folder: Folder, tag: str, layout: Layout, parts: Sequence[Record]) -> None:
    """Check that `parts` (records of `write`) are all there and whole, and write the metadata under a name of its own.

    A part: {"file", "num_bytes", "regions": [[fqn, region, offset, length]], "values": [[path, offset, length]]}.
    Raises CheckpointError.
    """
    directory = _directory(layout, parts)
    folder.fs.invalidate_cache()
    for part in parts:
        try:
            size = folder.fs.info(folder.at(part["file"]))["size"]
        except Exception as error:
            raise CheckpointError(
                f"{folder.url}/{part['file']} was written by a node, but is not seen here ({reason(error)}); all nodes "
                "need the same --checkpoint-dir"
            ) from error
        if size != part["num_bytes"]:
            raise CheckpointError(f"{folder.url}/{part['file']} has {size} bytes, {part['num_bytes']} were written")
    try:
        with _new_file(folder, _prepared(tag)) as file:
            file.write(metadata_bytes(directory))
    except Exception as error:
        raise CheckpointError(f"{folder.url}/{METADATA} cannot be written: {reason(error)}") from error


def publish(folder: Folder, tag: str) -> None:
    """What was prepared is a checkpoint from now on. Raises CheckpointError."""
    try:
        folder.fs.mv(folder.at(_prepared(tag)), folder.at(METADATA))
    except Exception as error:
        raise CheckpointError(f"{folder.url}/{METADATA} cannot be written: {reason(error)}") from error


def prune(home: Folder, step: int, files: Sequence[str], keep: int, last: bool) -> list[int]:
    """After the checkpoint of `step` was published, which has these `files`: remove what torn ones have left, and those
    that are older than the `keep` newest ones. Returns the steps of these. Raises CheckpointError.

    `last`: no other one will be written; else one of a later step may be under way, which looks like a torn one.
    Nothing goes but what has a name of ours: a folder step-5, or a file in one, may be somebody else's.
    """
    try:
        found = {number: home.sub(name) for name in home.names() if (number := durable.step_of(name)) is not None}
        own = {number: names for number, folder in found.items() if (names := _own(folder))}
        whole = {number for number, names in own.items() if METADATA in names}
        old = durable.retired((number for number in whole if number <= step), keep)
        for number in old:
            found[number].fs.rm(found[number].at(METADATA))
        torn = {number for number in {*own} - whole if number < step or last}
        for number in torn | {*old}:
            _remove(found[number], own[number] - {METADATA})
        _remove(found[step], own[step] - {METADATA, *files})
    except Exception as error:
        raise CheckpointError(f"old checkpoints in {home.url} cannot be removed: {reason(error)}") from error
    return old


def _own(folder: Folder) -> set[str]:
    """What a run has written there; nothing if no data of ours is: then the metadata is not ours either."""
    names = {*folder.names()}
    own = {name for name in names if WRITTEN.fullmatch(name)}
    return own | names & {METADATA} if own else own


def _remove(folder: Folder, names: set[str]) -> None:
    """These files, and the folder, if they are all that it has."""
    if {*folder.names()} <= names:
        folder.fs.rm(folder.path, recursive=True)
        return
    for name in names:
        folder.fs.rm(folder.at(name))


def _directory(layout: Layout, parts: Sequence[Record]) -> Directory:
    chunks: dict[str, list[Stored]] = {spec.fqn: [] for spec in layout.tensors}
    values, paths = {}, {}
    for part in parts:
        for fqn, region, offset, length in part["regions"]:
            chunks[fqn].append(Stored(part["file"], offset, length, Region.from_json(region)))
        for path, offset, length in part["values"]:
            values[durable.key_of(path)] = Stored(part["file"], offset, length)
            paths[durable.key_of(path)] = tuple(path)
    tensors = {}
    for fqn, path in durable.paths_of(layout).items():
        spec, held = layout.spec(fqn), sorted(chunks[fqn], key=lambda chunk: (chunk.region, chunk.file))
        missing = subtract(spec.whole, [chunk.region for chunk in held if chunk.region is not None])
        if missing and spec.at is not None:
            continue
        if missing:
            raise CheckpointError(f"no node has written {fqn} {missing[0]}")
        tensors[durable.key_of(path)] = Tensor(spec.dtype, spec.shape, tuple(held))
        paths[durable.key_of(path)] = path
    return Directory(tensors, values, paths)


@contextlib.contextmanager
def _new_file(folder: Folder, name: str) -> Iterator[Any]:
    """A file that is on the disk when this ends, or is gone."""
    try:
        with folder.fs.open(folder.at(name), "wb") as file:
            yield file
            file.flush()
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(Exception):
            folder.fs.rm(folder.at(name))
        raise


def _append(file: Any, value: Any) -> tuple[int, int]:
    """Offset and length of what `torch.save` makes of it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    offset = file.tell()
    file.write(buffer.getbuffer())
    return offset, buffer.tell()


def _prepared(tag: str) -> str:
    return f"{METADATA}.{tag}.tmp"
