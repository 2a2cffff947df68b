"""Which pipeline stage owns what: items (layers) in model order, split over the pp axis, first stages one more."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tenplexrun.core import records
from tenplexrun.core.records import Record
from tenplexrun.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Stage:
    """Belongs to item `index` of `of` items, and so to the pp coordinate that holds this item.

    With `chunks` > 1 each coordinate has so many virtual stages: of all pp · chunks, chunk c is on coordinate c mod pp
    (Megatron's interleaved schedule).
    """

    index: int
    of: int
    chunks: int = 1

    def __post_init__(self) -> None:
        records.whole(self.of, "the number of a pipeline's items", 1)
        if records.whole(self.index, "the item of a stage") >= self.of:
            raise LayoutError(f"item {self.index} of a pipeline of {self.of} items: they are numbered from 0")
        records.whole(self.chunks, "the virtual chunks of a stage", 1)

    def owner(self, pp: int) -> int:
        """The pp coordinate, of `pp`, that holds the item (numpy.array_split's rule)."""
        size, rest = divmod(self.of, pp * self.chunks)
        longer = rest * (size + 1)
        chunk = self.index // (size + 1) if self.index < longer else rest + (self.index - longer) // size
        return chunk % pp

    def to_json(self) -> list[int]:
        return [self.index, self.of, self.chunks] if self.chunks > 1 else [self.index, self.of]

    @classmethod
    def from_json(cls, record: object) -> Stage:
        numbers = records.items(record, "a stage")
        if len(numbers) not in (2, 3):
            raise LayoutError(f"a stage is [index, of] or [index, of, chunks], got {len(numbers)} entries")
        return cls(*numbers)


@dataclass(frozen=True, slots=True)
class Stages:
    """A script's rule for stage ownership by name.

    `pattern`, such as "layers.{}.", matches where a name segment begins, anywhere in a name (so optimizer state
    follows its parameter); `{}` is the item. Names in `first` and `last` (whole segments, anywhere too) go with the
    first and the last item; the pattern is asked first. `chunks`: virtual stages a coordinate, see `Stage`.
    Raises LayoutError when the rule contradicts itself.
    """

    pattern: str
    num_items: int
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    chunks: int = 1
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        records.whole(self.num_items, "the number of a pipeline's items", 1)
        if records.text(self.pattern, "the pattern of the stages").count("{}") != 1:
            raise LayoutError(
                f'the pattern of the stages {self.pattern!r} needs exactly one {{}}, as in "layers.{{}}."'
            )
        records.whole(self.chunks, "the virtual chunks of the stages", 1)
        both = sorted(set(self.first) & set(self.last))
        if both:
            raise LayoutError(
                f"{both} are named both for the first and for the last stage; copies need names of their own"
            )
        before, after = map(re.escape, self.pattern.split("{}"))
        object.__setattr__(self, "first", tuple(self.first))
        object.__setattr__(self, "last", tuple(self.last))
        object.__setattr__(self, "_regex", re.compile(rf"(?:^|\.){before}(\d+){after}"))

    def stage_of(self, fqn: str) -> Stage | None:
        """The stage of a name; None is on all stages. Raises LayoutError for an item beyond `num_items`."""
        match = self._regex.search(fqn)
        if match:
            index = int(match[1])
            if index >= self.num_items:
                raise LayoutError(f"{fqn} is item {index} of only {self.num_items}; correct num_items of the stages")
            return Stage(index, self.num_items, self.chunks)
        dotted = f".{fqn}."
        for names, index in ((self.first, 0), (self.last, self.num_items - 1)):
            if any(f".{name.strip('.')}." in dotted for name in names):
                return Stage(index, self.num_items, self.chunks)
        return None

    def items_of(self, pp_rank: int, pp: int) -> range:
        """The items that a pp coordinate holds. Raises LayoutError when there are fewer items than stages.

        With virtual chunks they are not one range: see `chunks_of`.
        """
        if self.chunks > 1:
            raise LayoutError(f"the {self.chunks} virtual chunks of a stage are not one range; use chunks_of")
        return self.chunks_of(pp_rank, pp)[0]

    def chunks_of(self, pp_rank: int, pp: int) -> tuple[range, ...]:
        """The items of each virtual chunk that a pp coordinate holds. Raises LayoutError as `items_of` does."""
        if not 0 <= pp_rank < pp or pp > self.num_items:
            raise LayoutError(f"stage {pp_rank} of pp={pp} cannot hold any of {self.num_items} items; use a smaller pp")
        size, rest = divmod(self.num_items, pp * self.chunks)
        found = []
        for chunk in range(pp_rank, pp * self.chunks, pp):
            start = chunk * size + min(chunk, rest)
            found.append(range(start, start + size + (chunk < rest)))
        return tuple(found)

    def to_json(self) -> Record:
        return {
            "pattern": self.pattern,
            "num_items": self.num_items,
            "first": list(self.first),
            "last": list(self.last),
            **({"chunks": self.chunks} if self.chunks > 1 else {}),
        }

    @classmethod
    def from_json(cls, record: object) -> Stages:
        known = records.fields(record, "a rule for stages", ("pattern", "num_items"), ("first", "last", "chunks"))
        first, last = (
            tuple(records.items(known.get(end, ()), f"the {end} names of a rule")) for end in ("first", "last")
        )
        return cls(known["pattern"], known["num_items"], first, last, known.get("chunks", 1))
