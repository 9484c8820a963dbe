"""Behaviours of a supervised process:

- it is restarted when it ends, with a growing delay, after what is left of its process group is killed
- it is killed, with its process group, when its health check fails for too long
- a port that another process has taken is detected
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.ops.servers.supervised import SupervisedProcess
from rlhf_core.system.processes import ProcessId, free_port, wait_gone


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
        server.ensure_running()
    assert len(pids) == 2
    assert server.restarts == 2
    assert server.process is None  # the second restart waits
    assert server.next_start > time.monotonic() + 1


def test_silent_process_is_killed_with_its_group_and_restarted(tmp_path: Path) -> None:
    now = 1000.0
    healthy = [True]
    child_file = tmp_path / "child"
    # `mlflow server` also starts the actual server as a child.
    command = ["sh", "-c", f"sleep 60 & echo $! > {child_file}; wait"]
    server = SupervisedProcess(
        "x",
        command,
        os.environ,
        tmp_path / "x.log",
        lambda: healthy[0],
        silent_seconds=0.3,
        clock=lambda: now,
    )
    server.kill_if_silent()
    server.ensure_running()
    first = server.process
    assert first is not None
    now += 0.4
    server.kill_if_silent()
    assert first.poll() is None
    healthy[0] = False
    server.kill_if_silent()
    assert first.poll() is None, "a single failed check is not enough"
    deadline = time.monotonic() + 20
    while not child_file.exists() or not child_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = ProcessId.of(int(child_file.read_text()))
    assert child is not None
    now += 0.4
    server.kill_if_silent()
    assert first.returncode == -signal.SIGKILL
    assert wait_gone([child], 5.0), "the child would keep the port"
    server.ensure_running()
    assert server.process is not None and server.process.pid != first.pid
    server.kill_if_silent()
    assert server.process.poll() is None, "the time without an answer starts again"
    server.process.kill()
    server.process.wait(timeout=10)


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


def test_port_taken_by_another_process_is_detected(tmp_path: Path) -> None:
    def http_server(port: int) -> SupervisedProcess:
        return process_of([sys.executable, "-m", "http.server", str(port)], tmp_path, port=port)

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        late = http_server(other.getsockname()[1])
        late.ensure_running()
        assert late.process is not None and not late.lost_its_port()
        late.process.wait(timeout=20)
        late.ensure_running()
        assert late.restarts == 1 and late.lost_its_port() and not late.serves()
    owner = http_server(free_port(0))
    owner.restarts = 1
    owner.ensure_running()
    deadline = time.monotonic() + 20
    while not owner.serves() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert owner.serves() and not owner.lost_its_port(), "it has the port itself"
    for server in (late, owner):
        if server.process is not None:
            server.process.kill()
            server.process.wait(timeout=10)
