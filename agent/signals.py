"""What the signals that reach the launcher do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

OnSignal = Callable[[signal.Signals], None]
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
ATTEMPTS = 3  # asked to end, told to end at once, gone: the guardian then cleans up


class Signals:
    """Installs the handlers. `ending`: signals that end this node's part; SIGUSR1 and SIGUSR2 among the others are
    passed on to the workers; what else is not named keeps its default. `bind` names who is told from then on."""

    def __init__(self, ending: Sequence[signal.Signals], on_end: OnSignal) -> None:
        self._on_end = on_end
        self._on_pass: Callable[[signal.Signals], None] = lambda signum: None
        self._count = 0
        loop = asyncio.get_running_loop()
        for signum in ending:
            if signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # under nohup
            loop.add_signal_handler(signum, self._end, signum)
        for signum in PASSED_ON:
            if signum not in ending:
                loop.add_signal_handler(signum, self._pass, signum)
        if signal.SIGINT not in ending:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def bind(self, on_end: OnSignal, on_pass: OnSignal) -> None:
        self._on_end, self._on_pass = on_end, on_pass

    @property
    def urgent(self) -> bool:
        """Somebody has asked more than once."""
        return self._count > 1

    def _end(self, signum: signal.Signals) -> None:
        self._count += 1
        if self._count >= ATTEMPTS:
            os._exit(128 + signum)
        self._on_end(signum)

    def _pass(self, signum: signal.Signals) -> None:
        self._on_pass(signum)
