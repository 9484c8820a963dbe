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


def seconds_since_boot() -> float:
    """Return the time in the unit of `ProcessId.started`, which a change of the system's clock does not
    affect.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


SYSTEM_CLOCK = Clock()
