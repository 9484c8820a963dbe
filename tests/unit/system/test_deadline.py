"""Calls with a time limit.

- the result and the error of the call are those of the caller
- a call that takes longer is a TimeoutError at once
"""

from __future__ import annotations

import threading
import time

import pytest

from rlhf_core.system.deadline import within


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
