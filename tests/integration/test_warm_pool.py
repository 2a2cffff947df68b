"""The warm pool: forks, rounds, exits, sweeps, and its own death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tenplexrun.agent import pool
from tenplexrun.agent.script import Command
from tenplexrun.errors import ProcessError
from tenplexrun.ports import WorkerSpec


def rank_envs(env: Mapping[str, str], world: int, port: int) -> list[dict[str, str]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    return [{**env, **common, **rank} for rank in ranks]


def test_program_gets_environment_arguments_and_default_signals(
    driver: Any, tmp_path: Path, env: dict[str, str]
) -> None:
    text = (
        'echo "$1|$2|$ONE|$LOCAL"; grep SigIgn /proc/$$/status;'
        " for n in 0 1 2 3 4 5 6 7 8 9; do (: >&$n) 2>/dev/null && printf $n; done; exit 7"
    )
    command = Command("program", ("sh", "-c", text, "sh", "a b", "${local_rank}x$${x}"), str(tmp_path))
    expected = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True)
    outcomes = driver.run(command, [{**env, "ONE": "1", "LOCAL": str(n)} for n in range(2)])
    for n, outcome in enumerate(outcomes):
        words, ignored, open_ones = outcome.out.splitlines()
        assert (outcome.code, words) == (7, f"a b|{n}x$${{x}}|1|{n}")
        assert ignored == expected.stdout.strip()
        assert open_ones == "012"


def test_large_environment_and_many_workers(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    big = {f"BIG{n}": "x" * 50_000 for n in range(6)}
    command = Command("program", ("sh", "-c", "echo $RANK ${#BIG0} ${GONE:--}"), str(tmp_path))
    os.environ["GONE"] = "only the agent's"
    try:
        outcomes = driver.run(command, [{**env, **big, "RANK": str(n)} for n in range(24)])
    finally:
        del os.environ["GONE"]
    assert [outcome.out for outcome in outcomes] == [f"{n} 50000 -\n" for n in range(24)]


def test_threads_are_the_workers_own(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "threads.py").write_text(
        "import torch; a = torch.ones(512, 512); (a @ a).sum().item(); print(torch.get_num_threads())"
    )
    unset = {name: value for name, value in env.items() if name != "OMP_NUM_THREADS"}
    envs = [{**env, "OMP_NUM_THREADS": "3"}, {**env, "OMP_NUM_THREADS": "2,1"}, unset]
    outcomes = driver.run(Command("script", ("threads.py",), str(tmp_path)), envs)
    assert [outcome.out for outcome in outcomes] == ["3\n", "2\n", f"{len(os.sched_getaffinity(0))}\n"]


DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 8) * (1 + dist.get_rank())).sum().backward()
    optimizer.step()
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(total.item(), sum(p.sum() for p in model.parameters()).item())
dist.destroy_process_group()
"""


def test_rounds_of_gloo_workers_each_with_a_fresh_store(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    seen = set()
    for _ in range(5):
        port = driver.do(driver.pool.listen("127.0.0.1"))
        outcomes = driver.run(Command("script", ("ddp.py",), str(tmp_path)), rank_envs(env, 2, port), host_store=True)
        assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, ""), (0, "")]
        assert len({outcome.out for outcome in outcomes}) == 1
        seen.add(outcomes[0].out)
    assert len(seen) == 1
    assert seen.pop().startswith("3.0 ")


def test_wildcard_and_ipv6_stores(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    for host, reach in (("", "127.0.0.1"), ("::1", "::1")):
        port = driver.do(driver.pool.listen(host))
        driver.do(driver.pool.sweep())  # of the round before: it spares the next one's socket
        envs = [{**each, "MASTER_ADDR": reach} for each in rank_envs(env, 2, port)]
        outcomes = driver.run(Command("script", ("ddp.py",), str(tmp_path)), envs, host_store=True)
        assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, ""), (0, "")]


def test_workers_do_not_outlive_their_rounds_store(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    before = driver.children_of_pool()
    driver.do(driver.pool.listen("127.0.0.1"))
    pids = driver.spawn(Command("program", ("sleep", "1000"), str(tmp_path)), [env, env], host_store=True)
    [host] = driver.children_of_pool() - before - set(pids)
    os.kill(host, signal.SIGKILL)
    assert {(ended.pid, ended.code) for ended in (driver.exit(), driver.exit())} == {(pid, -9) for pid in pids}
    driver.do(driver.pool.sweep())
    assert driver.children_of_pool() == before


def test_store_host_needs_listen_first(light_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    with pytest.raises(ProcessError, match=r"listen\(\) comes first"):
        light_driver.spawn(Command("script", ("x.py",), str(tmp_path)), [env], host_store=True)


NASTY = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 1; done"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
open("ready." + os.environ["RANK"], "w").close()
time.sleep(1000 if os.environ.get("STAY") else 0)
"""


def test_sweep_leaves_nothing_of_a_round(light_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "nasty.py").write_text(NASTY)
    before = light_driver.living()
    envs = [{**env, "TENPLEX_NODE_DIR": str(light_driver.node_dir), "RANK": str(n), "STAY": "1" * n} for n in range(2)]
    pids = light_driver.spawn(Command("script", ("nasty.py",), str(tmp_path)), envs)
    light_driver.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "workers have started")
    first = light_driver.exit()
    assert (first.pid, first.code) == (pids[0], 0)
    assert len(light_driver.living() - before) >= 8
    light_driver.do(light_driver.pool.sweep())
    assert light_driver.living() == before
    assert (light_driver.exit().pid, light_driver.pool.exits.qsize()) == (pids[1], 0)


def test_shared_memory_of_killed_workers_is_removed_by_those_who_see_to_that(
    driver: Any, tmp_path: Path, env: dict[str, str]
) -> None:
    """multiprocessing's resource tracker and torch's manager outlive the worker until they are through."""
    (tmp_path / "shares.py").write_text(
        "import os, signal, torch\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "block = SharedMemory(create=True, size=4096)\n"
        "torch.multiprocessing.set_sharing_strategy('file_system')\n"
        "tensor = torch.ones(1000).share_memory_()\n"
        "own = [name for name in os.listdir('/dev/shm') if name.startswith(f'torch_{os.getpid()}_')]\n"
        "print(block.name, *own, flush=True)\n"
        "if os.fork(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.pause()\n"  # an orphan with the memory in its hands
    )
    outcomes = driver.run(Command("script", ("shares.py",), str(tmp_path)), [env, env])
    names = [name for outcome in outcomes for name in outcome.out.split()]
    assert len(names) == 4, outcomes
    driver.until(lambda: not {*names} & {*os.listdir("/dev/shm")}, "all of it is removed")


def test_signals_reach_workers_and_only_living_ones(light_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "wait.py").write_text(
        "import os, time; open('ready.' + os.environ['RANK'], 'w').close(); time.sleep(1000)"
    )
    pids = light_driver.spawn(
        Command("script", ("wait.py",), str(tmp_path)), [{**env, "RANK": str(n)} for n in range(3)]
    )
    light_driver.until(lambda: len(list(tmp_path.glob("ready.*"))) == 3, "workers have started")
    for pid, signum in zip(pids, (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1), strict=True):
        light_driver.loop.call_soon_threadsafe(light_driver.pool.signal, pid, signum)
        ended = light_driver.exit()
        assert (ended.pid, ended.code) == (pid, -signum)
        assert abs(ended.at - time.time()) < 60
        light_driver.loop.call_soon_threadsafe(light_driver.pool.signal, pid, signum)
    light_driver.do(light_driver.pool.sweep())


def test_exits_come_after_their_pids(light_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    """Workers that end before the last one is forked are still told to who spawned them."""

    async def spawn_and_collect() -> tuple[list[int], list[int]]:
        told: list[int] = []

        async def collect() -> None:
            while True:
                told.append((await light_driver.pool.exits.get()).pid)

        collector = asyncio.ensure_future(collect())
        null = os.open(os.devnull, os.O_WRONLY)
        pids = await light_driver.pool.spawn([WorkerSpec(n, env, null, null) for n in range(12)], False)
        assert told == []
        os.close(null)
        while len(told) < len(pids):
            await asyncio.sleep(0.01)
        collector.cancel()
        return pids, told

    light_driver.pool.command = Command("program", ("true",), str(tmp_path))
    pids, told = light_driver.do(spawn_and_collect())
    assert sorted(told) == sorted(pids)
    light_driver.do(light_driver.pool.sweep())


def test_killed_pool_takes_its_workers_along_and_comes_back(
    light_driver: Any, tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "nasty.py").write_text(NASTY)
    envs = [{**env, "TENPLEX_NODE_DIR": str(light_driver.node_dir), "RANK": str(n), "STAY": "1"} for n in range(2)]
    pids = light_driver.spawn(Command("script", ("nasty.py",), str(tmp_path)), envs)
    light_driver.until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "workers have started")
    old = light_driver.living()
    pool_pid = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    guardian = light_driver.processes._process.pid
    os.kill(pool_pid, signal.SIGKILL)
    assert {(ended.pid, ended.code) for ended in (light_driver.exit(), light_driver.exit())} == {
        (pid, -9) for pid in pids
    }
    light_driver.until(lambda: light_driver.living() & old == {guardian}, "orphans of a dead pool are killed")
    (tmp_path / "fine.py").write_text("print('fine')")
    [outcome] = light_driver.run(Command("script", ("fine.py",), str(tmp_path)), [env])
    assert (outcome.code, outcome.out, outcome.err) == (0, "fine\n", "")
    assert light_driver.do(light_driver.processes.exits.get()).name == "warm pool"


def test_a_pool_that_cannot_start_is_said(new_driver: Any, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """Nobody waits for ever for a process that died over its imports."""
    (tmp_path / "numpy.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ProcessError, match="the warm pool has died"):
        new_driver()


def test_a_working_directory_that_looks_like_ours(
    without_torch: None, tmp_path: Path, monkeypatch: Any, request: Any
) -> None:
    """PYTHONPATH counts, the working directory does not; scripts without torch do without its store."""
    for name in ("tenplexrun", "json", "socket"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "plain.py").write_text("import sys; print(sys.path[0])")
    monkeypatch.chdir(tmp_path)
    driver = request.getfixturevalue("light_driver")
    assert "torch" in driver.pool.failed_imports
    driver.do(driver.pool.listen("127.0.0.1"))
    [outcome] = driver.run(Command("script", ("plain.py",), str(tmp_path)), [dict(os.environ)], host_store=True)
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{tmp_path}\n", "")


def test_a_pool_that_does_not_answer_is_killed_and_comes_back(
    light_driver: Any, tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SWEEP_TIMEOUT_S", 0.5)
    command = Command("program", ("sleep", "1000"), str(tmp_path))
    light_driver.spawn(command, [env])
    workers = light_driver.children_of_pool()
    os.kill(light_driver.pool._pid, signal.SIGSTOP)
    light_driver.do(light_driver.pool.sweep())
    light_driver.until(lambda: not light_driver.living() & workers, "workers of a frozen pool are killed")
    assert light_driver.exit().code == -signal.SIGKILL
    [outcome] = light_driver.run(Command("program", ("echo", "again"), str(tmp_path)), [env])
    assert outcome.out == "again\n"
