"""The wish that a stage should stop: a cancellation, Ctrl-C, or a machine that is about to go.

    outside `deferred`    the stage ends at once (SystemExit), as it stands; its last checkpoint is where it continues
    inside `deferred`     a training loop looks at `asked` after each step, writes a checkpoint, and calls `leave`

Whoever asks waits some 20 s (`stages.guard`) before it kills: a step that takes longer is lost, as with a
kill.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

EXIT_STOPPED = 128 + signal.SIGTERM


class StopRequest:
    """One for a process; `on_signal` is its handler of SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.asked = False
        self._deferred = False

    def on_signal(self, _signum: int, _frame: Any) -> None:
        """Note it; leave, unless a loop has promised to. Further signals change nothing: cleaning up is not
        interrupted.
        """
        if not self.asked:
            self.asked = True
            if not self._deferred:
                self.leave()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The body looks at `asked` itself, and must `leave` soon after it is true."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def leave(self) -> NoReturn:
        """End the process tidily."""
        raise SystemExit(EXIT_STOPPED)
