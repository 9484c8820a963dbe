"""Processes are identified by pid and start time, and a free port is one that nobody listens on. Laws of the
launcher of child processes.

- a change of the clock does not end the identity of a process
- whether a recorded process runs is known on its own host only: not on another one with the same name, nor in
  another container. After a restart of the host it has ended, although its pid and start time are used again
- a child has a session of its own, no standard input, and exactly the environment that it is given
- its output is appended to the log file
- a child with `parent_death_signal` ends with its parent; one without survives
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf_core.system.processes import (
    ProcessId,
    RecordedProcess,
    free_port,
    launch,
    python_module,
    stop,
    wait_gone,
)


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


SHOW = (
    "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()), os.environ.get('HOME'),"
    " os.environ['GIVEN'], os.getcwd())"
)


def test_child_has_its_own_session_and_only_the_given_environment(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text("before\n")
    child = launch([sys.executable, "-c", SHOW], {"GIVEN": "yes"}, log_file=log, working_folder=tmp_path)
    assert child.wait(timeout=60) == 0
    assert log.read_text() == f"before\nTrue '' None yes {tmp_path}\n"


def test_child_inherits_the_descriptors_it_is_given() -> None:
    read, write = os.pipe()
    child = launch(
        [sys.executable, "-c", f"import os; os.write({write}, b'hello')"], os.environ, pass_fds=(write,)
    )
    os.close(write)
    assert child.wait(timeout=60) == 0
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"hello"


@pytest.mark.parametrize("death_signal", [signal.SIGKILL, None])
def test_child_ends_with_its_parent_only_if_asked(death_signal: signal.Signals | None) -> None:
    number = None if death_signal is None else int(death_signal)
    start = (
        "import os; from pathlib import Path; from rlhf_core.system.processes import launch;"
        " print(launch(['sleep', '60'], os.environ, log_file=Path('/dev/null'),"
        f" parent_death_signal={number}).pid)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    child = ProcessId.of(int(parent.stdout))
    deadline = time.monotonic() + 60.0
    while death_signal and child is not None and child.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    survives = child is not None and child.alive()
    if child is not None:
        child.send(signal.SIGKILL)
    assert survives == (death_signal is None)


def test_modules_run_without_the_working_folder_on_the_path() -> None:
    assert python_module("a.b") == [sys.executable, "-P", "-m", "a.b"]
