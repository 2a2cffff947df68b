"""The format of torch.distributed.checkpoint (DCP): its metadata file, read and written without trusting a pickle.

A checkpoint is a folder with data files and `.metadata`, a pickle of `torch.distributed.checkpoint.metadata.Metadata`:
for each flat name the tensor's size, type and chunks, and for each chunk a file and a range of its bytes, which
`torch.load` reads. Values that are no tensors are such ranges, too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

from tenplexrun.core.regions import Region
from tenplexrun.errors import CheckpointError
from tenplexrun.worker.folders import METADATA, Folder, Stored, reason

ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}
"""What a metadata file may name, beside torch's element types."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs")


@dataclass(frozen=True, slots=True)
class Tensor:
    """`dtype`: torch's name of it without "torch."."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Directory:
    """What a checkpoint holds, by flat name. `paths`: where each stands in the nested state dict, if that is known."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Stored]
    paths: Mapping[str, tuple[str | int, ...]]

    @property
    def files(self) -> dict[str, int]:
        """The least size of each data file."""
        sizes: dict[str, int] = {}
        for stored in (*self.values.values(), *(chunk for tensor in self.tensors.values() for chunk in tensor.chunks)):
            sizes[stored.file] = max(sizes.get(stored.file, 0), stored.offset + stored.length)
        return sizes


def load(data: bytes, what: str) -> Any:
    """A tensor or a plain value. Runs no code that the bytes name. Raises CheckpointError."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read: {str(error).partition(chr(10))[0]}") from error


def read_directory(folder: Folder) -> Directory:
    """Raises CheckpointError when the metadata is missing, torn, of another format, or wants to run something."""
    try:
        content = folder.fs.cat_file(folder.at(METADATA))
        return _directory(_Unpickler(io.BytesIO(content)).load())
    except Exception as error:  # a torn pickle raises almost anything
        raise CheckpointError(f"{folder.url}/{METADATA} cannot be read: {reason(error)}") from error


def _directory(metadata: Any) -> Directory:
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError("it is no metadata of a DCP file system checkpoint")
    values: dict[str, Stored] = {}
    chunks: dict[str, list[Stored]] = {}
    sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} was written through an extension ({info.transform_descriptors})")
        described = metadata.state_dict_metadata[index.fqn]
        if isinstance(described, dcp.BytesStorageMetadata):
            values[index.fqn] = Stored(info.relative_path, info.offset, info.length)
            continue
        offset = tuple(index.offset) if index.offset is not None else (0,) * len(described.size)
        if index.fqn not in sizes:
            sizes[index.fqn] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in described.chunks}
        stored = Stored(info.relative_path, info.offset, info.length, Region(offset, sizes[index.fqn][offset]))
        chunks.setdefault(index.fqn, []).append(stored)
    tensors = {
        name: Tensor(
            str(described.properties.dtype).removeprefix("torch."), tuple(described.size), tuple(chunks.get(name, ()))
        )
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, dcp.TensorStorageMetadata)
    }
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return Directory(tensors, values, {str(name): tuple(path) for name, path in paths.items()})


def metadata_bytes(directory: Directory) -> bytes:
    """The content of `.metadata`."""
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, tensor in sorted(directory.tensors.items()):
        properties = dcp.TensorProperties(dtype=getattr(torch, tensor.dtype))
        parts = [
            dcp.ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.lengths))
            for region in _regions(tensor.chunks)
        ]
        described[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), parts)
        for index, (chunk, region) in enumerate(zip(tensor.chunks, _regions(tensor.chunks), strict=True)):
            storage[dcp.MetadataIndex(name, region.offsets, index)] = _info(chunk)
    for name, stored in sorted(directory.values.items()):
        described[name] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(name)] = _info(stored)
    metadata = dcp.Metadata(described, dict(directory.paths), storage, dcp.StorageMeta())
    if hasattr(dcp_files, "CURRENT_DCP_VERSION"):  # from torch 2.8 on
        metadata.version = dcp_files.CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def _regions(chunks: Iterable[Stored]) -> list[Region]:
    return [chunk.region for chunk in chunks if chunk.region is not None]


def _info(stored: Stored) -> Any:
    return dcp_files._StorageInfo(stored.file, stored.offset, stored.length)
