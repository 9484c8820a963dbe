"""Logs of processes.

- logs are rotated while their writers keep them open
- a record of another process, whose stderr is shown on that of the stage, is not written there again, unless
  the line may be lost
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlhf_core.logs import rotate_logs


def test_log_is_rotated_while_its_writer_continues(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with log.open("ab", buffering=0) as writer:
        for text in (b"first " * 20, b"second " * 20):
            writer.write(text)
            rotate_logs(tmp_path, max_bytes=100)
            assert (log.read_bytes(), (tmp_path / "worker.log.1").read_bytes()) == (b"", text)
        writer.write(b"third")
        rotate_logs(tmp_path, max_bytes=100)
    assert log.read_bytes() == b"third"


def test_unreadable_log_does_not_prevent_rotation_of_others(tmp_path: Path) -> None:
    for name in ("a.log", "z.log"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    (tmp_path / "mlflow.log").write_bytes(b"text " * 40)
    rotate_logs(tmp_path, max_bytes=100)
    assert (tmp_path / "mlflow.log").read_bytes() == b""
    assert (tmp_path / "mlflow.log.1").read_bytes() == b"text " * 40


def test_logs_of_runs_are_rotated_too(tmp_path: Path) -> None:
    log = tmp_path / "demo" / "sft-01.log"
    log.parent.mkdir()
    log.write_bytes(b"text " * 40)
    rotate_logs(tmp_path, max_bytes=100)
    assert log.read_bytes() == b"" and (log.parent / "sft-01.log.1").exists()


RELAYED = """
import logging
from rlhf_core.logs import log_to_stderr
from rlhf_core.system.relayed_logs import relay

class Shown(logging.Handler):
    def emit(self, record):
        print(record.getMessage())

log_to_stderr()
log = logging.getLogger("rlhf_core.rewards")
log.addHandler(Shown())
log.warning("of the stage")
for shown, text in ((True, "of an actor"), (False, "of an actor that fails")):
    records = [log.makeRecord(log.name, level, "", 0, text, (), None) for level in (30, 10)]
    relay(records, shown=shown)
"""


def test_records_that_another_process_has_shown_only_reach_other_handlers() -> None:
    done = subprocess.run([sys.executable, "-c", RELAYED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["of the stage", "of an actor", "of an actor that fails"]
    written = [line.split(": ")[-1] for line in done.stderr.splitlines()]
    assert written == ["of the stage", "of an actor that fails"]
