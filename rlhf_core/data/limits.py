"""Limits for code that comes with data: the chat templates of models."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def memory_limit(spare: int) -> Iterator[None]:
    """Raise MemoryError if this process grows by more than `spare` bytes in this context. Linux only.

    Otherwise the kernel would kill the process.
    """
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statistics.read_text().split()[0]) * resource.getpagesize()
    if limits[0] != resource.RLIM_INFINITY:
        # A limit that the process already has is not raised.
        spare = min(spare, limits[0] - used)
    # It is the limit of the whole process: memory that other threads need in the meantime counts as well.
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def ends_within(seconds: float, function: Callable[[], object], *, wall: float = 60.0) -> bool:
    """Return whether `function` ends within the given processor time (whole seconds), tested in a forked
    process.

    The fork is also killed after `wall` seconds of real time, because it may wait forever for a lock that
    another thread held at the time of the fork. Results and exceptions of `function` do not reach this
    process. In contrast to `time_limit`, this also ends a long operation inside C code. Returns True if the
    process cannot be forked.
    """
    if not hasattr(os, "fork"):
        return True
    child = os.fork()
    if child == 0:
        try:
            limit = math.ceil(seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            sys.settrace(None)
            with suppress(Exception):
                function()
        finally:
            # Not `sys.exit`: exit handlers and unwritten buffers are copies of those of the parent.
            os._exit(0)
    deadline = time.monotonic() + wall
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.005)
        # The kernel ends the process at the limit of its processor time.
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in Python code, including compiled templates, that computes for longer.

    It works by tracing, without a signal and without a thread.
    """
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
