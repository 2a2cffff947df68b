"""Strategies: layouts of all kinds mixed, on meshes of every shape, and nodes to place them on."""

from __future__ import annotations

from hypothesis import strategies as st

from tenplexrun.core.layout import Buffer, Flat, Layout, Order, Pad, Shard, Stage, TensorSpec
from tenplexrun.core.parallel import AXES, ParallelConfig
from tenplexrun.core.ptc import PTC

NODES = ("a", "b", "c", "d")
DENSE = (("tp",), ("dp",), ("cp",), ("dp", "cp"), ("dp_shard",), ("dp_shard", "cp"), ("cp", "tp"))
DENSE_FLAT, EXPERT_FLAT = (("dp",), ("dp", "cp")), (("edp",), ("edp", "etp"))
EXPERT = (("ep",), ("etp",), ("edp",), ("edp", "ep"))


@st.composite
def configs(draw: st.DrawFn) -> ParallelConfig:
    pp, dp, cp, tp = (draw(st.integers(1, most)) for most in (2, 4, 2, 3))
    dense = dp * cp * tp
    ep = draw(st.sampled_from([size for size in (1, 2, 3, 4) if dense % size == 0]))
    etp = draw(st.sampled_from([0, *(size for size in (1, 2, 3) if dense % (ep * size) == 0)]))
    dp_shard = draw(st.sampled_from([0, *(size for size in (1, 2) if dp % size == 0)]))
    return ParallelConfig(pp, dp, cp, ep, tp, etp, dp_shard, tuple(draw(st.permutations(AXES))))


@st.composite
def shards(draw: st.DrawFn, dims: int, mesh: tuple[tuple[str, ...], ...]) -> list[Shard]:
    found: list[Shard] = []
    used: set[str] = set()
    for axes in draw(st.permutations(mesh))[: draw(st.integers(0, 3))]:
        if used & set(axes):
            continue
        if {"dp", "dp_shard"} <= used | set(axes):
            continue
        used |= set(axes)
        policy = draw(st.sampled_from(["ceil", "front"]))
        found.append(Shard(draw(st.integers(0, dims - 1)), axes, policy, unit=draw(st.sampled_from([1, 1, 2]))))
    return found


@st.composite
def dense_ops(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Order | Pad | Shard]:
    """Order and padding first, then shards; now and then the first one by segments."""
    if not shape:
        return []
    ops: list[Order | Pad | Shard] = []
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["plain", "order", "pad", "segs", "repeat"]))
    length = shape[dim]
    if kind == "order" and length and length % 4 == 0:
        ops.append(Order(dim, 2, (length // 2, length // 4 * 0 + length // 2) if length % 8 else (length // 2,) * 2))
    if kind == "pad":
        ops.append(Pad(dim, draw(st.integers(1, 4)), draw(st.sampled_from([(), ("tp",)]))))
    rest = draw(shards(len(shape), DENSE))
    if (kind == "segs" and length % 3 == 0) or (kind == "repeat" and length in (0, 6, 12)):
        used = {axis for shard in rest for axis in shard.axes}
        rest = [shard for shard in rest if shard.dim != dim]
        split = Shard(dim, "cp", "front", segs=(2, 1))
        if (
            kind == "repeat"
        ):  # key and value heads: four units of queries on one or two ranks, one of each of the others
            split = Shard(dim, "cp", "repeat", segs=(4, 1, 1), unit=max(1, length // 6))
        if "cp" not in used:
            ops.append(split)
    return [*ops, *rest]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    specs = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 5, 6, 8, 12]), max_size=3)))
        expert = bool(shape) and draw(st.booleans()) and draw(st.booleans())
        ops = list(draw(shards(len(shape), EXPERT))) if expert else list(draw(dense_ops(shape)))
        named = {axis for op in ops if isinstance(op, Shard) for axis in op.axes}
        flat = [axes for axes in (EXPERT_FLAT if expert else DENSE_FLAT) if not named & {*axes, "dp_shard"}]
        if flat and draw(st.booleans()):
            ops.append(Flat(draw(st.sampled_from(flat)), draw(st.sampled_from([1, 2]))))
        stage = draw(st.none() | st.builds(Stage, st.integers(0, 2), st.just(3), st.integers(1, 2)))
        copies = (Stage(2, 3),) if stage is not None and draw(st.booleans()) else ()
        specs.append(TensorSpec(f"t{index}", shape, "float32", tuple(ops), stage, copies=copies))
    buffers = ()
    if draw(st.booleans()):
        flat = Flat(draw(st.sampled_from(["dp", "dp_shard"])), multiple=draw(st.sampled_from([1, 8])), buffer="all")
        names = draw(st.permutations(["f0", "f1", "f2"]))
        buffers = (Buffer("all", tuple(names), draw(st.sampled_from([1, 4])), draw(st.sampled_from([0, 7]))),)
        for name, shape in (("f0", (5,)), ("f1", (3, 4)), ("f2", (2, 2, 3))):
            ops = [Shard(0, "tp")] if draw(st.booleans()) else []
            specs.append(TensorSpec(name, shape, "float32", (*ops, flat), Stage(int(name[1]), 3)))
    return Layout(tuple(specs), buffers)


@st.composite
def placed(draw: st.DrawFn, layout: Layout) -> PTC:
    config = draw(configs())
    count = draw(st.integers(1, len(NODES)))
    nodes = draw(st.lists(st.sampled_from(NODES[:count]), min_size=config.world_size, max_size=config.world_size))
    return PTC(layout, config, tuple(nodes))
