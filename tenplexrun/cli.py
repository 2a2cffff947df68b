"""`tenplexrun`: reads the command line and runs the job. Imports nothing before it has to: `--help` is instant."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tenplexrun.errors import TenplexError
from tenplexrun.flags import parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the command. Users' faults end in one line and a documented exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the launcher listens: no traceback for a Ctrl-C
    try:
        args = parser(os.environ).parse_args(sys.argv[1:] if argv is None else argv)
        from tenplexrun.config import check
        from tenplexrun.launcher import run

        verdict = run(check(args, os.environ))
    except TenplexError as error:
        print(f"tenplexrun: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(verdict.code)
