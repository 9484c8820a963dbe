"""Limits for code that comes with data: the chat templates of models."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def memory_limit(spare: int) -> Iterator[None]:
    """MemoryError where this process grows by more than `spare` bytes, instead of an end by the kernel. Linux only."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statistics.read_text().split()[0]) * resource.getpagesize()
    if limits[0] != resource.RLIM_INFINITY:
        spare = min(spare, limits[0] - used)
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in Python code, compiled templates included, that computes longer. Needs no signal and no thread."""
    deadline = time.thread_time() + seconds
    previous = sys.gettrace()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if time.thread_time() > deadline:
            raise TimeoutError
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
