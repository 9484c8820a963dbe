"""When a failed stage is tried again. Prefect's task and `run_pipeline` ask the same policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenacity import Retrying, retry_if_exception, wait_chain, wait_fixed

from rlhf_core.errors import (
    CorruptArtifact,
    GateFailed,
    InputError,
    NonFiniteError,
    OutOfMemory,
    StageTimedOut,
    Superseded,
    UnexpectedError,
)

NEVER_RETRIED = (
    InputError,
    Superseded,
    StageTimedOut,
    CorruptArtifact,
    GateFailed,
    NonFiniteError,
    UnexpectedError,
)
"""Retrying cannot help: user error, another attempt has taken over, out of time, lost inputs, or a
deterministic failure.
"""

_MAX_DOUBLINGS = 5


def retry_delays(first: float) -> list[float]:
    """Return the seconds before each retry, from `run.retry_delay`. The last one is for all further ones."""
    return [first * 2**n for n in range(_MAX_DOUBLINGS + 1)]


class RetryPolicy:
    """Allows `retries` failures in a row without a new checkpoint.

    A run of days survives many failures, as long as it makes progress between them.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._failures = 0
        self._out_of_memory = False
        """Whether one of these failures was a lack of memory."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Forget earlier failures if `event` of the stage reports a committed checkpoint."""
        if event["event"] == "checkpoint":
            self._failures, self._out_of_memory = 0, False

    def remaining(self, error: BaseException) -> int:
        """Return the number of retries that are left if the present attempt fails with `error`."""
        if not isinstance(error, Exception) or isinstance(error, NEVER_RETRIED):
            return 0
        if self._out_of_memory and isinstance(error, OutOfMemory):
            # Another process may have taken the memory once; twice, the settings need too much.
            return 0
        return max(0, self._retries - self._failures)

    def should_retry(self, error: BaseException) -> bool:
        """Count a failed attempt and return whether there is another. Call this once for each failure."""
        remaining = self.remaining(error)
        self._failures += 1
        self._out_of_memory = self._out_of_memory or isinstance(error, OutOfMemory)
        return remaining > 0


def retry_with(retry_policy: RetryPolicy, first_delay: float) -> Retrying:
    """Return a caller that repeats a failed call as `retry_policy` allows, after `retry_delays`."""
    return Retrying(
        retry=retry_if_exception(retry_policy.should_retry),
        wait=wait_chain(*map(wait_fixed, retry_delays(first_delay))),
        reraise=True,
    )
