"""Limits of templates.

- what is tried in a copy of the process ends: by the time it computes, and by the clock
- the memory of this process is limited, also in a fork; the file with its size is opened once
"""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import pytest

from rlhf_core.data.rendering import ends_within, memory_limit


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


def _grows() -> None:
    with memory_limit(2**24):
        bytearray(2**27)


def test_memory_is_limited_here_and_in_a_fork() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError):
        _grows()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    # Far larger than its parent, whose size must not be that of the fork.
    kept: list[bytearray] = []

    def grown() -> None:
        kept.append(bytearray(2**28))
        with memory_limit(2**26):
            kept.append(bytearray(2**25))
        os._exit(7)

    child = os.fork()
    if child == 0:
        try:
            grown()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_size_of_the_process_is_read_from_one_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_limit(2**29):
        pass
    opened: list[Any] = []
    monkeypatch.setattr(os, "open", lambda *args: opened.append(args))
    for _ in range(10):
        with memory_limit(2**29):
            pass
    assert opened == []
