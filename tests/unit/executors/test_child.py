"""The flow reads events also if it has so many open files that the pipe has a high number."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from rlhf_core.executors.child import _Lines

HIGH = 1100
"""More than `select.select` accepts."""


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard <= HIGH:
        pytest.skip("this user cannot have so many open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 1), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_events_are_read_from_a_descriptor_with_a_high_number(many_files: None) -> None:
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, HIGH)
    os.close(reader)
    os.set_blocking(high, False)
    with os.fdopen(high, "rb", buffering=0) as pipe:
        lines = _Lines(pipe)
        assert lines.wait(0.01) == []
        os.write(writer, b"one\ntw")
        assert lines.wait(5.0) == [b"one"]
        os.write(writer, b"o\n")
        os.close(writer)
        assert lines.wait(5.0) == [b"two"]
        assert lines.wait(0.01) == []
