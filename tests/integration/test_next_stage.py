"""Behaviours of a process that waits for its stage, with real processes:

- it prepares, waits, and runs the stage of the spec that it gets; all its output is in the log of the stage
- a preparation that fails does not fail the stage
- nothing of it survives: not if nobody takes it, not the flow's SIGKILL, during the preparation or after it
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.executors.child import NextStage, run_child, start_child
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import StageName
from rlhf_core.system.processes import ProcessId, wait_gone
from rlhf_core.types import ArtifactRef
from tests.support.toy_stage import toy_environment

CONFIG = PipelineConfig()
_SLEEPER = (
    "away = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "(folder / 'away').write_text(str(away.pid))\n"
    "(folder / 'pid').write_text(str(os.getpid()))\n"
)


def wait_for(path: Path, seconds: float = 20.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


def processes(folder: Path) -> list[ProcessId]:
    """The process that waits, and the one that it has started."""
    found = [ProcessId.of(int(wait_for(folder / name))) for name in ("away", "pid")]
    return [process for process in found if process is not None]


def test_a_waiting_process_runs_the_stage_of_the_spec_that_it_gets(tmp_path: Path) -> None:
    environment = toy_environment(
        tmp_path,
        "(folder / 'seen').write_text(repr(spec))\n"
        "print('prepared by', (folder / 'prepared').read_text())\n"
        "(folder / 'ran').write_text(str(os.getpid()))\n"
        "return REF",
        prepare="print('preparing', stage, config.ppo.steps)\n"
        "(folder / 'prepared').write_text(str(os.getpid()))",
    )
    config = PipelineConfig.model_validate_json('{"ppo": {"steps": 7}}')
    log = tmp_path / "sft-01.log"
    waiting = start_child(StageSpec("sft", "", config), log, environment, waits=True)
    prepared = wait_for(tmp_path / "prepared")
    assert not (tmp_path / "seen").exists()
    inputs: dict[StageName, ArtifactRef] = {"data": ArtifactRef("data", "1" * 16, "e" * 64, "/store/y")}
    spec = StageSpec("sft", "2" * 16, config, inputs, "parent", "3" * 16)
    events: list[object] = []
    assert run_child(spec, log, environment, 30.0, events.append, waiting).uri == "/store/x"
    assert (tmp_path / "seen").read_text() == repr(spec)
    assert (tmp_path / "ran").read_text() == prepared
    assert log.read_text().splitlines() == ["preparing sft 7", f"prepared by {prepared}"]


def test_a_preparation_that_fails_does_not_fail_the_stage(tmp_path: Path) -> None:
    environment = toy_environment(tmp_path, "return REF", prepare="import a_module_that_does_not_exist")
    log = tmp_path / "sft-01.log"
    waiting = start_child(StageSpec("sft", "", CONFIG), log, environment, waits=True)
    ref = run_child(StageSpec("sft", "2" * 16, CONFIG), log, environment, 30.0, print, waiting)
    assert ref.digest == "d" * 64
    assert "a_module_that_does_not_exist" in log.read_text()


def test_an_unused_process_ends_with_its_children(tmp_path: Path) -> None:
    environment = toy_environment(tmp_path, "return REF", prepare=_SLEEPER)
    following = NextStage()
    following.prepare("sft", CONFIG, environment, tmp_path / "sft-01.log")
    left = processes(tmp_path)
    following.close()
    assert not any(process.alive() for process in left)
    assert not list(tmp_path.glob("sft-01.*"))
    assert following.take("sft", CONFIG, environment) is None


@pytest.mark.parametrize("moment", ["preparing", "waiting"])
def test_a_waiting_process_ends_with_a_killed_flow(tmp_path: Path, moment: str) -> None:
    hangs = "time.sleep(600)" if moment == "preparing" else ""
    environment = toy_environment(tmp_path, "return REF", prepare=_SLEEPER + hangs)
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from rlhf_core.config import PipelineConfig; from rlhf_core.executors.child import NextStage\n"
        "following = NextStage()\n"
        "following.prepare('sft', PipelineConfig(), os.environ, Path(sys.argv[1]))\n"
        "time.sleep(600)"
    )
    flow = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "sft-01.log")], env=environment)
    left = processes(tmp_path)
    assert len(left) == 2
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait(timeout=10)
    assert wait_gone(left, 5.0)
