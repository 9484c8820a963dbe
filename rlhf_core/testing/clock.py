"""A clock for tests of code that waits."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from rlhf_core.system.waiting import Clock


class ManualClock(Clock):
    """A clock that only `sleep` moves. Nothing waits.

    Attributes:
        now: what `monotonic` returns, in seconds; tests may change it.
        events: what will happen, as pairs of a time and a call. `sleep` calls and removes those whose time
            has come.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.events: list[tuple[float, Callable[[], object]]] = []

    @override
    def monotonic(self) -> float:
        return self.now

    @override
    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in [event for event in self.events if event[0] <= self.now]:
            self.events.remove(event)
            event[1]()
