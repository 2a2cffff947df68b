"""What most tests of whole jobs train: examples/train_gpt.py, small, with little data, and not as fast as it can, since
other tests run beside it. Later flags win."""

from __future__ import annotations

import sysconfig
from pathlib import Path

SCRIPT = str(Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py")
SMALL = ["--dim=32", "--heads=2", "--seq-len=32", "--global-batch=4", "--micro-batch=2", "--steps=100000"]
DATA = f"--source={sysconfig.get_paths()['stdlib']}/asyncio"
GPT = [SCRIPT, *SMALL, DATA, "--pause=0.1"]
