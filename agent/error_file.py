"""What a worker leaves in TORCHELASTIC_ERROR_FILE (torch's `@record`), and the words for a failure.

    {"message": {"message": str, "extraInfo": {"py_callstack": str, "timestamp": str}, "errorCode": int}}

Other handlers may write {"message": str} (torch/distributed/elastic/multiprocessing/errors/error_handler.py), and so do
we, with the "kind", of an error that no restart would mend.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenplexrun.core.rounds import FINAL, Failure
from tenplexrun.errors import TenplexError, to_wire

VARIABLE = "TORCHELASTIC_ERROR_FILE"
MAX_BYTES = 32 << 10  # of what is told to all nodes; a longer file is cut to its message
MAX_LINES = 30


def make(path: Path) -> str:
    """A place for a new worker's file, without that of an older launch. Returns what the variable is set to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return str(path)


def leave(error: TenplexError, environ: Mapping[str, str]) -> None:
    """For the agent of this worker to read, if nothing but another job could do better."""
    path, record = environ.get(VARIABLE), final(error)
    if path and record is not None:
        with contextlib.suppress(OSError):  # then there are restarts, in vain
            Path(path).write_text(json.dumps(record))


def final(error: TenplexError) -> dict[str, str] | None:
    """The record of an error that no restart would mend."""
    record = to_wire(error)
    return record if record["kind"] in FINAL else None


def read(path: Path) -> dict[str, Any] | None:
    """The record, if there is one that can be read."""
    try:
        text = path.read_text(errors="replace")
        record = json.loads(text)
        if not isinstance(record, dict):
            return None
        return record if len(text) <= MAX_BYTES else {"message": message_of(record)[: MAX_BYTES // 2]}
    except (OSError, ValueError):
        return None


def message_of(record: Mapping[str, Any]) -> str:
    found = record.get("message")
    return str(found.get("message") if isinstance(found, dict) else found)


def describe(failure: Failure) -> list[str]:
    """When it was, its error file if it adds to stderr, and the last lines of stderr; for the eyes of a person."""
    stamp = time.strftime("%H:%M:%S", time.localtime(failure.at)) + f".{int(failure.at * 1000) % 1000:03d}"
    lines = [f"first failure at {stamp}: {failure.describe()}"]
    if failure.error is not None and not failure.is_final:  # which is on stderr, too
        lines.append(f"its error file: {message_of(failure.error)}")
        found = failure.error.get("message")
        info = found.get("extraInfo") if isinstance(found, dict) else None
        stack = str(info.get("py_callstack", "")).splitlines() if isinstance(info, dict) else []
        if stack and not any(line.endswith(stack[-1]) for line in failure.stderr):  # torch puts "[rank1]: " before
            lines += [f"  {line}" for line in stack[-MAX_LINES:]]
    if failure.stderr:
        lines.append("its last words on stderr:")
        lines += [f"  {line}" for line in failure.stderr]
    return lines


def hand_on(failure: Failure, environ: Mapping[str, str]) -> None:
    """Write the first failure to the launcher's own error file, as torchrun does for the scheduler that started it."""
    path = environ.get(VARIABLE)
    if not path:
        return
    record: dict[str, Any] = dict(failure.error) if failure.error else {"message": {"message": failure.describe()}}
    if isinstance(record["message"], dict):
        record["message"] = {**record["message"], "errorCode": failure.exit_code}
        record["message"].setdefault("extraInfo", {"timestamp": str(int(failure.at))})
    try:
        Path(path).write_text(json.dumps(record))
    except OSError:
        pass  # its loss must not hide the failure itself
