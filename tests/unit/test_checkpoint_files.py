"""A checkpoint's files, written and read as plain torch does."""

from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tenplexrun.core import durable
from tenplexrun.core.arena import arena_map
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import Claim
from tenplexrun.errors import CheckpointError, LayoutError
from tenplexrun.store.arena import Arena
from tenplexrun.worker import dcp as format_
from tenplexrun.worker import loading, saving, shares
from tenplexrun.worker.folders import Folder, candidates, trial

CONFIG = ParallelConfig(dp=2, tp=2)
NODES = [[0, 1], [2, 3]]
LAYOUT = Layout(
    (
        TensorSpec("w", (6, 4), "float64", (Shard(0, "tp"),)),
        TensorSpec("b", (5,), "bfloat16"),
        TensorSpec("mean", (3,), "float32", replicas="first"),
        TensorSpec("optim.w.exists", (), "bool"),
        TensorSpec("optim.w.m", (6, 4), "float64", (Shard(0, "tp"),)),
        TensorSpec("optim.w.step", (), "float32"),
        *(
            TensorSpec(f"rng.cpu.dp{dp}.tp{tp}", (9,), "uint8", at={"dp": dp, "tp": tp})
            for dp in range(2)
            for tp in range(2)
        ),
    )
)
GROUPS = {"w": 0, "b": 0}
TAG = "0a1b2c3d"
VALUES = {
    "seed": 4,
    "optimizer": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}}],
    "scheduler": {"last_epoch": 7, "milestones": {"$counter": [[3, 1]]}},
    "step": 7,
    "consumed": 70,
    "order": {"seed": 1},
}


def test_each_region_is_written_once_and_by_one_who_has_it() -> None:
    dealt = durable.shares(LAYOUT, CONFIG, NODES)
    every = [key for share in dealt for key in share]
    assert len(every) == len(set(every))
    held = {
        (fqn, region) for rank in range(4) for fqn, found in LAYOUT.regions_of(CONFIG, rank).items() for region in found
    }
    assert set(every) == held
    for node, share in enumerate(dealt):
        own = {entry.fqn: entry for entry in arena_map(LAYOUT, CONFIG, NODES[node]).entries}
        assert all(fqn in own for fqn, _ in share)
    sizes = [sum(region.num_elements for fqn, region in share if fqn in ("w", "optim.w.m")) for share in dealt]
    assert sizes[0] == sizes[1], "balanced"
    assert "mean" in dict(dealt[0]), "of what may differ the first one counts"


def test_names_are_those_of_plain_torch() -> None:
    keys = {fqn: durable.key_of(path) for fqn, path in durable.paths_of(LAYOUT).items()}
    assert keys["w"] == "model.w"
    assert keys["optim.w.m"] == "optimizer.state.w.m"
    assert keys["optim.w.exists"] == "tenplexrun.optim.w.exists"
    assert keys["rng.cpu.dp0.tp1"] == "tenplexrun.rng.cpu.dp0.tp1"
    other = Layout((TensorSpec("optim.w.m", (2,), "float32"), TensorSpec("optim.w.exists.m", (2,), "float32")))
    assert durable.key_of(durable.paths_of(other)["optim.w.m"]) == "model.optim.w.m", "a module that is called optim"


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/checkpoints"
    else:
        name = f"/{uuid.uuid4().hex}"
        yield f"memory:/{name}"
        fsspec.filesystem("memory").rm(name, recursive=True) if fsspec.filesystem("memory").exists(name) else None


def full(spec: TensorSpec, seed: int = 0) -> torch.Tensor:
    """Each element has a value of its own."""
    count = spec.whole.num_elements
    start = 100 * sorted(other.fqn for other in LAYOUT.tensors).index(spec.fqn) % 250 + seed
    return torch.arange(start, start + count).to(getattr(torch, spec.dtype)).reshape(spec.shape)


def snapshot(folder: Path, node: int, without: tuple[str, ...] = ()) -> Path:
    """A node's arena with a sealed snapshot of step 7. Returns its index."""
    arena = Arena.open(folder / f"arena-{node}")
    claim = Claim(CONFIG, tuple(NODES[node]))
    slots = arena.open_round(1, LAYOUT, claim)
    data = np.memmap(slots[0], dtype=np.uint8, mode="r+")
    for entry in arena_map(LAYOUT, CONFIG, NODES[node]).entries:
        part = full(LAYOUT.spec(entry.fqn), node if entry.fqn == "mean" else 0)[entry.region.slices].contiguous()
        data[entry.offset : entry.offset + entry.num_bytes] = part.reshape(-1).view(torch.uint8).numpy()
    return arena.index_path(arena.seal(1, 7, 0, VALUES, without))


def write(folder: Path, home: str, step: int = 7, tag: str = TAG) -> list[dict[str, Any]]:
    parts = []
    for node in range(2):
        share = shares.take(snapshot(folder / tag, node), LAYOUT, CONFIG, NODES, node)
        where = Folder(f"{home}/{durable.folder_name(step)}")
        parts.append(saving.write(share, where, node, tag, GROUPS, threading.Event()))
    return parts


def publish(folder: Path, home: str, step: int = 7, tag: str = TAG, keep: int = 2, last: bool = False) -> list[int]:
    parts, where = write(folder, home, step, tag), Folder(f"{home}/{durable.folder_name(step)}")
    saving.prepare(where, tag, LAYOUT, parts)
    saving.publish(where, tag)
    return saving.prune(Folder(home), step, [part["file"] for part in parts], keep, last)


def test_plain_torch_reads_what_was_written(home: str, tmp_path: Path) -> None:
    publish(tmp_path, home)
    state: dict[str, Any] = {
        "model": {fqn: torch.zeros_like(full(LAYOUT.spec(fqn))) for fqn in ("w", "b", "mean")},
        "optimizer": {
            "state": {"w": {"m": torch.zeros(6, 4, dtype=torch.float64), "step": torch.zeros(())}},
            "param_groups": [{"params": [], "lr": 0.0, "betas": None}],
        },
        "scheduler": {"last_epoch": 0},
        "step": 0,
        "consumed": 0,
    }
    dcp.load(state, checkpoint_id=f"{home}/{durable.folder_name(7)}", no_dist=True)
    for fqn in ("w", "b", "mean"):
        assert torch.equal(state["model"][fqn], full(LAYOUT.spec(fqn)))
        assert state["model"][fqn].dtype == full(LAYOUT.spec(fqn)).dtype
    assert torch.equal(state["optimizer"]["state"]["w"]["m"], full(LAYOUT.spec("optim.w.m")))
    assert state["optimizer"]["param_groups"] == [{"params": ["b", "w"], "lr": 0.1, "betas": (0.9, 0.95)}]
    assert (state["step"], state["consumed"], state["scheduler"]["last_epoch"]) == (7, 70, 7)


def load(url: str, folder: Path, config: ParallelConfig, layout: Layout = LAYOUT) -> tuple[Any, dict[str, Any]]:
    """What a node with all ranks of `config` gets: the result, and its tensors, whole."""
    entries = arena_map(layout, config, range(config.world_size))
    slot = folder / "slot"
    slot.write_bytes(b"\xff" * entries.num_bytes)
    loaded = loading.read(url, 7, layout, config, range(config.world_size), GROUPS, slot)
    data, tensors = np.fromfile(slot, dtype=np.uint8), {}
    for entry in entries.entries:
        if entry.fqn not in loaded.without:
            spec = layout.spec(entry.fqn)
            whole = tensors.setdefault(entry.fqn, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
            part = torch.from_numpy(data[entry.offset : entry.offset + entry.num_bytes]).view(whole.dtype)
            whole[entry.region.slices] = part.view(entry.region.lengths)
    return loaded, tensors


@pytest.mark.parametrize("config", [CONFIG, ParallelConfig(), ParallelConfig(dp=3), ParallelConfig(tp=3)], ids=str)
def test_it_is_read_at_any_layout(home: str, tmp_path: Path, config: ParallelConfig) -> None:
    publish(tmp_path, home)
    loaded, tensors = load(f"{home}/{durable.folder_name(7)}", tmp_path, config)
    assert (loaded.step, loaded.consumed, loaded.values) == (7, 70, VALUES)
    for fqn, tensor in tensors.items():
        assert torch.equal(tensor, full(LAYOUT.spec(fqn))), fqn
    assert loaded.without == ()


PLAIN = {
    "w": full(LAYOUT.spec("w")), "b": full(LAYOUT.spec("b")), "mean": full(LAYOUT.spec("mean")),
}  # fmt: skip


@pytest.mark.parametrize(
    "nested",
    [
        {"model": PLAIN, "optimizer": {"param_groups": [{"params": ["w", "b"], "lr": 0.5}]}, "step": 7, "consumed": 9},
        {"app": {"model": PLAIN, "optim": {"param_groups": [{"params": ["b"]}, {"params": ["w", "z"], "lr": 0.5}]}}},
        {"model": PLAIN, "optimizer": {"param_groups.b.lr": 0.5}},
        PLAIN,
    ],
    ids=["listed", "app", "flattened", "model"],
)
def test_what_plain_torch_has_written_is_read(nested: dict[str, Any], tmp_path: Path) -> None:
    url = str(tmp_path / "plain")
    dcp.save(nested, checkpoint_id=url, no_dist=True)
    layout = Layout(tuple(spec for spec in LAYOUT.tensors if not spec.fqn.startswith("optim.")))
    loaded, tensors = load(url, tmp_path, ParallelConfig(tp=2, dp=2), layout)
    for fqn in PLAIN:
        assert torch.equal(tensors[fqn], PLAIN[fqn])
    assert loaded.without == tuple(spec.fqn for spec in layout.tensors if spec.at is not None)
    assert loaded.values["foreign"]
    assert loaded.consumed == nested.get("consumed", 0)
    if "model" in nested:
        assert loaded.values["optimizer"] == [{"lr": 0.5}]


def test_a_parameter_that_had_no_optimizer_state_has_none(tmp_path: Path) -> None:
    """And what others have is as it was: numbers, tensors and whether there is any."""
    layout = Layout((*LAYOUT.tensors, *(TensorSpec(f"optim.b.{slot}", (), "float32") for slot in ("step",)),
                     TensorSpec("optim.b.exists", (), "bool")))  # fmt: skip
    state = {"w": {"m": full(LAYOUT.spec("optim.w.m")), "step": 3.0}}
    url = str(tmp_path / "plain")
    dcp.save({"model": PLAIN, "optimizer": {"state": state}}, checkpoint_id=url, no_dist=True)
    _, tensors = load(url, tmp_path, ParallelConfig(), layout)
    assert torch.equal(tensors["optim.w.m"], state["w"]["m"])
    assert (tensors["optim.w.step"].item(), tensors["optim.w.exists"].item()) == (3.0, True)
    assert (tensors["optim.b.step"].item(), tensors["optim.b.exists"].item()) == (0.0, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": None}, "it lacks w"),
        ({"extra": torch.ones(1)}, "it has also model.extra"),
        ({"w": torch.ones(4, 6, dtype=torch.float64)}, r"w is float64 \(4, 6\) there, float64 \(6, 4\) here"),
        ({"b": torch.ones(5)}, "b is float32"),
    ],
)
def test_another_model_is_refused_by_name(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = {name: tensor for name, tensor in {**PLAIN, **change}.items() if tensor is not None}
    dcp.save({"model": model}, checkpoint_id=str(tmp_path / "plain"), no_dist=True)
    layout = Layout(tuple(spec for spec in LAYOUT.tensors if not spec.fqn.startswith("optim.")))
    with pytest.raises(LayoutError, match=words):
        load(str(tmp_path / "plain"), tmp_path, ParallelConfig(), layout)


def test_torn_and_old_ones_go_and_what_is_not_ours_stays(home: str, tmp_path: Path) -> None:
    write(tmp_path, home, 4, "00000004")
    foreign = Folder(f"{home}/mine")
    foreign.fs.makedirs(foreign.path)
    foreign.fs.pipe(foreign.at("notes"), b"x")
    assert publish(tmp_path, home, 5, "00000005") == []
    assert candidates(home) == [(5, f"{home}/{durable.folder_name(5)}")]
    publish(tmp_path, home, 6, "00000006")
    write(tmp_path, home, 7, "0000007a")
    assert publish(tmp_path, home, 7, "00000007") == [5]
    assert [step for step, _ in candidates(home)] == [7, 6]
    assert Folder(home).names() == ["mine", *map(durable.folder_name, (6, 7))]
    assert Folder(f"{home}/{durable.folder_name(7)}").names() == [
        ".metadata",
        "__0_00000007.distcp",
        "__1_00000007.distcp",
    ]
    assert publish(tmp_path, home, 7, "0000007b") == [], "the same step once more"
    assert load(f"{home}/{durable.folder_name(7)}", tmp_path, CONFIG)[0].consumed == 70


def test_one_of_a_later_step_may_be_under_way_unless_it_was_the_last(home: str, tmp_path: Path) -> None:
    written = write(tmp_path, home, 9, "00000009")
    publish(tmp_path, home, 8, "00000008")
    assert Folder(f"{home}/{durable.folder_name(9)}").names() == [part["file"] for part in written]
    publish(tmp_path, home, 8, "0000008b", last=True)
    assert Folder(home).names() == [durable.folder_name(8)]


def test_folders_and_files_of_others_are_never_removed(home: str, tmp_path: Path) -> None:
    """A folder named as ours may hold a script's own files, or a checkpoint that plain torch has written."""
    root = Folder(home)
    kept = {"step-3": ["model.pt"], durable.folder_name(2): ["optimizer.bin"], "step-4": [".metadata", "__0_0.distcp"]}
    for name, files in kept.items():
        root.sub(name).fs.makedirs(root.sub(name).path)
        for file in files:
            root.sub(name).fs.pipe(root.sub(name).at(file), b"x")
    publish(tmp_path, home, 5, "00000005")
    ours = root.sub(durable.folder_name(5))
    ours.fs.pipe(ours.at("tokenizer.json"), b"x")
    publish(tmp_path, home, 6, "00000006")
    assert publish(tmp_path, home, 7, "00000007") == [5]
    for name, files in kept.items():
        assert root.sub(name).names() == files
    assert ours.names() == ["tokenizer.json"]


def newest(home: str, *refused: str) -> Any:
    return loading.newest(candidates(home), refused)


def test_the_newest_that_can_be_read_is_found(home: str, tmp_path: Path) -> None:
    assert newest(home) == (None, [])
    for step in (5, 6):
        publish(tmp_path, home, step, f"{step:08x}")
    five, six = (Folder(f"{home}/{durable.folder_name(step)}") for step in (5, 6))
    assert newest(home)[0] == durable.Checkpoint(six.url, 6, 70)
    assert newest(home, six.url)[0] == durable.Checkpoint(five.url, 5, 70)
    whole = six.fs.cat_file(six.at("__0_00000006.distcp"))
    six.fs.pipe(six.at("__0_00000006.distcp"), whole[:-20])
    found, notes = newest(home)
    assert found == durable.Checkpoint(five.url, 5, 70)
    assert "__0_00000006.distcp has" in notes[0]
    five.fs.pipe(five.at(".metadata"), five.fs.cat_file(five.at(".metadata"))[:-9])
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        newest(home)


def test_a_flipped_byte_is_noticed(home: str, tmp_path: Path) -> None:
    publish(tmp_path, home)
    folder = Folder(f"{home}/{durable.folder_name(7)}")
    data = bytearray(folder.fs.cat_file(folder.at(f"__0_{TAG}.distcp")))
    position = data.find(full(LAYOUT.spec("b")).view(torch.uint8).numpy().tobytes())
    name = f"__0_{TAG}.distcp"
    if position < 0:
        name = f"__1_{TAG}.distcp"
        data = bytearray(folder.fs.cat_file(folder.at(name)))
        position = data.find(full(LAYOUT.spec("b")).view(torch.uint8).numpy().tobytes())
    data[position + 3] ^= 1
    folder.fs.pipe(folder.at(name), bytes(data))
    with pytest.raises(CheckpointError, match="fails its checksum"):
        load(folder.url, tmp_path, CONFIG)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), pickle.dumps({}), b"", pickle.dumps(torch.nn.Linear)])
def test_metadata_that_wants_more_is_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        format_.read_directory(Folder(str(tmp_path)))
    assert not (tmp_path / "evil").exists()


def test_a_value_that_is_code_is_refused(tmp_path: Path) -> None:
    torch.save(Evil(), tmp_path / "value")
    with pytest.raises(CheckpointError, match="value cannot be read"):
        format_.load((tmp_path / "value").read_bytes(), "value")


def test_nothing_is_published_unless_all_is_there(home: str, tmp_path: Path) -> None:
    parts = write(tmp_path, home)
    folder = Folder(f"{home}/{durable.folder_name(7)}")
    with pytest.raises(CheckpointError, match="no node has written"):
        saving.prepare(folder, "t", LAYOUT, parts[:1])
    folder.fs.rm(folder.at(parts[1]["file"]))
    with pytest.raises(CheckpointError, match="same --checkpoint-dir"):
        saving.prepare(folder, "t", LAYOUT, parts)
    assert candidates(home) == []


def test_a_write_that_ends_early_leaves_no_file(tmp_path: Path) -> None:
    share = shares.take(snapshot(tmp_path, 0), LAYOUT, CONFIG, NODES, 0)
    cancelled = threading.Event()
    cancelled.set()
    folder = Folder(str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="the round has ended"):
        saving.write(share, folder, 0, "t", GROUPS, cancelled)
    assert folder.names() == []
    (tmp_path / "out").rmdir()
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        saving.write(share, folder, 0, "t", GROUPS, threading.Event())


def test_a_snapshot_that_changes_meanwhile_is_not_copied(tmp_path: Path) -> None:
    index = snapshot(tmp_path, 0)
    slot = index.parent / "slot-1-0.bin"
    slot.write_bytes(bytes(byte ^ 1 for byte in slot.read_bytes()))
    with pytest.raises(CheckpointError, match="changed while it was copied"):
        shares.take(index, LAYOUT, CONFIG, NODES, 0)


def test_a_trial_says_whether_a_place_can_be_written_to(tmp_path: Path) -> None:
    assert trial(str(tmp_path / "new")) is None
    assert not any((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    assert "file" in str(trial(str(tmp_path / "file" / "below")))
    assert trial("memory://trial") is None
