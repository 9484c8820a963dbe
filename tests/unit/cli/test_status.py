"""Behaviours of `rlhf status`:

- a running pipeline, a killed one and a failed one are distinguished
- runs that are deleted meanwhile are skipped, and control characters are not printed
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_core.ops.servers.servers import status
from rlhf_core.system.files import write_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import RecordedProcess


def test_status_of_an_empty_home(tmp_path: Path) -> None:
    text = status(Home.of(tmp_path))
    assert "servers: none" in text
    assert "pipeline runs: none yet" in text


def test_running_killed_and_failed_pipelines_are_distinguished(tmp_path: Path) -> None:
    own = RecordedProcess.own()
    alive, ended = list(own), list(own._replace(started=own.started - 9))
    finished = {"data": {"seconds": 7.0, "reused": False}}
    run: dict[str, Any] = {"updated": time.time(), "config": "a.yaml", "stages": finished}
    at_sft = {**run, "making": {"stage": "sft", "log": "/logs/sft-01.log"}, "error": ""}
    states = {
        "lives": {**at_sft, "state": "running", "process": alive},
        "killed": {**at_sft, "state": "running", "process": ended},
        "failed": {**at_sft, "state": "failed", "process": alive, "error": "WorkerDied: rank 1"},
        "elsewhere": {**run, "state": "running", "error": "", "process": [*ended[:3], "boot", ""]},
        "steers": {**run, "state": "failed", "config": "\x1b]0;owned\x07"},
    }
    home = Home.of(tmp_path)
    for name, content in {"no.json": {}, **states}.items():
        write_json(home.run(name) / "run.json", content)
    for name, stage in (("lives", "sft"), ("killed", "sft"), ("failed", "data")):
        task = {"task": "sft", "done": 9, "total": 20, "unit": "steps", "left": 150.0}
        write_json(home.progress(name), {**task, "stage": stage})
    text = status(home)
    assert text.replace("\n", "").isprintable() and "owned" in text
    assert "no.json" not in text
    assert "elsewhere: running, " in text
    assert re.search(
        r"lives: running, config a\.yaml\n    finished: data 7\.0 s\n    now, for \d.*: sft,"
        r" sft 45 % \(9 of 20 steps\), 2 min 30 s left, log /logs/",
        text,
    )
    assert re.search(r"killed: killed; the same command continues it, .*\n.*\n    was at: sft, log ", text)
    assert re.search(r"failed: failed, .*\n.*\n    was at: sft, .*\n    WorkerDied: rank 1", text)


def test_a_finished_run_has_its_result_in_one_line(tmp_path: Path) -> None:
    home = Home.of(tmp_path)
    run = {"updated": time.time(), "config": "a.yaml", "stages": {}, "state": "finished"}
    write_json(home.run("a") / "run.json", run)
    rates = {"win_rate": {"mean": 0.948, "low": 0.909, "high": 0.978}, "kl": 5.05}
    registration = {"champion": True, "reason": "it won"}
    evaluation = {"rl_algorithm": "PPO", "policies": {"ppo": rates}}
    write_json(home.run("a") / "summary.json", {"evaluate": evaluation, "registration": registration})
    assert "\n    win rate 94.8 % [90.9, 97.8], KL 5.05, champion\n" in status(home)


def test_run_that_is_deleted_while_it_is_listed_is_left_out(tmp_path: Path) -> None:
    class Listed(Home):
        def run_states(self) -> Iterator[Path]:
            yield self.run("deleted") / "run.json"

    assert "pipeline runs: none yet" in status(Listed(tmp_path))
