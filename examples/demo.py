"""The main job, unattended: a GPT that loses a worker, loses a node, gains a node and changes its parallelism.

Each "node" is an agent of its own on a loopback address. In one job:

    round 0  dp2·tp2 on two nodes           then kill -9 of a worker
    round 1  dp2·tp2, from memory           then kill -9 of a whole node, its store included
    round 2  dp1·tp2 on the survivor        then a new node joins
    round 3  dp2·tp2                        then `tenplexctl resize --pp 2`
    round 4  pp2·tp2                        to the end

It fails (exit code 1) unless the loss of every step equals that of an uninterrupted single-process run, and the sample
ids of every step are the single process's. Nothing is ever read from a disk checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError

from tenplexrun.core import report

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-8  # relative; float64, no dropout
FLAGS = ("--nnodes=1:2", "--nproc-per-node=2", "--tp=2", "--max-restarts=3", "--rdzv-conf=last_call_timeout=30")


class DemoError(Exception):
    """What was shown is not what must be."""


class Demo:
    """One run of the scenario. `out` gets the events, the metrics and all output."""

    def __init__(self, out: Path, steps: int, gap: int, extra: list[str]) -> None:
        self.out, self.gap, self.began = out, gap, time.monotonic()
        self.script = [str(HERE / "train_gpt.py"), f"--steps={steps}"]
        self.extra = extra

    def run(self, cluster: Cluster) -> None:
        reference = self.start_reference()
        try:
            self.start(cluster, "a", "127.0.0.1")
            self.start(cluster, "b", "127.0.0.2")
            self.see_round(cluster, 0, 2)
            self.say(f"kill -9 of worker {cluster.kill_worker('b')} on node b")
            self.see_round(cluster, 1, 2)
            self.say(f"kill -9 of node b: {cluster.kill_node('b')} processes, its store among them")
            self.see_round(cluster, 2, 1)
            self.start(cluster, "c", "127.0.0.3")
            self.see_round(cluster, 3, 2)
            answer = cluster.ctl("resize", "--pp=2", "--tp=2")
            self.say(f"tenplexctl resize --pp 2 --tp 2: {answer.stdout.strip() or answer.stderr.strip()}")
            self.see_round(cluster, 4, 2)
            for name in ("a", "c"):
                if cluster.exit_code(name) != 0:
                    raise DemoError(f"node {name} did not end well; see {self.out / name}.log")
            if reference.wait() != 0:
                raise DemoError(f"the single-process run failed; see {self.out / 'reference.log'}")
        finally:
            reference.kill()
            reference.wait()

    def start(self, cluster: Cluster, name: str, address: str) -> None:
        self.say(f"node {name} [{address}] starts")
        cluster.start(name, address, FLAGS, [*self.script, f"--metrics-dir={self.out / 'metrics'}", *self.extra])

    def start_reference(self) -> subprocess.Popen[bytes]:
        """The same script in one process, without a launcher, beside the job."""
        command = [sys.executable, *self.script, f"--metrics-dir={self.out / 'reference'}"]
        with (self.out / "reference.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def see_round(self, cluster: Cluster, number: int, nodes: int) -> None:
        """Wait for the round, then let it train for a while."""
        event = cluster.wait_round(number, nodes)
        sizes = "·".join(f"{axis}{size}" for axis, size in event["parallel"].items() if size > 1)
        self.say(f"round {number} runs at {sizes} on {nodes} node(s) from step {event['step']} ({event['cause']})")
        if number < 4:
            cluster.progress(self.gap)

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {line}", flush=True)


# --- the two checks -----------------------------------------------------------------------------------------------


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def check_losses(reference: list[dict[str, Any]], job: list[dict[str, Any]], steps: int) -> str:
    """Every loss that any rank in any round wrote, repeated steps too. Raises DemoError."""
    expected = {record["step"]: record["loss"] for record in reference}
    missing = set(range(steps)) - {record["step"] for record in job}
    if missing:
        raise DemoError(f"steps {sorted(missing)[:5]} were never run")
    worst = max((abs(r["loss"] - expected[r["step"]]) / abs(expected[r["step"]]), r["step"], r["round"]) for r in job)
    text = f"largest relative difference of a loss {worst[0]:.1e} (step {worst[1]}, round {worst[2]})"
    if not worst[0] <= TOLERANCE:
        raise DemoError(f"the losses are not those of the single process: {text}, allowed {TOLERANCE:.0e}")
    return text


def check_samples(reference: list[dict[str, Any]], job: list[dict[str, Any]]) -> str:
    """In every round, the dp ranks' ids of a step, in rank order, are the single process's. Raises DemoError."""
    expected = {record["step"]: record["ids"] for record in reference}
    steps: dict[tuple[int, int], list[int]] = {}
    for record in job:  # files are sorted by round and dp rank
        steps.setdefault((record["round"], record["step"]), []).extend(record["ids"])
    last = {round_: max(step for r, step in steps if r == round_) for round_, _ in steps}
    for (round_, step), ids in steps.items():
        # Of the step in which a round was killed, some ranks may have written and others not.
        whole = step < last[round_] or round_ == max(last)
        if ids != expected[step] and (whole or not set(ids) <= set(expected[step])):
            raise DemoError(f"round {round_} step {step} read other samples than the single process")
    return f"{len(steps)} steps in {len(last)} rounds read the single process's samples, in its order"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for logs, made anew (default demo-out)"
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of the whole job (default 300)")
    parser.add_argument("--gap", type=int, default=12, help="steps between two changes (default 12)")
    args, extra = parser.parse_known_args()  # what is left is the training script's
    shutil.rmtree(args.out, ignore_errors=True)
    out = args.out.resolve()
    demo = Demo(out, args.steps, args.gap, extra)
    try:
        with Cluster(out, "demo") as cluster:
            demo.run(cluster)
        print("\n" + report.table(report.rows(cluster.events())) + "\n")
        reference, job = read_metrics(out / "reference"), read_metrics(out / "metrics")
        print(f"losses:  {check_losses(reference, job, args.steps)}")
        print(f"samples: {check_samples(reference, job)}")
    except (DemoError, ClusterError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    print(f"all well, {time.monotonic() - demo.began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
