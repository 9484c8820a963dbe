"""A stage for which memory does not suffice names numbers to lower, which exist, with the values they have;
also where another rank than the one that is asked ran out of it.
"""

from __future__ import annotations

import re
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import OutOfMemory, classified
from rlhf_core.pipeline import STAGES, Stage, StageName
from rlhf_core.run import attempt as run
from rlhf_core.run.events import Events
from rlhf_core.run.spec import StageSpec


@pytest.mark.parametrize("told_by", ["the stage", "the monitor"])
@pytest.mark.parametrize("stage", STAGES)
def test_message_names_settings_to_lower(
    stage: StageName, told_by: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_config: Any, context: Any) -> None:
        error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if told_by == "the stage":
            raise error
        context.monitor.abort(classified(error))

    told: list[str] = []

    def gives_up(error: OutOfMemory, *_: Any) -> None:
        told.append(error.message)
        raise SystemExit

    monkeypatch.setattr(run, "_abort", gives_up)
    monkeypatch.setattr(Stage, "load", lambda _stage: full)
    untracked = SimpleNamespace(run_id=None, finish=lambda status: None)
    monkeypatch.setattr(
        run, "open_tracking", lambda _config: SimpleNamespace(stage_run=lambda *_a, **_k: untracked)
    )
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}})
    with pytest.raises((OutOfMemory, SystemExit)) as caught:
        run.execute(StageSpec(stage, "0" * 16, config), Events(None))
    message = told[0] if told else str(caught.value)
    assert re.search(r"RuntimeError: CUDA out of memory\. .*rlhf plan CONFIG", message)
    named = re.findall(r"(\w+\.[\w.]+)(?: \(\wPU\))?=([\d.]+)", message)
    assert bool(named) == (stage != "data")
    for name, value in named:
        assert float(attrgetter(name)(config)) == float(value)
