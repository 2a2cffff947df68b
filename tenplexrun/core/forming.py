"""Forming a round: which nodes take part, in which order, at which parallel configuration, from which snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tenplexrun.core.extents import Spans
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.placement import Assign, place
from tenplexrun.core.rounds import Ack, Member, Participant, Source
from tenplexrun.core.snapshots import Holding, SnapshotId, choose, holders_of, lacking
from tenplexrun.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Selection:
    """The nodes of a round in rank order, and those left over."""

    members: tuple[Member, ...]
    spares: tuple[str, ...]
    parallel: ParallelConfig

    def participants(self) -> tuple[Participant, ...]:
        first_rank, chosen = 0, []
        for member in self.members:
            place = (first_rank, member.num_workers, member.store, member.role, member.data_bytes)
            chosen.append(Participant(member.node, member.host, *place))
            first_rank += member.num_workers
        return tuple(chosen)


def in_rank_order(members: Iterable[Member], before: Sequence[str], seen: Mapping[str, float]) -> list[Member]:
    """`--node-rank` first (0 if not given, behind those who gave it), then the round before, then order of arrival."""
    place = {node: index for index, node in enumerate(before)}
    far = len(place)

    def order(member: Member) -> tuple[int, bool, int, float, str]:
        rank, by_default = member.node_rank or 0, member.node_rank is None
        return rank, by_default, place.get(member.node, far), seen.get(member.node, 0.0), member.node

    return sorted(members, key=order)


def select(candidates: Sequence[Member], sizes: ParallelConfig, min_nodes: int, max_nodes: int) -> Selection | None:
    """The most nodes, in the order given, that make whole replicas of pp · cp · tp with every tp group inside a node.

    `sizes` fixes all but dp, which is what the chosen nodes give. None if no `min_nodes` of them do.
    """
    fitting = [member for member in candidates if member.num_workers % sizes.tp == 0]
    for count in range(min(max_nodes, len(fitting)), min_nodes - 1, -1):
        parallel = sizes.at_world(sum(member.num_workers for member in fitting[:count]))
        if parallel is not None:
            chosen = tuple(fitting[:count])
            nodes = {member.node for member in chosen}
            spares = tuple(member.node for member in candidates if member.node not in nodes)
            return Selection(chosen, spares, parallel)
    return None


def arrange(
    selection: Selection,
    layout: Layout,
    snapshot: SnapshotId,
    sources: Mapping[str, Source],
    before: Mapping[str, int],
    assign: Assign,
) -> Selection:
    """`selection` with nodes of equal size in the order that moves the least bytes of `snapshot`.

    Nodes with a `--node-rank` stay where they are; of equal orders survivors keep their first ranks (`before`).
    """
    by_node = {member.node: member for member in selection.members}
    holdings = {node: source.holdings for node, source in sources.items()}
    order = place(
        layout,
        selection.parallel,
        [(member.node, member.num_workers) for member in selection.members],
        holders_of(snapshot, holdings, layout),
        assign,
        before,
        {member.node for member in selection.members if member.node_rank is not None},
    )
    return replace(selection, members=tuple(by_node[node] for node, _ in order))


def impossible(sizes: ParallelConfig, num_workers: int, min_nodes: int, max_nodes: int) -> str | None:
    """Why no number of like nodes from `min_nodes` to `max_nodes` can have this layout; None if one can."""
    if num_workers % sizes.tp:
        return (
            f"tp={sizes.tp} does not fit into a node of {num_workers} workers: a tensor-parallel group stays inside "
            f"a node; make --nproc-per-node a multiple of --tp"
        )
    replica = sizes.pp * sizes.cp * sizes.tp
    worlds = [count * num_workers for count in range(min_nodes, max_nodes + 1)]
    if any(sizes.at_world(world) is not None for world in worlds):
        return None
    more = {"ep": sizes.ep, "etp": sizes.etp, "dp_shard": sizes.dp_shard}
    shown = str(worlds[0]) if len(worlds) == 1 else f"{worlds[0]} to {worlds[-1]}"
    return (
        f"a world of {shown} workers is not divisible by pp={sizes.pp} * cp={sizes.cp} * tp={sizes.tp} = {replica} "
        f"with {', '.join(f'{name}={size}' for name, size in more.items() if size)}; "
        "change --pp, --cp, --ep, --tp, --nnodes or --nproc-per-node"
    )


def misfit(members: Sequence[Member], sizes: ParallelConfig, min_nodes: int, max_nodes: int) -> str:
    """Why `select` finds none of these nodes to fit."""
    most = min(max_nodes, len(members))
    for num_workers in sorted({member.num_workers for member in members}):
        if (why := impossible(sizes, num_workers, min(min_nodes, most), most)) is not None:
            return why
    return f"the {len(members)} nodes here cannot be laid out as {sizes} (times dp)"


def refusal(layouts: Iterable[Layout], config: ParallelConfig) -> str | None:
    """Why the job's tensors cannot be laid out under `config`; None if they can."""
    try:
        for layout in layouts:
            layout.check(config)
    except LayoutError as error:
        return str(error)
    return None


def extents(acks: Mapping[str, Ack]) -> dict[str, dict[str, Spans]]:
    """By dataset and node, which extents it holds."""
    found: dict[str, dict[str, Spans]] = {}
    for node, ack in acks.items():
        for dataset, held in ack.extents.items():
            found.setdefault(dataset, {})[node] = held
    return found


def recover(
    acks: Mapping[str, Ack], members: Mapping[str, Member], layouts: Mapping[str, Layout]
) -> tuple[SnapshotId | None, dict[str, Source], str]:
    """The newest snapshot that the living nodes can complete, and who holds what of it (frozen plan inputs); and why it
    is not a newer one, if that is worth a word."""
    held: dict[str, tuple[Holding, ...]] = {node: acks[node].holdings for node in members if node in acks}
    snapshot = choose(held, layouts)
    sources = {}
    for node, holdings in held.items():
        parts = tuple(holding for holding in holdings if holding.snapshot == snapshot)
        if parts:
            sources[node] = Source(members[node].store, parts)
    return snapshot, sources, lacking(held, layouts, snapshot)
