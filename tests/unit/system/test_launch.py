"""Laws of the launcher of child processes:

- a child has a session of its own, no standard input, and exactly the environment that it is given
- its output is appended to the log file
- a child with `parent_death_signal` ends with its parent; one without survives
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.system.launch import launch, python_module
from rlhf_core.system.processes import ProcessId

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
        "import os; from pathlib import Path; from rlhf_core.system.launch import launch;"
        " print(launch(['sleep', '60'], os.environ, log_file=Path('/dev/null'),"
        f" parent_death_signal={number}).pid)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    child = ProcessId.of(int(parent.stdout))
    deadline = time.monotonic() + 5.0
    while death_signal and child is not None and child.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    survives = child is not None and child.alive()
    if child is not None:
        child.send(signal.SIGKILL)
    assert survives == (death_signal is None)


def test_modules_run_without_the_working_folder_on_the_path() -> None:
    assert python_module("a.b") == [sys.executable, "-P", "-m", "a.b"]
