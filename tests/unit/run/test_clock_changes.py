"""The clock of the machine is set back or forward during a run:

- the duration of a run does not change, also that of a run of the Python API
- the time since a run was changed is not below 0
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.run.state import describe_runs
from rlhf_core.system.home import Home
from rlhf_core.system.waiting import seconds_since_boot

HOUR, DAY = 3600.0, 86_400.0


@pytest.mark.parametrize("step", [-HOUR, DAY])
@pytest.mark.parametrize("of_process", [True, False])
def test_duration_of_a_run_is_measured_without_the_clock(
    step: float, of_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}})
    now, lifetime = time.time(), time.time() - psutil.Process().create_time()
    run = PipelineRun(config, "demo.yaml", started=None if of_process else seconds_since_boot())
    monkeypatch.setattr(time, "time", lambda: now + step)
    expected = lifetime if of_process else 0.0
    # The start of a process is known to a hundredth of a second, and the start of the machine to a second.
    assert run.summary()["seconds"] == pytest.approx(expected, abs=10)


def test_age_of_a_run_is_not_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}})
    run = PipelineRun(config, "demo.yaml")
    run.folder.mkdir(parents=True)
    run.save_state("finished")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - HOUR)
    assert f"{run.name}: finished, 0.0 s ago" in describe_runs(Home.of(tmp_path))[1]
