"""A stage that waits in vain ends itself.

- the flow hears the error with its class, the exit code is that of a fault, and no process that the monitor
  knows is left
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlhf_core.errors import WorkerStuck, from_record
from rlhf_core.executors.events import parse
from rlhf_core.system.processes import ProcessId

STAGE = """
import os, subprocess, sys, time
from pathlib import Path
from rlhf_core.system import heartbeat
from rlhf_core.executors.events import Events
from rlhf_core.run.attempt import _abort

folder, events = Path(sys.argv[1]), Events(int(sys.argv[2]))
participant = "import sys, time; from pathlib import Path; from rlhf_core.system.heartbeat import *; " \\
       "register(Path(sys.argv[1]), 'training rank 1', 0.5); heartbeat('all_reduce'); time.sleep(600)"
with heartbeat.Monitor(folder, lambda error: _abort(error, seen, events), grace_seconds=0.2) as seen:
    child = subprocess.Popen([sys.executable, "-c", participant, str(folder)])
    Path(folder.parent, "pid").write_text(str(child.pid))
    time.sleep(600)
"""


def test_unreported_stall_ends_the_stage(tmp_path: Path) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", STAGE, str(tmp_path / "stacks"), str(write)]
    with os.fdopen(read, "rb") as events, subprocess.Popen(command, pass_fds=(write,)) as stage:
        os.close(write)
        event = parse(events.readline())
        assert stage.wait(timeout=20) == 3
    assert event is not None and event["event"] == "error"
    error = from_record(event)
    assert type(error) is WorkerStuck
    assert "training rank 1" in error.message and 'made no progress in "all_reduce"' in error.message
    process = ProcessId.of(int((tmp_path / "pid").read_text()))
    assert process is None or not process.alive()
