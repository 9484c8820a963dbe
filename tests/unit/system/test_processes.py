"""Processes are identified by pid and start time, and a free port is one that nobody listens on.

- a change of the clock does not end the identity of a process
- whether a recorded process runs is known on its own host only: not on another one with the same name, nor in
  another container. After a restart of the host it has ended, although its pid and start time are used again
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from rlhf_core.system.processes import ProcessId, RecordedProcess, free_port, stop, wait_gone


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


def test_whether_a_recorded_process_runs_is_known_on_its_own_host_only() -> None:
    own = RecordedProcess.own()._replace(machine="boot-1 pid:[1]", installation="a")
    seen = {
        "it runs": own,
        "it has ended": own._replace(started=own.started - 9),
        "another host": own._replace(host="other", machine="boot-2 pid:[1]", installation="b"),
        "another host with the same name": own._replace(machine="boot-2 pid:[1]", installation="b"),
        "another container": own._replace(machine="boot-1 pid:[2]"),
        "before a restart of the host": own._replace(machine="boot-0 pid:[1]"),
        "an earlier release": RecordedProcess(*own[:3]),
    }
    assert {name: process.alive(own) for name, process in seen.items()} == {
        "it runs": True,
        "it has ended": False,
        "another host": None,
        "another host with the same name": None,
        "another container": None,
        "before a restart of the host": False,
        "an earlier release": None,
    }
    without = own._replace(installation="")
    assert without._replace(machine="boot-0 pid:[1]").alive(without) is None, "perhaps another container"


def test_used_port_is_avoided() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (port, 0)
    assert free_port(port) == port
