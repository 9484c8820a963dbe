"""A stage for which memory does not suffice names numbers to lower, which exist, with the values they have."""

from __future__ import annotations

import re
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import OutOfMemory
from rlhf_core.stages import run
from rlhf_core.stages.events import Events
from rlhf_core.stages.spec import StageSpec
from rlhf_core.types import STAGES, StageName


@pytest.mark.parametrize("stage", STAGES)
def test_the_message_has_numbers_to_lower(stage: StageName, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(run, "_stage_function", lambda _stage: full)
    untracked = SimpleNamespace(run_id=None, finish=lambda status: None)
    monkeypatch.setattr(run, "open_tracking", lambda _config: SimpleNamespace(stage_run=lambda *_a, **_k: untracked))
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}})
    with pytest.raises(OutOfMemory, match=r"^RuntimeError: CUDA out of memory\. .*rlhf plan CONFIG") as caught:
        run.execute(StageSpec(stage, "0" * 16, config), Events(None))
    named = re.findall(r"(\w+\.[\w.]+)(?: \(\wPU\))?=([\d.]+)", caught.value.message)
    assert bool(named) == (stage != "data")
    for name, value in named:
        assert float(attrgetter(name)(config)) == float(value)
