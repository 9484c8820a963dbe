"""Behaviours of a supervised process:

- it is restarted when it ends, with a growing delay, after what is left of its process group is killed
- a port that another process has taken is not its own
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.system.processes import ProcessId, SupervisedProcess, free_port, wait_gone


def process_of(command: Sequence[str], folder: Path, port: int | None = None) -> SupervisedProcess:
    return SupervisedProcess("x", command, os.environ, folder / "x.log", port=port)


def test_process_is_restarted_with_growing_delay(tmp_path: Path) -> None:
    server = process_of([sys.executable, "-c", "pass"], tmp_path)
    server.ensure_running()
    pids = set()
    for _ in range(2):
        assert server.process is not None
        pids.add(server.process.pid)
        server.process.wait(timeout=20)
        began = time.monotonic()
        server.ensure_running()
    assert len(pids) == 2
    assert server.restarts == 2
    assert server.process is None  # the second restart waits
    assert server.next_start > began + 1


def test_group_of_a_process_that_ended_is_killed_before_its_restart(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    server = process_of(["sh", "-c", f"sleep 60 & echo $! > {child_file}; exit 3"], tmp_path)
    server.ensure_running()
    assert server.process is not None
    server.process.wait(timeout=20)
    child = ProcessId.of(int(child_file.read_text()))
    assert child is not None and child.alive()
    server.ensure_running()
    assert wait_gone([child], 5.0), "the child would keep the port"
    assert server.last_end == "exit code 3"
    assert server.process is not None
    server.process.wait(timeout=20)
    os.killpg(server.process.pid, signal.SIGKILL)


def test_a_port_that_another_process_has_taken_is_not_its_own(tmp_path: Path) -> None:
    def http_server(port: int) -> SupervisedProcess:
        return process_of([sys.executable, "-m", "http.server", str(port)], tmp_path, port=port)

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        late = http_server(other.getsockname()[1])
        late.ensure_running()
        assert not late.has_its_port()
    owner = http_server(free_port(0))
    owner.ensure_running()
    deadline = time.monotonic() + 20
    while not owner.has_its_port() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert owner.has_its_port()
    for server in (late, owner):
        assert server.process is not None
        server.process.kill()
        server.process.wait(timeout=10)
