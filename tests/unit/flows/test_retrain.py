"""The flow `rlhf-retrain` runs the pipeline if a look says so, and records its start and end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import retrain as module
from rlhf_core.run.watch import Verdict


@pytest.mark.parametrize("due", [True, False])
def test_the_pipeline_runs_if_it_is_due(due: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Watch:
        def __init__(self, config: Any, run: str) -> None:
            calls.append(config.run.home)

        def look(self, **limits: Any) -> Verdict:
            calls.append(limits)
            return Verdict(due, "Due" if due else "Waiting", "3 new rows")

        def started(self) -> None:
            calls.append("started")

        def finished(self, weights: str) -> None:
            calls.append(weights)

    def rlhf(**parameters: Any) -> dict[str, Any]:
        calls.append(parameters["overrides"])
        return {"weights_sha256": "w"}

    monkeypatch.setattr(module, "Watch", Watch)
    monkeypatch.setattr(module, "rlhf", rlhf)
    monkeypatch.setattr(module, "runtime", SimpleNamespace(flow_run=SimpleNamespace(id=None)))
    overrides = (f"run.home={tmp_path}",)
    state: Any = module.retrain.fn(
        "deployments/configs/demo.yaml", overrides, min_new_rows=5, min_pause_hours=2.0
    )
    looked = [str(tmp_path), {"min_new_rows": 5, "min_pause_hours": 2.0}]
    if due:
        assert calls == [*looked, "started", overrides, "w"]
        assert state == {"weights_sha256": "w"}
    else:
        assert calls == looked
        assert (state.name, state.message) == ("Waiting", "3 new rows")
