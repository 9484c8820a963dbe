"""Clocks, a time limit for calls of libraries, and back-off and stop conditions for `tenacity`."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tenacity import RetryCallState

_T = TypeVar("_T")

_random = random.Random()
"""A generator of its own: the number of failures must not change what a run draws from `random`."""


class Clock:
    """The monotonic clock of this machine, as an argument of code that reads the time and waits.

    Tests use `tests.support.scripted_machine.ManualClock`. Code that only reads the time takes a function
    such as `time.monotonic`.
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
    # Not CLOCK_MONOTONIC, which stands still while the machine is suspended. The start times in /proc count
    # that time.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


SYSTEM_CLOCK = Clock()


def in_background(call: Callable[[], _T]) -> Future[_T]:
    """Run `call` in a daemon thread, which does not delay the end of the process. Return its future."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        # Also SystemExit, or who waits for the future would wait for ever.
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return the result of `call`. Raises TimeoutError if it takes longer than `seconds`.

    It is for libraries that limit only the time between two reads. After the time limit, `call` continues in
    its thread, and its result is ignored.
    """
    return in_background(call).result(timeout=seconds)


def backoff(
    first: float, longest: float = math.inf, jitter: tuple[float, float] = (0.0, 1.0)
) -> Callable[[RetryCallState], float]:
    """Return a wait function: `first` seconds, doubled after each attempt up to `longest`, times a random
    factor.

    The factor is drawn uniformly from `jitter`, so that clients which failed together do not retry together.
    """

    def wait(state: RetryCallState) -> float:
        doublings = min(state.attempt_number - 1, 60)  # a float overflows after 1024, in a long outage
        return min(longest, first * 2.0**doublings) * _random.uniform(*jitter)

    return wait


def stop_after_failing(seconds: float) -> Callable[[RetryCallState], bool]:
    """Return a stop function: no attempt starts later than `seconds` after the first failure.

    tenacity's own `stop_before_delay` counts from the first start: a call that needs minutes, such as an
    upload, would not be retried at all.
    """
    # State of one call: each call needs a stop function of its own.
    first_failure: float | None = None

    def stop(state: RetryCallState) -> bool:
        nonlocal first_failure
        failed_at = state.outcome_timestamp
        assert failed_at is not None
        if first_failure is None:
            first_failure = failed_at
        # tenacity draws the pause before it asks the stop function.
        return failed_at + state.upcoming_sleep - first_failure > seconds

    return stop
