"""Between this rank's tensors and the arena: into a mapped slot file, and out of the pieces of a snapshot."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tenplexrun.core.arena import ArenaMap, Entry
from tenplexrun.core.layout import Layout, Local, Part, TensorSpec
from tenplexrun.core.pieces import Index, Piece, copies
from tenplexrun.core.regions import Region
from tenplexrun.errors import LayoutError, StateLostError, StoreError
from tenplexrun.worker import device
from tenplexrun.worker.launch import Place
from tenplexrun.worker.maps import Maps
from tenplexrun.worker.placements import local
from tenplexrun.worker.staging import Copies, Stager, copies_of

Tensors = Mapping[str, torch.Tensor]
"""By fqn."""
Move = tuple[torch.Tensor, torch.Tensor]
"""Where to, and what from."""


class SlotWriter:
    """This rank's entries of the node's two slot files, written by `threads`.

    `copies`: the device's, where tensors are not in the host's memory. Raises StoreError when a file is not what was
    agreed.
    """

    def __init__(
        self,
        paths: Sequence[str],
        arena: ArenaMap,
        layout: Layout,
        place: Place,
        threads: int = 1,
        copies: Copies | None = None,
    ) -> None:
        copies = copies or copies_of(place.device)
        self._stager = Stager(copies) if copies is not None else None
        rank = place.config.rank(place.coord)
        own = [(entry, _held(layout, entry.fqn, place)) for entry in arena.entries if entry.writer == rank]
        self._threads = threads
        self._slots: list[list[tuple[Entry, Local, torch.Tensor]]] = []
        for path in map(Path, paths if arena.num_bytes else ()):
            slot = Maps(path.parent, "r+").get(path.name)
            if slot.nbytes < arena.num_bytes:
                raise StoreError(f"slot {path} has {slot.nbytes} bytes, needs {arena.num_bytes}; restart the run")
            self._slots.append([(entry, held, _view(slot, entry)) for entry, held in own])

    def ranges(self) -> Iterator[device.Bytes]:
        """All that this rank writes."""
        return (device.bytes_of(dest) for slot in self._slots for _, _, dest in slot)

    def write(self, slot: int, tensors: Tensors) -> None:
        """Copy local tensors to their places. Raises LayoutError when one has changed its shape or type."""
        places = self._places(slot, tensors)
        if self._stager is not None:
            self._stager.put(
                (device.bytes_of(dest), device.flat(tensor if held.is_plain else _gathered(region, tensor, held)))
                for region, held, tensor, dest in places
            )
            return
        moves: list[Move] = []
        for region, held, tensor, dest in places:
            moves += [(dest.view(held.shape), tensor)] if held.is_plain else _parted(dest, region, tensor, held)
        _copy_all(moves, self._threads)

    def _places(self, slot: int, tensors: Tensors) -> Iterator[tuple[Region, Local, torch.Tensor, torch.Tensor]]:
        for entry, held, dest in self._slots[slot] if self._slots else ():
            tensor = tensors[entry.fqn].detach()
            if tensor.shape != held.shape or device.dtype_name(tensor.dtype) != entry.dtype:
                raise LayoutError(
                    f"tensor {entry.fqn} was declared as {entry.dtype} {held.shape}, but is {tensor.dtype} "
                    f"{tuple(tensor.shape)} now; state must keep its shapes and types during a round"
                )
            yield entry.region, held, tensor, dest


class Snapshot:
    """The local pieces of one snapshot, as an index file lists them. `maps`: those of its folder that exist already."""

    def __init__(self, index_path: str, maps: Maps | None = None) -> None:
        path = Path(index_path)
        try:
            self.index = Index.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read the snapshot's index {path}: {error}") from error
        self.maps = maps or Maps(path.parent, "c")
        self._pieces: dict[str, list[Piece]] = {}
        for piece in self.index.pieces:
            self._pieces.setdefault(piece.fqn, []).append(piece)

    def pieces(self, fqn: str) -> Sequence[Piece]:
        """What of a tensor is here; pieces may overlap."""
        return self._pieces.get(fqn, [])

    def view(self, piece: Piece) -> torch.Tensor:
        """Its region, in the mapped file."""
        return _view(self.maps.get(piece.file), piece)

    def ranges(self, layout: Layout, place: Place) -> Iterator[device.Bytes]:
        """What this rank will read, as far as it is here, each range from its first to its last byte."""
        for fqn, pieces in self._pieces.items():
            held = layout.local(fqn, place.config, place.coord)
            for part, piece in itertools.product(held.parts if held is not None else (), pieces):
                common = part.region.intersect(piece.region)
                if common is not None:
                    box = self.view(piece)[common.relative_to(piece.region).slices]
                    last = sum((length - 1) * stride for length, stride in zip(box.shape, box.stride(), strict=True))
                    yield device.bytes_of(box.as_strided((last + 1,), (1,)))

    def fill(
        self, targets: Tensors, layout: Layout, place: Place, threads: int = 1
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Write what this rank needs of each target's tensor into it, by so many threads.

        Returns the targets of which the snapshot has pieces, and the bytes copied; names without any are left out.
        Raises StateLostError that names a gap, LayoutError where shape or type are not the saved ones.
        """
        filled, num_bytes = {}, 0
        moves: list[Move] = []
        later: list[Move] = []
        for fqn, target in targets.items():
            held = layout.local(fqn, place.config, place.coord)
            if held is None or (held.parts and fqn not in self._pieces):
                continue
            own = local(target).detach()
            dense = own.contiguous()
            moves += self._moves(layout.spec(fqn), held, dense)
            if dense.data_ptr() != own.data_ptr():
                later.append((own, dense))
            num_bytes += sum(part.region.num_elements for part in held.parts) * own.element_size()
            filled[fqn] = target
        _copy_all(moves, threads)
        _copy_all(later, threads)
        device.synchronize(place.device)
        return filled, num_bytes

    def _moves(self, spec: TensorSpec, held: Local, dense: torch.Tensor) -> Iterator[Move]:
        pieces = self.pieces(spec.fqn)
        for piece in pieces:
            if piece.dtype != spec.dtype or not spec.whole.contains(piece.region):
                raise LayoutError(
                    f"tensor {spec.fqn} was saved as {piece.dtype} {piece.region}, but is {spec.dtype} of shape "
                    f"{spec.shape} now; restore the same model, or start a new run"
                )
        for part, view in _parts(dense, held):
            try:
                found = copies(part.region, pieces)
            except LayoutError as error:
                raise StateLostError(f"tensor {spec.fqn}: {error}; the snapshot on this node is not complete") from None
            for copy in found:
                yield view[copy.dest.slices], self.view(copy.piece)[copy.source.slices]


def _view(file: device.Bytes, where: Entry | Piece) -> torch.Tensor:
    """Its region in a mapped file."""
    data = file[where.offset : where.offset + where.num_bytes]
    return device.tensor_of(data, where.dtype, where.region.lengths)


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
    _copy_all(list(_parted(dest, region, tensor, held)), 1)
    return dest


def _parted(dest: torch.Tensor, region: Region, tensor: torch.Tensor, held: Local) -> Iterator[Move]:
    """What fills `dest`, which holds the canonical box `region`, from the boxes of a local tensor."""
    for part, view in _parts(tensor.contiguous(), held):
        common = part.region.intersect(region)
        if common is not None:
            yield dest[common.relative_to(region).slices], view[common.relative_to(part.region).slices]


def _copy_all(moves: Sequence[Move], threads: int) -> None:
    """The largest first; each thread takes the next one."""
    todo = iter(sorted(moves, key=lambda move: -move[0].numel()))

    def work() -> None:
        for dest, source in todo:
            device.copy(dest, source)

    if threads == 1 or len(moves) < 2:
        work()
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
