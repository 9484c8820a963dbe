"""Back-off and stop conditions for `tenacity`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from tenacity import RetryCallState

_random = random.Random()
"""A generator of its own: the number of failures must not change what a run draws from `random`."""


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
