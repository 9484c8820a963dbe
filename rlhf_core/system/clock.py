"""The clock of code that waits, as an argument: tests use `rlhf_core.testing.clock.ManualClock`."""

from __future__ import annotations

import time


class Clock:
    """The monotonic clock of this machine, for code that reads the time and waits.

    Code that only reads it takes a function such as `time.monotonic`.
    """

    def monotonic(self) -> float:
        """Return seconds since some start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


SYSTEM_CLOCK = Clock()
