"""Where nodes meet, what they call each other, and which run of a name they join."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from cluster import BIN, Cluster, descendants

TIMEOUT_S = 200.0
SUMS = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
env = os.environ
print("SUM", int(total), "RANK", env["RANK"], "AT", env["MASTER_ADDR"], env["MASTER_PORT"], flush=True)
dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def launch(*args: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, str(BIN / "tenplexrun"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_taken_ports_and_an_unresolvable_host_name_do_not_matter(tmp_path: Path) -> None:
    path = script(tmp_path, SUMS)
    rename = "hostname nobody-knows.invalid"
    if subprocess.run(["unshare", "--uts", "sh", "-c", rename], capture_output=True).returncode != 0:
        pytest.skip("needs root to change the host's name for one process")
    with socket.socket() as one, socket.socket() as other:
        for sock, port in ((one, 29500), (other, 29400)):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("0.0.0.0", port))
                sock.listen()
            except OSError:
                pass  # taken by somebody else, which is as good
        shell = ("unshare", "--uts", "sh", "-c", f'{rename} && exec "$@"', "sh")
        done = launch("--nproc-per-node=2", path, before=shell)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("SUM 2") == 2
        done = launch("--nnodes=2", "--rdzv-backend=c10d", path)
        assert done.returncode == 73
        assert "127.0.0.1:29400: bind: address already in use" in done.stderr


def test_ipv6(tmp_path: Path) -> None:
    done = launch("--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:0", "--nproc-per-node=2", script(tmp_path, SUMS))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"SUM 2 RANK \d AT ::1 \d+", done.stdout)) == 2


def test_static_nodes_in_reverse_order_and_by_name(cluster: Cluster, tmp_path: Path) -> None:
    """torchrun's oldest command line: the node of rank 1 is there first, and waits for the one that is named."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    path = script(tmp_path, SUMS)
    flags = ["--nnodes=2", "--master-addr=localhost", f"--master-port={port}"]
    late = [str(BIN / "tenplexrun"), *flags, "--node-rank=1", "--local-addr=127.0.0.2", path]
    with subprocess.Popen(late, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        done = launch(*flags, "--node-rank=0", path)
        out, err = first.communicate(timeout=TIMEOUT_S)
    assert (done.returncode, first.returncode) == (0, 0), done.stderr + err
    assert "SUM 2 RANK 0" in done.stdout
    assert "SUM 2 RANK 1" in out


def test_a_run_id_is_used_again_after_an_end_and_after_kill_9_of_everything(cluster: Cluster, tmp_path: Path) -> None:
    """On an etcd that lives on; here another job's."""
    other = tmp_path / "other.py"
    other.write_text("import time; time.sleep(1000)")
    cluster.start("a", "127.0.0.1", [], [str(other)])
    path = script(
        tmp_path,
        "import os, sys, time\n"
        "print('ROUND', os.environ['TENPLEX_ROUND'], os.environ['TORCHELASTIC_RUN_ID'], flush=True)\n"
        "if len(sys.argv) > 1: time.sleep(1000)\n",
    )
    flags = ["--rdzv-backend=etcd", f"--rdzv-endpoint={cluster.endpoint}", "--rdzv-id=again", "--nnodes=1:2", path]
    flags.insert(0, "--rdzv-conf=lease=60,last_call_timeout=0")
    for _ in range(2):
        done = launch(*flags)
        assert done.returncode == 0, done.stderr
        assert "ROUND 0 again" in done.stdout
    with subprocess.Popen([str(BIN / "tenplexrun"), *flags, "stay"], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert "ROUND 0 again" in killed.stdout.readline()
        for pid in descendants(killed.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    done = launch(*flags)
    assert done.returncode == 0, done.stderr
    assert "ROUND 0 again" in done.stdout, "the killed run's records were joined"


def test_bytes_of_any_kind_reach_the_script_and_one_macro_is_replaced(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; print('ARGS', [os.fsencode(a).hex() for a in sys.argv[1:]])")
    given = [b"\xff\xfe", b"a b", b"$$", b"", b"$local_rank", b"${rank}", b"-x${local_rank}y", b"--local_rank", b"\n"]
    done = launch("--nproc-per-node=1", "-m", "--no_python", path)
    assert done.returncode == 2
    command = [os.fsencode(BIN / "tenplexrun"), b"--nproc-per-node=1", os.fsencode(path), *given]
    found = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
    assert found.returncode == 0, found.stderr
    line = found.stdout.decode().partition("ARGS ")[2]
    expected = [argument.replace(b"${local_rank}", b"0").hex() for argument in given]
    assert json.loads(line.replace("'", '"')) == expected
