"""Between this rank's tensors and the arena: into a mapped slot file, and out of the pieces of a snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tenplexrun.core.layout import Layout, Local, Part, TensorSpec
from tenplexrun.core.pieces import Index, Piece, copies
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import ArenaMap, Entry
from tenplexrun.errors import LayoutError, StateLostError, StoreError
from tenplexrun.worker import device
from tenplexrun.worker.launch import Place
from tenplexrun.worker.placements import local
from tenplexrun.worker.staging import Copies, Stager, copies_of

Tensors = Mapping[str, torch.Tensor]
"""By fqn."""


class SlotWriter:
    """This rank's entries of the node's two slot files. Raises StoreError when a file is not what was agreed.

    `copies`: the device's, where tensors are not in the host's memory.
    """

    def __init__(
        self, paths: Sequence[str], arena: ArenaMap, layout: Layout, place: Place, copies: Copies | None = None
    ) -> None:
        copies = copies or copies_of(place.device)
        self._stager = Stager(copies) if copies is not None else None
        rank = place.config.rank(place.coord)
        self._entries = [(entry, _held(layout, entry.fqn, place)) for entry in arena.entries if entry.writer == rank]
        self._slots = [_mapped(Path(path), "r+") for path in paths] if arena.num_bytes else []
        for path, slot in zip(paths, self._slots, strict=False):
            if slot.nbytes < arena.num_bytes:
                raise StoreError(f"slot {path} has {slot.nbytes} bytes, needs {arena.num_bytes}; restart the run")

    def write(self, slot: int, tensors: Tensors) -> None:
        """Copy local tensors to their places. Raises LayoutError when one has changed its shape or type."""
        if self._stager is not None:
            self._stager.put(
                (data, device.flat(tensor if held.is_plain else _gathered(entry.region, tensor, held)))
                for entry, held, tensor, data in self._places(slot, tensors)
            )
            return
        for entry, held, tensor, data in self._places(slot, tensors):
            if held.is_plain:
                np.copyto(data, device.bytes_of(tensor))
            else:
                _gather(device.tensor_of(data, entry.dtype, entry.region.lengths), entry.region, tensor, held)

    def _places(self, slot: int, tensors: Tensors) -> Iterator[tuple[Entry, Local, torch.Tensor, device.Bytes]]:
        for entry, held in self._entries:
            tensor = tensors[entry.fqn]
            if tuple(tensor.shape) != held.shape or device.dtype_name(tensor.dtype) != entry.dtype:
                raise LayoutError(
                    f"tensor {entry.fqn} was declared as {entry.dtype} {held.shape}, but is {tensor.dtype} "
                    f"{tuple(tensor.shape)} now; state must keep its shapes and types during a round"
                )
            yield entry, held, tensor, self._slots[slot][entry.offset : entry.offset + entry.num_bytes]


class Snapshot:
    """The local pieces of one snapshot, as an index file lists them."""

    def __init__(self, index_path: str) -> None:
        path = Path(index_path)
        try:
            self.index = Index.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read the snapshot's index {path}: {error}") from error
        self._folder = path.parent
        self._files: dict[str, device.Bytes] = {}
        self._pieces: dict[str, list[Piece]] = {}
        for piece in self.index.pieces:
            self._pieces.setdefault(piece.fqn, []).append(piece)

    def fill(self, targets: Tensors, layout: Layout, place: Place) -> tuple[dict[str, torch.Tensor], int]:
        """Write what this rank needs of each target's tensor into it.

        Returns the targets of which the snapshot has pieces, and the bytes copied; names without any are left out.
        Raises StateLostError that names a gap, LayoutError where shape or type are not the saved ones.
        """
        filled, num_bytes = {}, 0
        for fqn, target in targets.items():
            held = layout.local(fqn, place.config, place.coord)
            if held is None or (held.parts and fqn not in self._pieces):
                continue
            num_bytes += self._fill_one(layout.spec(fqn), held, local(target))
            filled[fqn] = target
        device.synchronize(place.device)
        return filled, num_bytes

    def _fill_one(self, spec: TensorSpec, held: Local, target: torch.Tensor) -> int:
        pieces = self._pieces.get(spec.fqn, [])
        for piece in pieces:
            if piece.dtype != spec.dtype or not spec.whole.contains(piece.region):
                raise LayoutError(
                    f"tensor {spec.fqn} was saved as {piece.dtype} {piece.region}, but is {spec.dtype} of shape "
                    f"{spec.shape} now; restore the same model, or start a new run"
                )
        dense = target.detach().contiguous()
        for part, view in _parts(dense, held):
            try:
                moves = copies(part.region, pieces)
            except LayoutError as error:
                raise StateLostError(f"tensor {spec.fqn}: {error}; the snapshot on this node is not complete") from None
            for move in moves:
                view[move.dest.slices].copy_(self._view(move.piece)[move.source.slices])
        if dense.data_ptr() != target.data_ptr():
            target.detach().copy_(dense)
        return sum(part.region.num_elements for part in held.parts) * target.element_size()

    def _view(self, piece: Piece) -> torch.Tensor:
        if piece.file not in self._files:
            # "c": private pages, so that torch may have a writable view of what nobody may change
            self._files[piece.file] = _mapped(self._folder / piece.file, "c")
        data = self._files[piece.file][piece.offset : piece.offset + piece.num_bytes]
        return device.tensor_of(data, piece.dtype, piece.region.lengths)


def _held(layout: Layout, fqn: str, place: Place) -> Local:
    held = layout.local(fqn, place.config, place.coord)
    assert held is not None
    return held


def _parts(dense: torch.Tensor, held: Local) -> Iterator[tuple[Part, torch.Tensor]]:
    """The canonical boxes of a dense local tensor, as views of it."""
    for part in held.parts:
        start = dense.storage_offset() + part.offset
        yield part, dense.as_strided(part.region.lengths, part.strides, start)


def _gathered(region: Region, tensor: torch.Tensor, held: Local) -> torch.Tensor:
    """The canonical box `region` of a local tensor, on its own device."""
    dest = torch.empty(region.lengths, dtype=tensor.dtype, device=tensor.device)
    _gather(dest, region, tensor, held)
    return dest


def _gather(dest: torch.Tensor, region: Region, tensor: torch.Tensor, held: Local) -> None:
    """Fill `dest`, which holds the canonical box `region`, from the boxes of a local tensor."""
    for part, view in _parts(tensor.detach().contiguous(), held):
        common = part.region.intersect(region)
        if common is not None:
            dest[common.relative_to(region).slices].copy_(view[common.relative_to(part.region).slices])


def _mapped(path: Path, mode: str) -> device.Bytes:
    try:
        return np.asarray(np.memmap(path, dtype=np.uint8, mode=mode))  # type: ignore[call-overload]
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot map {path}: {error}; is the node's store alive?") from error
