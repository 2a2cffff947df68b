"""How many workers a node is for when it is told in words: auto, cpu, gpu, xpu."""

from __future__ import annotations

import glob
import os
import subprocess
import sys

from tenplexrun.errors import UsageError

WORDS = ("auto", "cpu", "gpu", "xpu")
NODES = {"gpu": ("/dev/nvidia[0-9]*", "/dev/kfd"), "xpu": ("/dev/dri/renderD*",)}
ASK_TIMEOUT_S = 120.0
_ASK = {
    "gpu": "torch.cuda.device_count()",
    "xpu": "torch.xpu.device_count()",
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else 0",
}


def count(word: str) -> int:
    """As torchrun counts. Torch is asked, in a process of its own, only where the machine has such a device file.

    Raises UsageError where the device asked for is missing.
    """
    patterns = NODES.get(word, NODES["gpu"] + NODES["xpu"])
    devices = _ask(_ASK[word]) if word != "cpu" and any(map(glob.glob, patterns)) else 0
    if devices == 0 and word in NODES:
        raise UsageError(f"--nproc-per-node {word}: this node has no such device; give a number")
    return devices or len(os.sched_getaffinity(0))


def _ask(expression: str) -> int:
    command = [sys.executable, "-c", f"import torch; print({expression})"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, cwd="/")
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        raise UsageError("--nproc-per-node: torch cannot count this node's devices; give a number") from None
