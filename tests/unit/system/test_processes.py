"""Processes are identified by pid and start time, and a free port is one that nobody listens on."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

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


def test_used_port_is_avoided() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (port, 0)
    assert free_port(port) == port
