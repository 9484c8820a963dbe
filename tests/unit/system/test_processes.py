"""Processes are identified by pid and start time, and a free port is one that nobody listens on.

- a change of the clock does not end the identity of a process
- records of earlier releases have start times in seconds since the epoch
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from rlhf_core.system.processes import ProcessId, free_port, stop, wait_gone


def test_process_that_ignores_sigterm_is_killed() -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
        " time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    child = ProcessId.of(process.pid)
    assert child is not None
    stop([ProcessId(child.pid, child.started - 100)], grace_seconds=0.2)  # another process that had this pid
    assert child.alive()
    stop([child], grace_seconds=0.3)
    assert process.wait(timeout=5) == -signal.SIGKILL
    assert wait_gone([child], 1.0)
    process.stdout.close()


def test_a_process_stays_alive_if_the_clock_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProcessId.of(os.getpid())
    assert own is not None and own.alive()
    later = psutil.boot_time() + 3600  # the kernel computes it from the clock
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: later)
    assert own.alive() and ProcessId.of(os.getpid()) == own


def test_start_times_of_earlier_releases_are_compared_with_the_clock() -> None:
    started = psutil.Process().create_time()
    assert ProcessId(os.getpid(), started).alive()
    assert not ProcessId(os.getpid(), started - 100).alive()


def test_used_port_is_avoided() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (port, 0)
    assert free_port(port) == port
