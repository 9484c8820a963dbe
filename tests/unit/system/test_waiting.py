"""Time limits of calls, and back-off and stop conditions for tenacity.

- waits double up to a limit and stay within the jitter
- a long first call does not use up the time for retries
- drawing a wait does not change the global random numbers
- the result and the error of a call with a time limit are those of the caller
- a call that takes longer is a TimeoutError at once
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type

from rlhf_core.system.waiting import backoff, stop_after_failing, within


def _state(attempt: int, failed_at: float = 0.0, upcoming_sleep: float = 0.0) -> RetryCallState:
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number, state.outcome_timestamp, state.upcoming_sleep = attempt, failed_at, upcoming_sleep
    return state


def test_waits_double_up_to_the_longest() -> None:
    wait = backoff(0.5, 3.0, jitter=(1.0, 1.0))
    assert [wait(_state(attempt)) for attempt in (1, 2, 3, 4, 5000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    jittered = backoff(1.0, jitter=(0.5, 1.5))
    waits = [jittered(_state(2)) for _ in range(200)]
    assert 1.0 <= min(waits) < 1.2 and 2.8 < max(waits) <= 3.0


def test_waits_leave_the_global_generator_alone() -> None:
    random.seed(7)
    before = random.getstate()
    backoff(1.0)(_state(3))
    assert random.getstate() == before


def test_time_counts_from_the_first_failure() -> None:
    stop = stop_after_failing(10.0)
    assert not stop(_state(1, failed_at=1000.0, upcoming_sleep=9.0))
    assert not stop(_state(2, failed_at=1006.0, upcoming_sleep=4.0))
    assert stop(_state(3, failed_at=1006.0, upcoming_sleep=4.5))


def test_tenacity_accepts_the_backoff_and_the_stop_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def failing() -> None:
        calls.append(None)
        raise OSError

    retrying = Retrying(
        retry=retry_if_exception_type(OSError), wait=backoff(0.02), stop=stop_after_failing(0.2)
    )
    with pytest.raises(RetryError):
        retrying(failing)
    assert len(calls) > 2


def test_the_result_and_the_error_are_passed_on() -> None:
    assert within(10.0, lambda: "result") == "result"
    empty: dict[str, int] = {}
    with pytest.raises(KeyError):
        within(10.0, lambda: empty["a"])


def test_a_call_that_takes_longer_ends_with_a_timeout() -> None:
    ended = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        within(0.2, lambda: ended.wait(30))
    assert time.monotonic() - began < 10
    ended.set()
