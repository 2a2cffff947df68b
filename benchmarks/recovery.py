"""How long a job stands still when a worker dies: kill -9 of one of two → the first optimizer step of both after it.

    goal                                                          limit
    tenplexrun, median                                            0.4 s
    tenplexrun / torchrun without its shared store, medians       0.1

The script is plain DDP on gloo (tests/programs/ddp.py), which knows nothing of any of them and begins anew. torchrun
runs as it is, too: its restart fails more often than not. "bare fork": a process that has torch imported forks two
workers that do the same (the physical limit: no launcher, nothing to notice). Launchers take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from launchers import ROOT, SCRIPT, TORCHRUN, TORCHRUN_CURED, US, Goal, Launcher, cell, finish, launched, median

NEVER_S = 40.0
SETTLE_S = 1.0

BARE_FORK = """
import json, os, pathlib, runpy, sys, tempfile, time, socket
import torch, torch._dynamo, torch.distributed
script, runs = sys.argv[1], int(sys.argv[2])
for _ in range(runs):
    stamps = pathlib.Path(tempfile.mktemp())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began, pids = time.time(), []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                              MASTER_PORT=str(port))
            sys.argv = [script, "--steps=1000000", "--pause=0.01", "--stamps=" + str(stamps)]
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            runpy.run_path(script, run_name="__main__")
    while not stamps.exists() or stamps.read_text().count("}") < 2:
        time.sleep(0.002)
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    first = [json.loads(line)["t"] for line in stamps.read_text().splitlines()]
    stamps.unlink()
    print(max(first) - began, flush=True)
"""


def recoveries(launcher: Launcher, kills: int) -> list[float]:
    """Seconds from each kill to the first step of both new workers; those that never came are left out."""
    found = []
    with launched(launcher, [f"--max-restarts={kills}"], ["--steps=1000000", "--pause=0.01"]) as job:
        if not job.wait(lambda: len(job.stamps(step=0)) >= 2):
            raise SystemExit(f"{launcher.name} never began:\n{job.log.read_text(errors='replace')}")
        for _ in range(kills):
            time.sleep(SETTLE_S)
            before = job.stamps(step=0)
            killed = time.time()
            os.kill(before[-1]["pid"], 9)
            if not job.wait(lambda: len(job.stamps(step=0)) >= len(before) + 2, NEVER_S):  # noqa: B023
                break
            found.append(max(stamp["t"] for stamp in job.stamps(step=0)) - killed)
    return found


def bare_forks(runs: int) -> list[float]:
    argv = [sys.executable, "-c", BARE_FORK, str(SCRIPT), str(runs + 1)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [float(line) for line in done.stdout.split()][1:]  # the first one warms what it forks from


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: one run of torchrun")
    parser.add_argument("--runs", type=int, default=6)
    args = parser.parse_args()
    runs = 3 if args.quick else max(5, args.runs)
    launchers = (US, TORCHRUN_CURED) if args.quick else (US, TORCHRUN_CURED, TORCHRUN)
    seconds: dict[str, list[float]] = {launcher.name: [] for launcher in launchers}
    tries = dict.fromkeys(seconds, runs)
    tries[TORCHRUN_CURED.name] = 1 if args.quick else runs
    turns = 1 if args.quick else 2  # a job each turn, in which several workers are killed one after the other
    for turn in range(turns):
        for launcher in launchers:
            kills = tries[launcher.name] * (turn + 1) // turns - tries[launcher.name] * turn // turns
            if launcher is TORCHRUN:  # a job that never comes back has no second kill
                for _ in range(kills):
                    seconds[launcher.name] += recoveries(launcher, 1)
            else:
                seconds[launcher.name] += recoveries(launcher, kills)
    seconds["bare fork"] = bare_forks(runs)
    tries["bare fork"] = runs
    print(f"kill -9 of a worker → first step, seconds ({SCRIPT.relative_to(ROOT)}, 2 gloo workers)\n")
    print(f"{'':26}  {'median':>8}   {'least … most'}")
    for name, values in seconds.items():
        print(f"{name:26}  {cell(values, tries[name])}")
    ours, theirs = median(seconds[US.name]), median(seconds[TORCHRUN_CURED.name])
    goals = [
        Goal("kill -9 → first step", ours, 0.4),
        Goal("as a part of torchrun's", ours / theirs if ours and theirs else None, 0.1, "×"),
    ]
    return finish("recovery", goals, {"seconds": seconds}, args.check)


if __name__ == "__main__":
    sys.exit(main())
