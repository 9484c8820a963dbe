"""The program that counts processes and CPU seconds of a run.

- it counts a child that was adopted by another process, and returns the exit code
- Ray's monitors are two kinds, and a stage has the name of its file
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks import run_processes

PARENT = """
import subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, sys.argv[1], "orphan"])
while not Path("done").exists(): time.sleep(0.1)
time.sleep(1)
sys.exit(3)
"""
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
if sys.argv[1] == "orphan":
    subprocess.Popen([sys.executable, sys.argv[0], "worker"])
    time.sleep(3)
else:
    parent = os.getppid()
    while os.getppid() == parent: time.sleep(0.1)
    end = time.process_time() + 0.5
    while time.process_time() < end: pass
    Path("done").touch()
    time.sleep(2)
"""


def test_descendants_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parent, script = tmp_path / "parent.py", tmp_path / "s.py"
    parent.write_text(PARENT)
    script.write_text(SCRIPT)
    assert run_processes.main([sys.executable, str(parent), str(script)]) == 3
    *_, total = capsys.readouterr().out.splitlines()
    name, number, seconds = total.strip("| ").split(" | ")
    assert (name, number) == ("all", "3") and float(seconds) >= 0.5


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-u", "/ray/autoscaler/_private/monitor.py", "--x"], "Ray: monitor"),
        (["python", "/ray/_private/log_monitor.py"], "Ray: log monitor"),
        (["ray::RankActor.step"], "Ray: actor or worker"),
        (["python", "-P", "-m", "rlhf_core.run", "/home/logs/run/sft-01.json"], "stage sft-01"),
        (["sleep", "3"], "sleep 3"),
        ([], "no command line"),
    ],
)
def test_kinds(command: list[str], kind: str) -> None:
    assert run_processes.kind_of(command) == kind
