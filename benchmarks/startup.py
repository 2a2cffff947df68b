"""How long it takes until a job trains, and whether training is slower than without us.

    goal                                                            limit
    launch → first step of both ranks / torchrun's, medians         0.7
    tenplexrun --help, median                                       0.3 s
    step time / torchrun's, median of interleaved pairs             1.01 (missed only if its 95 % interval is above)

The script is plain DDP on gloo with two workers (tests/programs/ddp.py). Launchers take turns. "plain processes": the
two ranks started by hand, each importing torch itself (no launcher). Launches of ours begin with an empty cache. The
share of a processor that agent, guardian, store, view, pool and etcd take while the workers train is shown beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launchers import BIN, SCRIPT, TORCHRUN, US, Goal, Job, Launcher, cell, finish, launched, median

TICKS = os.sysconf("SC_CLK_TCK")
PLAIN = Launcher("plain processes", ())


def launch(launcher: Launcher) -> tuple[float, float]:
    """Seconds to the first step of both ranks, and processor seconds of the whole job of three steps."""
    with launched(launcher, [], ["--steps=3"]) as job:
        if not job.wait(lambda: len(job.stamps(step=0)) == 2):
            raise SystemExit(f"{launcher.name} never began:\n{job.log.read_text(errors='replace')}")
        first = max(stamp["t"] for stamp in job.stamps(step=0)) - job.began
        return first, job.end()


def launch_plainly() -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="tenplexrun-bench-") as folder:
        job = Job.__new__(Job)
        job.stamps_path, began = Path(folder, "stamps"), time.time()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        argv = [sys.executable, str(SCRIPT), "--steps=1", f"--stamps={job.stamps_path}"]
        ranks = [
            subprocess.Popen(argv, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.DEVNULL)
            for rank in range(2)
        ]
        for rank in ranks:
            rank.wait()
        return float(max(stamp["t"] for stamp in job.stamps(step=0)) - began)


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([BIN / "tenplexrun", "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def steady(pairs: int, window_s: float) -> tuple[list[tuple[float, float]], list[float]]:
    """Pairs of seconds a step, ours and torchrun's, and the share of a processor of all of ours but the workers.

    Both jobs are there all the time and take turns, the other one's workers stopped: what else this machine does then
    falls on both.
    """
    arguments = ["--steps=1000000000", "--stamp-every=20"]
    found, shares = [], []
    with launched(US, [], arguments) as ours, launched(TORCHRUN, [], arguments) as theirs:
        jobs = (ours, theirs)
        for job in jobs:
            if not job.wait(lambda: len(job.stamps(step=0)) == 2):  # noqa: B023
                raise SystemExit(f"a job never began:\n{job.log.read_text(errors='replace')}")
        workers = [{int(stamp["pid"]) for stamp in job.stamps(step=0)} for job in jobs]
        for turn in range(pairs):
            seconds = [0.0, 0.0]
            for mine in (0, 1) if turn % 2 == 0 else (1, 0):
                ticks, began = others_ticks(ours.process.pid, workers[0]), time.monotonic()
                for pid in workers[1 - mine]:
                    os.kill(pid, signal.SIGSTOP)
                seconds[mine] = step_seconds(jobs[mine], window_s)
                if mine == 0:
                    ticks = others_ticks(ours.process.pid, workers[0]) - ticks
                    shares.append(ticks / TICKS / (time.monotonic() - began))
                for pid in workers[1 - mine]:
                    os.kill(pid, signal.SIGCONT)
            found.append((seconds[0], seconds[1]))
    return found, shares


def step_seconds(job: Job, window_s: float) -> float:
    """Over the next seconds, by rank 0's stamps."""
    time.sleep(0.1)  # the other one stands still by then
    began = time.time()
    time.sleep(window_s)
    inside = [stamp for stamp in job.stamps(rank=0) if stamp["t"] >= began]
    return float((inside[-1]["t"] - inside[0]["t"]) / (inside[-1]["step"] - inside[0]["step"]))


def others_ticks(root: int, workers: set[int]) -> int:
    """Processor ticks so far of a launcher and its processes, workers and theirs left out."""
    stats = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        stats[int(entry)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    found, total = [root], 0
    for pid in found:
        total += stats.get(pid, (0, 0))[1]
        found += [child for child, (parent, _) in stats.items() if parent == pid and child not in workers]
    return total


def ratio_of_pairs(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Median of ours / theirs, and half its 95 % interval by the pairs' spread."""
    ratios = [ours / theirs for ours, theirs in pairs]
    half = 1.253 * 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.median(ratios), half


def show(
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    pairs: list[tuple[float, float]],
    ratio: float,
    half: float,
    shares: list[float],
) -> None:
    print("launch → first step of both ranks, seconds; --help to its end\n")
    print(f"{'':18}  {'median':>8}   {'least … most'}")
    for name, values in seconds.items():
        used = f"   processor {statistics.median(cpu[name]):.2f} s" if name in cpu else ""
        print(f"{name:18}  {cell(values, len(values))}{used}")
    ours, theirs = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    share = f"{100 * statistics.median(shares):.1f} % of a processor"
    print(f"\na step: ours {ours:.3f} ms, torchrun {theirs:.3f} ms; all but the workers: {share}")
    print(f"their ratio: {ratio:.4f} ± {half:.4f} (95 %, {len(pairs)} interleaved pairs)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer runs")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=30, help="of turns of steady training (default 30)")
    args = parser.parse_args()
    runs = 1 if args.quick else max(5, args.runs)
    seconds: dict[str, list[float]] = {US.name: [], TORCHRUN.name: [], PLAIN.name: [], "--help": []}
    cpu: dict[str, list[float]] = {US.name: [], TORCHRUN.name: []}
    for run in range(runs):
        for launcher in (US, TORCHRUN) if run % 2 == 0 else (TORCHRUN, US):
            first, used = launch(launcher)
            seconds[launcher.name].append(first)
            cpu[launcher.name].append(used)
        seconds[PLAIN.name].append(launch_plainly())
        seconds["--help"].append(help_seconds())
    pairs, shares = steady(6 if args.quick else args.pairs, 1.0)
    ratio, half = ratio_of_pairs(pairs)
    show(seconds, cpu, pairs, ratio, half, shares)
    ours_first, theirs_first = median(seconds[US.name]), median(seconds[TORCHRUN.name])
    goals = [
        Goal("launch → first step as a part of torchrun's", (ours_first or 0) / (theirs_first or 1), 0.7, "×"),
        Goal("tenplexrun --help", median(seconds["--help"]), 0.3),
        Goal(f"step time as a part of torchrun's, less its interval of ± {half:.3f}", ratio - half, 1.01, "×"),
    ]
    data = {"seconds": seconds, "cpu": cpu, "pairs": pairs, "ratio": ratio, "interval": half, "share": median(shares)}
    return finish("startup", goals, data, args.check)


if __name__ == "__main__":
    sys.exit(main())
