"""The launcher from outside: real processes, a real etcd, real workers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from cluster import BIN, Cluster, descendants

from tenplexrun.agent.sweep import sweep

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 150.0


def launch(*args: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "tenplexrun"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd, env=env)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_a_script_that_only_reads_variables_runs(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(range(256)) * 16)
    done = launch(
        "--standalone",
        "--nproc-per-node=2",
        f"--data=bytes:{tmp_path / 'data.bin'}?sample_bytes=64",
        "--global-batch=8",
        "--micro-batch=2",
        str(ROOT / "examples" / "env_only.py"),
    )
    assert done.returncode == 0, done.stderr
    assert "[0]:" in done.stdout
    assert "[1]:" in done.stdout


def test_a_group_that_the_script_has_had_before_does_not_matter(tmp_path: Path) -> None:
    """Torch's own keys of a destroyed group, still in the round's store, had the next one wait for ever."""
    text = """
        import torch, torch.distributed as dist, tenplexrun
        dist.init_process_group("gloo")
        for _ in range(2):
            dist.barrier()
            dist.destroy_process_group()
            tenplexrun.init()
        """
    done = launch("--nproc-per-node=2", script(tmp_path, textwrap.dedent(text)))
    assert done.returncode == 0, done.stderr


def test_arguments_reach_the_script_byte_for_byte(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys, json; print('ARGS', json.dumps(sys.argv[1:]))")
    given = ["--r=16", "--log", "x", "a b", "$$", "", "--nnodes=9", "-m", "--", "-t", "ü"]
    done = launch(path, *given)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "ARGS" in line)
    assert json.loads(line.partition("ARGS ")[2]) == given


def test_the_workers_own_exit_code_and_last_words_are_the_verdict(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit('the disk is on fire') if len(sys.argv) > 1 else sys.exit(5)\n"
        "time.sleep(300)\n",
    )
    done = launch("--nproc-per-node=2", path)
    assert done.returncode == 5
    assert "rank 1" in done.stderr
    assert "exit code 5" in done.stderr
    done = launch("--nproc-per-node=2", path, "loud")
    assert done.returncode == 1
    assert "the disk is on fire" in done.stderr


def test_a_signal_becomes_128_plus_n(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert launch(path).returncode == 128 + signal.SIGSEGV


BAD = [
    (["nowhere.py"], 2, "no script 'nowhere.py'"),
    (["--frobnicate", "x.py"], 2, "--frobnicate"),
    ([], 2, "no script given"),
    (["--nproc-per-node=3", "--tp=2", "train.py"], 2, "tp=2"),
    (["--nproc-per-node=2", "--tp=2", "--pp=2", "train.py"], 2, "not divisible"),
    (["--nproc-per-node=many", "train.py"], 2, "--nproc-per-node"),
    (["--nnodes=3:2", "train.py"], 2, "--nnodes"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:9", "train.py"], 70, "127.0.0.1:9"),
    (["--rdzv-conf=lease=700", "train.py"], 2, "lease"),
    (["--data=bytes:/nowhere?sample_bytes=8", "--global-batch=4", "train.py"], 69, "/nowhere"),
]


@pytest.mark.parametrize(("args", "code", "words"), BAD, ids=[" ".join(args) or "nothing" for args, _, _ in BAD])
def test_bad_input_is_one_clear_line(tmp_path: Path, args: list[str], code: int, words: str) -> None:
    script(tmp_path, "")
    done = launch(*args, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tenplexrun: ")]
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert "Traceback" not in done.stderr


def test_a_layout_that_the_model_cannot_have_is_one_clear_line() -> None:
    done = launch("--nproc-per-node=2", "--tp=2", str(ROOT / "examples" / "train_gpt.py"), "--heads=1", "--dim=8")
    assert done.returncode == 2
    assert "--heads 1" in done.stderr
    assert "Traceback" not in done.stderr


def _in_namespace(setup: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher where `setup` has changed what is mounted, for it alone."""
    command = [str(BIN / "tenplexrun"), *args]
    probe = subprocess.run(["unshare", "--mount", "sh", "-c", setup], capture_output=True)
    if probe.returncode != 0:
        pytest.skip(f"needs root to change mounts for one process: {probe.stderr.decode().strip()}")
    shell = ["unshare", "--mount", "sh", "-c", f'{setup} && exec "$@"', "sh", *command]
    return subprocess.run(shell, capture_output=True, text=True, timeout=TIMEOUT_S)


GPT = [str(ROOT / "examples" / "train_gpt.py"), "--steps=3"]


@pytest.mark.parametrize(
    ("size", "flags", "code"), [("4m", [], 73), ("224m", ["--dim=384"], 67)], ids=["etcd", "state"]
)
def test_full_shared_memory_is_one_clear_line(size: str, flags: list[str], code: int) -> None:
    setup = f"mount -t tmpfs -o size={size} none /dev/shm"
    done = _in_namespace(setup, "--nproc-per-node=2", "--tp=2", *GPT, *flags)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if "tenplexrun: " in line]
    assert any("needs" in line and "free" in line for line in lines), done.stderr
    assert "Traceback" not in done.stderr


def test_without_fuse_the_data_is_shown_as_files() -> None:
    done = _in_namespace("mount --bind /dev/null /dev/fuse", "--nproc-per-node=1", *GPT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"data shown by farm \(.*\), the state only by HTTP; ", done.stderr)


def test_the_same_run_id_twice_in_a_row(tmp_path: Path) -> None:
    path = script(tmp_path, "import os; print('ROUND', os.environ['TENPLEX_ROUND'])")
    for _ in range(2):
        done = launch("--rdzv-id=again", path)
        assert done.returncode == 0, done.stderr
        assert "ROUND 0" in done.stdout


def test_kill_9_of_the_agent_leaves_nothing(tmp_path: Path, cluster: Cluster) -> None:
    """Processes, mount and directory are what the fixture looks for; here: they are gone at once, by the guardian."""
    path = script(tmp_path, "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '300']); time.sleep(300)")
    cluster.start("a", "127.0.0.1", ["--nproc-per-node=2"], [path])
    folder = Path(cluster.event("a", "started")["dir"])
    pids = cluster.workers("a")
    cluster.wait(lambda: len(descendants(pids[0])) > 1, "the worker's own child")
    cluster.agents["a"].kill()
    deadline = time.monotonic() + 30
    while folder.exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the guardian has not cleaned up"
        time.sleep(0.02)


@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.4, 0.8, 1.6, 3.2])
def test_kill_9_of_the_agent_while_it_starts_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    path = script(tmp_path, "import time; time.sleep(300)")
    agent = subprocess.Popen([str(BIN / "tenplexrun"), path], stderr=subprocess.DEVNULL)
    time.sleep(after_s)
    agent.kill()
    agent.wait()
    deadline = time.monotonic() + 30
    while any(str(agent.pid) in record.read_text() for record in Path("/dev/shm").glob("tenplexrun-*/agent.json")):
        assert time.monotonic() < deadline, "the node directory is still there"
        sweep()  # killed before its guardian was there, the next start cleans up
        time.sleep(0.05)


def test_interrupt_ends_the_job_with_130(tmp_path: Path, cluster: Cluster) -> None:
    """Also where a shell had it ignored, as it has for what a script starts with `&`: the workers hear it too."""
    path = script(tmp_path, "import time; time.sleep(300)")
    deaf = ["sh", "-c", "trap '' INT QUIT; exec \"$@\"", "sh"]
    cluster.start("a", "127.0.0.1", ["--nproc-per-node=2"], [path], within=deaf)
    cluster.workers("a")
    cluster.agents["a"].send_signal(signal.SIGINT)
    assert cluster.exit_code("a") == 130
    assert "still here" not in cluster.log("a")


FLOOD = """
import os, signal
def say(data):
    view = memoryview(data.encode())
    while view:
        view = view[os.write(1, view):]
for start in range(0, 500_000, 100):
    say("".join(f"{os.environ['RANK']} {n} {n * n}\\n" for n in range(start, start + 100)))
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_nothing_is_lost_of_a_million_lines_in_seconds(tmp_path: Path) -> None:
    """Some 400,000 lines a second on two cores, and then the end, with lines still in the pipes."""
    shown = tmp_path / "shown"
    flags = ["--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}"]
    with shown.open("wb") as file:
        command = [str(BIN / "tenplexrun"), *flags, script(tmp_path, FLOOD)]
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    assert done.returncode == 137, done.stderr
    lines = shown.read_text().splitlines()
    for rank in (0, 1):
        kept = (tmp_path / "logs" / "round_0" / f"rank_{rank}" / "stdout.log").read_text().splitlines()
        assert kept == [f"{rank} {number} {number * number}" for number in range(len(kept))], "as it was written"
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [f"[{rank}]: {line}" for line in kept]
    assert len(kept) == 500_000, "all of the one that was killed after its last line"
    assert all(line.startswith(("[0]: ", "[1]: ")) for line in lines)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from tenplexrun import cli\n"
        "try: cli.main(['--help'])\n"
        "finally: print('slow:', {'torch', 'numpy', 'asyncio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert "--nproc-per-node" in done.stdout
    assert done.stdout.endswith("slow: set()\n")
    imported = "import sys; from tenplexrun import ctl, launcher, node; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", imported], check=True, cwd="/")
