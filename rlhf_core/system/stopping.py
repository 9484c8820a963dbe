"""Graceful stop requests: SIGTERM and SIGINT, from a cancellation, Ctrl-C, or a machine that shuts down.

    before `defer`     the stage ends at once (SystemExit) and continues from its last checkpoint
    after `defer`      a training loop checks `requested` after each step, saves a checkpoint, calls `exit`
    after the loop     the stage goes on, and saves what the loop has trained

The process that sends the signal waits for about 20 s (`run.reaper`) before it kills: a longer step is lost.
"""

from __future__ import annotations

import signal
from typing import Any, NoReturn

EXIT_STOPPED = 128 + signal.SIGTERM


class StopRequest:
    """The stop request of a process; `on_signal` is its handler of SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def on_signal(self, _signum: int, _frame: Any) -> None:
        """Record the request and exit, unless that is deferred.

        Further signals are ignored, because they would interrupt the clean-up.
        """
        if not self.requested:
            self.requested = True
            if not self._deferred:
                self.exit()

    def defer(self) -> None:
        """Do not exit on a signal any more: the loop that follows checks `requested`, and must call `exit`
        soon after it is true.
        """
        self._deferred = True

    def exit(self) -> NoReturn:
        """End the process with clean-up."""
        raise SystemExit(EXIT_STOPPED)
