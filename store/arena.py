"""The arena: what one node holds of the job's state, in files of one folder of shared memory.

    slot-<round>-<0|1>.bin               the two slots of a round, written by workers through mmap (core `arena_map`);
                                         behind their part that of the other nodes for which this one is a buddy
    pull-<round>-<n>.bin                 regions that came from peers when that round's second slot was taken
    snapshot-<round>-<step>-<digest>.json   index of a sealed snapshot (`core.pieces.Index`: the format is there)
    layout-<digest>.json                 layouts of all these
    round.json                           the open round: {"v": 2, "round", "digest", "claim", "buddy"}

A snapshot exists once its index does, which appears by rename: whatever dies when, a file that no index names
is garbage (but for the open round's slots) and the next start removes it. An index only lists pieces whose
checksums held; a copy that fails its checksum is no copy.

Which files stay: the open round's slots, and all that a snapshot needs. A commit drops the snapshots that are
older, so the source of a recovery stays until the new round's first commit. Slots that no snapshot needs any more
are renamed into those of the next round: their pages exist already.

What a round's start needs from peers goes into its second slot, before the round is open: the first snapshot goes into
the other one, and once that is committed nobody needs what came. So from a round's start to its first commit there are
at most its own two slots and those of the round before that a snapshot still needs (one, unless the last one made was
not committed yet); before and after, two. A pull takes no memory beside these, unless it brings more than a slot holds.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import xxhash

from tenplexrun.core import records
from tenplexrun.core.arena import Entry
from tenplexrun.core.layout import Layout
from tenplexrun.core.pieces import Index, Piece, index_name, layout_name
from tenplexrun.core.records import Record
from tenplexrun.core.regions import Region, subtract
from tenplexrun.core.replicas import Groups, Place, alike
from tenplexrun.core.snapshots import AnyClaim, BuddyClaim, Claim, Holding, SnapshotId
from tenplexrun.errors import StoreError, TenplexError
from tenplexrun.store.files import TENSORS, Files, MappedFile
from tenplexrun.store.slots import ARRIVALS, NUM_SLOTS, Round

log = logging.getLogger(__name__)

MAX_NAMES = 5  # in a warning


class Arena:
    """All operations on a node's arena. Methods may be called from several threads; `Arena.open` makes one."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.RLock()
        self._layouts: dict[str, Layout] = {}
        self._indexes: dict[SnapshotId, Index] = {}
        self._round: Round | None = None
        self._staged: set[str] = set()

    @classmethod
    def open(cls, folder: Path, limit_bytes: int | None = None) -> Arena:
        """The arena in `folder`, with all that an earlier process left whole there. `limit_bytes`: see `Files`."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        arena = cls(Files(folder, limit_bytes))
        arena._load()
        return arena

    # -- rounds and snapshots ------------------------------------------------------------------------------

    def open_round(self, number: int, layout: Layout, claim: Claim, buddy: BuddyClaim | None = None) -> list[Path]:
        """Reserve the round's two slots. Asking again for the open round is fine.

        Raises ArenaFullError, StoreError when the round is over or open with other state.
        """
        opened = Round.of(number, layout, claim, buddy)
        with self._lock:
            if self._round is not None and self._round.number >= number:
                if self._round != opened:
                    raise StoreError(f"round {number} cannot be opened: round {self._round.number} is, for other state")
                return self._paths(opened)
            self._round = None
            here = [name for name in opened.slots if self._files.size(name)]  # with what came before it was open
            fresh = [name for name in opened.slots if name not in here]
            recycled = [name for name in self._recyclable(opened.num_bytes) if name not in here][: len(fresh)]
            self._files.drop(name for name in self._unneeded() if name not in (*here, *recycled))
            try:
                sizes = (min(self._files.size(name), opened.num_bytes) for name in (*here, *recycled))
                self._files.require(NUM_SLOTS * opened.num_bytes - sum(sizes))
                self.put_layout(layout)
                for name, old in itertools.zip_longest((*fresh, *here), recycled):
                    self._files.reserve(name, opened.num_bytes, recycle=old)
                self._files.write_json("round.json", opened.to_json())
            except TenplexError:
                self._files.drop({*opened.slots, *recycled} - self._in_use())
                raise
            self._round = opened
            return self._paths(opened)

    def alike(self, number: int, step: int) -> tuple[Groups, dict[Place, int]]:
        """Of a snapshot of the open round: what other nodes have, too, and the checksums here. Raises StoreError."""
        opened = self._round
        if opened is None or opened.number != number or opened.buddy is None:
            raise StoreError(f"round {number} is not open in this store, or has no other nodes")
        index, buddy = self.get(SnapshotId(number, step, opened.digest)), opened.buddy
        layout = self.known_layout(opened.digest)
        groups = alike(layout, buddy.config, buddy.workers, buddy.place)
        return groups, {(piece.fqn, piece.region): piece.checksum for piece in index.pieces}

    def sizes(self) -> Record:
        """Bytes of a slot of the open round: of this node's own state, and of that of others."""
        opened = self._round
        return {"own": opened.own_bytes, "buddy": opened.num_bytes - opened.own_bytes} if opened is not None else {}

    def seal(
        self, number: int, step: int, slot: int, values: Record | None, without: Collection[str] = ()
    ) -> SnapshotId:
        """Make what was written into `slot`, the tensors `without` left out, a snapshot, with its checksums.

        Raises StoreError.
        """
        opened = self._round
        if opened is None or opened.number != number or slot not in range(NUM_SLOTS):
            raise StoreError(f"slot {slot} of round {number} cannot be sealed: this store has not opened it")
        file = opened.slots[slot]
        view = self._files.open(file).view
        pieces = tuple(
            Piece(entry.fqn, entry.region, entry.dtype, file, entry.offset, entry.num_bytes, checksum_of(view, entry))
            for entry in opened.entries
            if entry.fqn not in without
        )
        snapshot = SnapshotId(number, step, opened.digest)
        consumed = records.whole((values or {}).get("consumed", 0), "`consumed` in the values of a snapshot")
        with self._lock:
            if self._round is not opened:
                raise StoreError(f"round {number} ended while step {step} was being sealed")
            # the slot was written over: what it held before is gone, whatever its index says
            self._forget([old for old, index in self._indexes.items() if any(p.file == file for p in index.pieces)])
            self._keep(Index(snapshot, False, consumed, values, (opened.claim,), pieces))
        return snapshot

    def lend(self, number: int, step: int, slot: int) -> tuple[Round, SnapshotId, str]:
        """The open round, its snapshot sealed in `slot` and that file, which stays and is not reused until `give_back`.

        Raises StoreError when that snapshot is not, or no longer, one of the open round.
        """
        with self._lock:
            opened = self._round
            snapshot = SnapshotId(number, step, opened.digest if opened is not None else "")
            known = opened is not None and opened.number == number and slot in range(NUM_SLOTS)
            if opened is None or not known or snapshot not in self._indexes:
                raise StoreError(f"step {step} of round {number} is not sealed in this store's open round")
            self._staged.add(opened.slots[slot])
            return opened, snapshot, opened.slots[slot]

    def give_back(self, name: str) -> None:
        """A file that was lent, or staged and got nothing, is used no more."""
        with self._lock:
            self._staged.discard(name)
            self._files.drop(set(self._unneeded()).intersection([name]))

    def hold(self, opened: Round, snapshot: SnapshotId, pieces: Sequence[Piece]) -> None:
        """All that this node owes of a snapshot is in its slot. Raises StoreError when the round is over."""
        with self._lock:
            if self._round is not opened or snapshot not in self._indexes or opened.buddy is None:
                raise StoreError(f"round {opened.number} ended while step {snapshot.step} was being replicated")
            index = self._indexes[snapshot]
            if opened.buddy not in index.claims:
                claims, held = (*index.claims, opened.buddy), (*index.pieces, *pieces)
                self._keep(replace(index, claims=claims, pieces=held))

    def commit(self, number: int, step: int) -> None:
        """This snapshot is on enough nodes: mark it, drop all older ones and what only they needed."""
        with self._lock:
            for snapshot, index in list(self._indexes.items()):
                if (snapshot.round, snapshot.step) == (number, step) and not index.committed:
                    self._keep(replace(index, committed=True))
            self._forget([old for old in self._indexes if (old.round, old.step) < (number, step)])
            self._collect()

    def inventory(self) -> list[Holding]:
        """Verify every checksum; one record for each claim of a snapshot. Pieces that fail are no longer listed."""
        holdings = []
        with self._lock:
            found = sorted(self._indexes.items())
        for snapshot, index in found:
            bad = self._damaged(index.pieces)
            with self._lock:
                if snapshot not in self._indexes:
                    continue
                index = self._indexes[snapshot]
                if bad:
                    names = ", ".join(sorted({piece.fqn for piece in bad})[:MAX_NAMES])
                    log.warning(
                        "%s: %d regions failed their checksums and are dropped, of %s", snapshot, len(bad), names
                    )
                    index = replace(index, pieces=tuple(piece for piece in index.pieces if piece not in bad))
                    self._keep(index)
            holdings += [self._holding(index, claim) for claim in index.claims]
        return holdings

    def snapshots(self) -> list[Index]:
        """All that are here, the newest last."""
        with self._lock:
            return [self._indexes[snapshot] for snapshot in sorted(self._indexes)]

    def has(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._indexes

    def get(self, snapshot: SnapshotId) -> Index:
        """Raises StoreError when it is not (or no longer) here."""
        index = self._indexes.get(snapshot)
        if index is None:
            raise StoreError(f"the snapshot of {snapshot} is not in this store: it was dropped, or never here")
        return index

    def index_path(self, snapshot: SnapshotId) -> Path:
        self.get(snapshot)
        return self._files.folder / index_name(snapshot)

    # -- layouts -------------------------------------------------------------------------------------------

    def layout(self, digest: str) -> Layout | None:
        return self._layouts.get(digest)

    def put_layout(self, layout: Layout) -> None:
        with self._lock:
            if layout.digest not in self._layouts:
                self._files.write_json(layout_name(layout.digest), layout.to_json())
                self._layouts[layout.digest] = layout

    # -- regions from peers --------------------------------------------------------------------------------

    def stage(self, coming: Round, num_bytes: int) -> str:
        """A file for `num_bytes` of regions that `coming` starts with: see the module. End with `adopt` or `give_back`.

        Raises ArenaFullError, StoreError when a later round is open.
        """
        with self._lock:
            if self._round is not None and self._round.number != coming.number:
                if self._round.number > coming.number:
                    raise StoreError(f"round {coming.number} is over: round {self._round.number} is open")
                self._round = None  # its workers have ended
                self._files.drop(["round.json"])
            beside = (f"pull-{coming.number}-{number}{TENSORS}" for number in itertools.count())
            used = self._in_use()
            name = next(name for name in itertools.chain([coming.slots[ARRIVALS]], beside) if name not in used)
            size = max(num_bytes, coming.num_bytes) if name in coming.slots else num_bytes
            recycled = [] if self._files.size(name) else self._recyclable(size)
            self._files.promise(name, size, recycle=recycled[0] if recycled else None)
            self._staged.add(name)
            return name

    def file(self, name: str) -> MappedFile:
        """One of the arena's tensor files. Raises StoreError."""
        return self._files.open(name)

    def adopt(self, layout: Layout, described: Index, claim: Claim, pieces: Sequence[Piece]) -> None:
        """List `pieces` and `claim` with their snapshot; a node that never held it takes the rest from `described`.

        Where replicas differ and the first counts, the new ones take the place of the node's own.
        """
        fresh: dict[str, list[Region]] = {}
        for piece in pieces:
            if layout.spec(piece.fqn).replicas == "first":
                fresh.setdefault(piece.fqn, []).append(piece.region)
        with self._lock:
            self.put_layout(layout)
            index = self._indexes.get(described.snapshot, replace(described, claims=(), pieces=()))
            claims = index.claims if claim in index.claims else (*index.claims, claim)
            kept = [old for old in index.pieces if old.fqn not in fresh or subtract(old.region, fresh[old.fqn])]
            self._keep(replace(index, claims=claims, pieces=(*pieces, *kept)))
            self._staged.difference_update(piece.file for piece in pieces)

    # -- inside --------------------------------------------------------------------------------------------

    def _keep(self, index: Index) -> None:
        self._files.write_json(index_name(index.snapshot), index.to_json())
        self._indexes[index.snapshot] = index

    def _forget(self, snapshots: Sequence[SnapshotId]) -> None:
        self._files.drop(index_name(snapshot) for snapshot in snapshots)
        for snapshot in snapshots:
            del self._indexes[snapshot]

    def _in_use(self) -> set[str]:
        """Tensor files that a snapshot or a pull needs."""
        return {piece.file for index in self._indexes.values() for piece in index.pieces} | self._staged

    def _unneeded(self) -> list[str]:
        """Tensor files that nothing needs, nor the open round, the largest first."""
        needed = self._in_use().union(self._round.slots if self._round is not None else ())
        free = [name for name in self._files.names(TENSORS) if name not in needed]
        return sorted(free, key=self._files.size, reverse=True)

    def _recyclable(self, num_bytes: int) -> list[str]:
        """Those of them that can become a file of this size, the largest first. None is ever cut short: somebody may
        still be reading through a map."""
        return [name for name in self._unneeded() if self._files.size(name) <= num_bytes]

    def _collect(self) -> None:
        """Drop files and layouts that nothing needs."""
        self._files.drop(self._unneeded())
        digests = {snapshot.digest for snapshot in self._indexes}
        if self._round is not None:
            digests.add(self._round.digest)
        self._files.drop(layout_name(digest) for digest in self._layouts if digest not in digests)
        self._layouts = {digest: layout for digest, layout in self._layouts.items() if digest in digests}

    def _paths(self, opened: Round) -> list[Path]:
        return [self._files.folder / name for name in opened.slots]

    def _damaged(self, pieces: Sequence[Piece]) -> set[Piece]:
        """Those that fail their checksums. Nobody trains while this is asked, so all processors are at hand."""
        threads = len(os.sched_getaffinity(0))

        def prove(share: Sequence[Piece]) -> list[Piece]:
            return [piece for piece in share if not self._intact(piece)]

        with ThreadPoolExecutor(threads) as pool:
            return {bad for found in pool.map(prove, (pieces[n::threads] for n in range(threads))) for bad in found}

    def _intact(self, piece: Piece) -> bool:
        try:
            return checksum_of(self._files.open(piece.file).view, piece) == piece.checksum
        except StoreError:
            return False

    def _holding(self, index: Index, claim: AnyClaim) -> Holding:
        held: dict[str, list[Region]] = {}
        for piece in index.pieces:
            held.setdefault(piece.fqn, []).append(piece.region)
        layout = self.known_layout(index.snapshot.digest)
        missing = {
            fqn
            for fqn, regions in claim.regions(layout).items()
            if any(subtract(region, held.get(fqn, ())) for region in regions)
        }
        return Holding(index.snapshot, (claim,), index.committed, tuple(sorted(missing)), index.consumed)

    def _load(self) -> None:
        """Take over what is whole; `_collect` removes the rest."""
        for name in self._files.names(".json"):  # sorted: layouts, the round, snapshots
            try:
                self._take_over(name, self._files.read_json(name))
            except TenplexError as error:
                log.warning("%s is not usable, and is dropped: %s", name, error)
                self._files.drop([name])
        self._files.drop(self._files.names(".new"))
        self._collect()

    def _take_over(self, name: str, record: object) -> None:
        if name.startswith("layout-"):
            layout = Layout.from_json(record)
            self._layouts[layout.digest] = layout
        elif name.startswith("snapshot-"):
            index = Index.from_json(record)
            self.known_layout(index.snapshot.digest)
            whole = tuple(piece for piece in index.pieces if self._present(piece))
            self._indexes[index.snapshot] = replace(index, pieces=whole)
        elif name == "round.json":
            known = records.fields(record, "a round", ("v", "round", "digest", "claim", "buddy"))
            number = records.whole(known["round"], "a round")
            layout, claim = self.known_layout(known["digest"]), Claim.from_json(known["claim"])
            buddy = None if known["buddy"] is None else BuddyClaim.from_json(known["buddy"])
            opened = Round.of(number, layout, claim, buddy)
            if any(self._files.size(slot) < opened.num_bytes for slot in opened.slots):
                raise StoreError("its slots are gone")
            self._round = opened

    def known_layout(self, digest: str) -> Layout:
        layout = self._layouts.get(digest)
        if layout is None:
            raise StoreError(f"layout {digest} is not in this store")
        return layout

    def _present(self, piece: Piece) -> bool:
        inside = Path(piece.file).name == piece.file  # an index names files of its own folder only
        return inside and piece.offset + piece.num_bytes <= self._files.size(piece.file)


def checksum_of(view: memoryview, where: Piece | Entry) -> int:
    """xxh3_64 of a piece's bytes in the mapped file `view`."""
    return int(xxhash.xxh3_64_intdigest(view[where.offset : where.offset + where.num_bytes]))
