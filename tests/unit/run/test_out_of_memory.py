"""A stage for which memory does not suffice names numbers to lower, which exist, with the values they have;
also where another rank than the one that is asked ran out of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import OutOfMemory
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import STAGES, StageName
from tests.support.attempts import attempt_with


@pytest.fixture(autouse=True)
def tracked(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")


def spec_of(stage: StageName, home: Path) -> StageSpec:
    sections: dict[str, Any] = {"run": {"home": str(home)}, "tracking": {"system_metrics": False}}
    if stage == "benchmark":
        sections["benchmark"] = {"tasks": ("sums",)}
    return StageSpec(stage, "0" * 16, PipelineConfig.model_validate(sections))


def assert_advice(message: str, spec: StageSpec) -> None:
    assert re.search(r"RuntimeError: CUDA out of memory\. .*rlhf plan CONFIG", message)
    named = re.findall(r"(\w+\.[\w.]+)(?: \(\wPU\))?=([\d.]+)", message)
    assert bool(named) == (spec.stage != "data")
    for name, value in named:
        assert float(attrgetter(name)(spec.config)) == float(value)


@pytest.mark.parametrize("stage", STAGES)
def test_message_names_settings_to_lower(stage: StageName, tmp_path: Path) -> None:
    def full(_config: Any, _context: Any) -> NoReturn:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    spec = spec_of(stage, tmp_path)
    with pytest.raises(OutOfMemory) as caught:
        attempt_with(full, spec)
    assert_advice(caught.value.message, spec)


ABORTS = """
import sys, time
from pathlib import Path
from rlhf_core.errors import classified
from rlhf_core.pipeline import Stage
from rlhf_core.run.attempt import run_attempt
from rlhf_core.executors.events import Events
from rlhf_core.executors.spec import StageSpec

def full(config, context):
    context.monitor.abort(classified(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")))

Stage.load = lambda row: full
run_attempt(StageSpec.read(Path(sys.argv[1])), Events(1))
"""


def test_stage_that_the_monitor_ends_names_them_too(tmp_path: Path) -> None:
    spec = spec_of("ppo", tmp_path)
    spec.write(tmp_path / "spec.json")
    ended = subprocess.run(
        [sys.executable, "-c", ABORTS, str(tmp_path / "spec.json")],
        stdout=subprocess.PIPE,
        timeout=120,
    )
    assert ended.returncode == OutOfMemory.exit_code
    error = json.loads(ended.stdout.splitlines()[-1])
    assert (error["event"], error["type"]) == ("error", "OutOfMemory")
    assert_advice(error["message"], spec)
