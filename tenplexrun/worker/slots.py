"""Between this rank's tensors and the arena: into a mapped slot file, and out of the pieces of a snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tenplexrun.core.layout import Layout, TensorSpec
from tenplexrun.core.pieces import Index, Piece, copies
from tenplexrun.core.regions import Region
from tenplexrun.core.snapshots import Entry
from tenplexrun.errors import LayoutError, StateLostError, StoreError
from tenplexrun.worker import device
from tenplexrun.worker.launch import Place
from tenplexrun.worker.placements import local

Tensors = Mapping[str, torch.Tensor]
"""By fqn."""


class SlotWriter:
    """This rank's entries of the node's two slot files. Raises StoreError when a file is not what was agreed."""

    def __init__(self, paths: Sequence[str], entries: Sequence[Entry], num_bytes: int) -> None:
        self._entries = tuple(entries)
        self._slots = [_mapped(Path(path), "r+") for path in paths] if num_bytes else []
        for path, slot in zip(paths, self._slots, strict=False):
            if slot.nbytes < num_bytes:
                raise StoreError(f"slot {path} has {slot.nbytes} bytes, the layout needs {num_bytes}; restart the run")

    def write(self, slot: int, tensors: Tensors) -> None:
        """Copy local tensors to their places."""
        for entry in self._entries:
            data = device.bytes_of(tensors[entry.fqn])
            if data.nbytes != entry.num_bytes:
                raise LayoutError(
                    f"tensor {entry.fqn} had {entry.num_bytes} bytes when it was declared and has {data.nbytes} now; "
                    "state must keep its shapes and types during a round"
                )
            np.copyto(self._slots[slot][entry.offset : entry.offset + entry.num_bytes], data)


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
            spec = layout.spec(fqn)
            region = spec.region(place.config, place.coord)
            if region is None or (not region.is_empty and fqn not in self._pieces):
                continue
            if not region.is_empty:
                num_bytes += self._fill_one(spec, region, local(target))
            filled[fqn] = target
        device.synchronize(place.device)
        return filled, num_bytes

    def _fill_one(self, spec: TensorSpec, region: Region, target: torch.Tensor) -> int:
        pieces = self._pieces[spec.fqn]
        for piece in pieces:
            if piece.dtype != spec.dtype or not spec.whole.contains(piece.region):
                raise LayoutError(
                    f"tensor {spec.fqn} was saved as {piece.dtype} {piece.region}, but is {spec.dtype} of shape "
                    f"{spec.shape} now; restore the same model, or start a new run"
                )
        try:
            moves = copies(region, pieces)
        except LayoutError as error:
            raise StateLostError(f"tensor {spec.fqn}: {error}; the snapshot on this node is not complete") from None
        with torch.no_grad():
            for move in moves:
                target[move.dest.slices].copy_(self._view(move.piece)[move.source.slices])
        return region.num_elements * target.element_size()

    def _view(self, piece: Piece) -> torch.Tensor:
        if piece.file not in self._files:
            # "c": private pages, so that torch may have a writable view of what nobody may change
            self._files[piece.file] = _mapped(self._folder / piece.file, "c")
        data = self._files[piece.file][piece.offset : piece.offset + piece.num_bytes]
        return device.tensor_of(data, piece.dtype, piece.region.lengths)


def _mapped(path: Path, mode: str) -> device.Bytes:
    try:
        return np.asarray(np.memmap(path, dtype=np.uint8, mode=mode))  # type: ignore[call-overload]
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot map {path}: {error}; is the node's store alive?") from error
