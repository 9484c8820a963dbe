"""What is tried in a copy of the process ends: by the time it computes, and by the clock."""

from __future__ import annotations

import time

import pytest

from rlhf_core.data.rendering import ends_within


def test_a_function_that_ends_is_recognised() -> None:
    assert ends_within(1, lambda: None)


def test_a_copy_that_waits_without_computing_is_killed() -> None:
    began = time.monotonic()
    assert not ends_within(1, lambda: time.sleep(20), wall=1)
    assert time.monotonic() - began < 10


def test_what_the_function_raises_stays_in_the_copy() -> None:
    def fails() -> None:
        pytest.fail("raised in the copy")

    assert ends_within(1, fails)
