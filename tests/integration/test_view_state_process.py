"""The newest snapshot through a real mount, while a store goes on writing; the view of a user who is not root."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fuse_views import skip_or_fail

from tenplexrun.core.arena import arena_map
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.snapshots import Claim
from tenplexrun.core.spec import TensorSpec
from tenplexrun.store.arena import Arena
from tenplexrun.vfs.client import ViewClient

CLAIM = Claim(ParallelConfig(), (0,))
LAYOUT = Layout((TensorSpec("big", (512, 1024), "int64"), TensorSpec("small", (7,), "float32")))
ENTRIES = arena_map(LAYOUT, CLAIM.config, CLAIM.ranks).entries
NOBODY = 65534
ROOT = Path(__file__).resolve().parent.parent.parent


def command(home: Path) -> list[str]:
    config = {"dir": str(home), "socket": str(home / "view.sock"), "mode": "fuse", "patience_s": 0.5}
    return [sys.executable, "-m", "tenplexrun.vfs.server", json.dumps(config)]


@pytest.fixture
def state(home: Path) -> Iterator[Path]:
    """`state/` of a running view; skips the test where there is no FUSE."""
    process = subprocess.Popen(command(home), cwd=home, stderr=subprocess.PIPE, text=True)
    until_ready(home, process)
    yield home / "view" / "state"
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def until_ready(home: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (home / "view.sock").exists():
        if process.poll() is not None:
            skip_or_fail(process.wait(), process.communicate()[1])
        assert time.monotonic() < deadline
        time.sleep(0.01)


def snapshot(arena: Arena, round_number: int, step: int) -> None:
    """All elements of all tensors are the number of the step."""
    path = arena.open_round(round_number, LAYOUT, CLAIM)[step % 2]
    memory = np.memmap(path, np.uint8, "r+")
    for entry in ENTRIES:
        memory[entry.offset : entry.offset + entry.num_bytes].view(entry.dtype)[:] = step
    arena.seal(round_number, step, step % 2, None)
    arena.commit(round_number, step)


def test_it_can_be_listed_loaded_and_mapped(home: Path, state: Path) -> None:
    assert os.listdir(state) == []
    arena = Arena.open(home / "arena")
    snapshot(arena, 0, 6)
    assert sorted(os.listdir(state)) == ["6", "current"]
    assert sorted(os.listdir(state / "6")) == ["big.json", "big.npy", "small.json", "small.npy", "snapshot"]
    assert json.loads((state / "current" / "big.json").read_text())["shape"] == [512, 1024]
    mapped = np.load(state / "current" / "big.npy", mmap_mode="r")
    assert (mapped[::100] == 6).all()
    with pytest.raises(OSError, match="Read-only"):
        (state / "6" / "big.npy").write_bytes(b"")

    snapshot(arena, 0, 8)
    with open(state / "8" / "big.npy", "rb", buffering=0) as old:
        inode, head = os.fstat(old.fileno()).st_ino, os.pread(old.fileno(), 200, 0)
        snapshot(arena, 0, 9)
        snapshot(arena, 0, 10)  # into the slot that step 8 was in
        assert os.pread(old.fileno(), 200, 0) == head, "what the kernel had read stays as it was"
        with pytest.raises(OSError, match="Stale") as caught:
            os.pread(old.fileno(), 4096, 3 << 20)
        assert caught.value.errno == errno.ESTALE
    assert (np.load(state / "current" / "small.npy") == 10).all()
    assert (state / "current" / "big.npy").stat().st_ino != inode
    assert sorted(os.listdir(state)) == ["10", "current"]


def test_no_read_is_torn_while_snapshots_follow_one_another(home: Path, state: Path) -> None:
    arena, ended = Arena.open(home / "arena"), threading.Event()

    def train() -> None:
        step = 0
        while not ended.is_set():
            step += 1
            snapshot(arena, step // 50, step)
            time.sleep(0.02)

    training = threading.Thread(target=train)
    training.start()
    good, deadline = set(), time.monotonic() + 60
    try:
        while len(good) < 8:
            assert time.monotonic() < deadline
            try:
                found = np.unique(np.load(state / "current" / "big.npy"))
            except OSError as error:
                assert error.errno in (errno.ENOENT, errno.ESTALE)  # noqa: PT017
                continue
            except ValueError as error:  # what numpy makes of an error in the middle
                assert "could only read" in str(error)  # noqa: PT017
                continue
            assert len(found) == 1
            good.add(int(found[0]))
    finally:
        ended.set()
        training.join()


PLAIN_USER = f"""
set -e
if [ -n "$1" ]; then
  mount --bind "{sys.base_prefix}" /mnt; mount -t tmpfs tmpfs "$1"; mkdir -p "{sys.base_prefix}"
  mount --move /mnt "{sys.base_prefix}"
fi
shift
mount -t tmpfs tmpfs "$1"; mknod "$1/fuse" c 10 229; chmod 666 "$1/fuse"; mount --bind "$1/fuse" /dev/fuse
mkdir "$1/home"; chown {NOBODY}:{NOBODY} "$1/home"; export HOME="$1/home"
shift; exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --inh-caps=-all "$@"
"""
LOOK = """
import asyncio, json, os, subprocess, sys, time
from pathlib import Path
from tenplexrun.vfs.client import ViewClient
assert os.getuid() != 0
home = Path(os.environ["HOME"])
os.chdir(home)
(home / "data").write_bytes(bytes(range(200)))
order = {"dataset": f"bytes:{home}/data?sample_bytes=10", "global_batch": 4, "micro_batch": 2, "seed": 1}
config = json.dumps({"dir": str(home), "socket": f"{home}/view.sock", "mode": "fuse"})

async def look():
    client = ViewClient(f"{home}/view.sock")
    said = await client.hello()
    place = Path(await client.show(1, order, 0, 1, 0))
    await client.close()
    return said["mode"], sorted((place / "pack-00000.bin").read_bytes())

for ended in ("killed", "told"):
    view = subprocess.Popen([sys.executable, "-m", "tenplexrun.vfs.server", config], stderr=subprocess.PIPE, text=True)
    while not (home / "view.sock").exists() and view.poll() is None:
        time.sleep(0.01)
    mode, content = asyncio.run(look()) if view.poll() is None else (view.communicate()[1], [])
    assert (mode, content) == ("fuse", list(range(200))), mode
    view.kill() if ended == "killed" else view.terminate()
    assert view.communicate(timeout=60)[1] == ""
    if ended == "killed":
        (home / "view.sock").unlink()
assert view.returncode == 0
assert str(home / "view") not in Path("/proc/mounts").read_text()
print("seen")
"""


def test_a_plain_user_mounts_it_with_fusermount3_and_mounts_it_again_when_it_was_killed(tmp_path: Path) -> None:
    """In a mount namespace of its own, where everybody may open /dev/fuse and see the interpreter."""
    if os.getuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare", "fusermount3"))):
        pytest.skip("needs root to become somebody else, and fusermount3")
    private = ["unshare", "--mount", "--propagation", "private", "--"]
    refused = subprocess.run([*private, "true"], check=False, capture_output=True).returncode
    if refused or not Path("/dev/fuse").exists():
        pytest.skip("needs mount namespaces and /dev/fuse")
    closed = [folder for folder in (*ROOT.parents, ROOT) if not folder.stat().st_mode & 1]
    if closed:
        pytest.skip(f"other users cannot see {closed[0]}")
    hidden = [folder for folder in reversed(Path(sys.base_prefix).parents) if not folder.stat().st_mode & 1]
    place = Path("/media") / f"tenplexrun-test-{uuid.uuid4().hex[:8]}"
    place.mkdir()
    try:
        places = ["".join(map(str, hidden[:1])), str(place)]
        argv = [*private, "sh", "-c", PLAIN_USER, "sh", *places, sys.executable, "-c", LOOK]
        done = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.returncode) == ("seen\n", 0), done.stderr
    finally:
        place.rmdir()


def test_who_asks_hears_of_reads_that_failed(home: Path, state: Path, tmp_path: Path) -> None:
    """Case D6, as the agent sees it."""
    np.save(tmp_path / "rows.npy", np.zeros((10, 8), np.uint8))
    order = {"dataset": f"npy:{tmp_path}/rows.npy", "global_batch": 2, "micro_batch": 2, "seed": 0}
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def listen() -> str:
        client = ViewClient(str(home / "view.sock"), heard.put_nowait)
        place = Path(await client.show(1, order, 0, 1, 0))
        (home / "extents").rename(home / "gone")
        with pytest.raises(OSError, match="Input/output error"):
            await asyncio.to_thread((place / "pack-00000.bin").read_bytes)
        (home / "gone").rename(home / "extents")
        while "read failed" not in (message := await asyncio.wait_for(heard.get(), 60)):
            pass  # the extents cannot be fetched anew either
        assert len(await asyncio.to_thread((place / "pack-00000.bin").read_bytes)) == 80
        await client.close()
        return message

    assert "read failed: DataError" in asyncio.run(listen())
