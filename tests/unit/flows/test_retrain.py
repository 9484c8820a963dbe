"""The flow `rlhf-retrain` runs the pipeline if a look says so, and records its start and end.

- without a record of the start, nothing is trained
- a look that fails is a notification
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType

from flows import retrain as module
from flows.notify import notify_failure
from rlhf_core.errors import DataError
from rlhf_core.run.watch import Verdict


@pytest.mark.parametrize(("due", "recorded"), [(True, True), (True, False), (False, True)])
def test_the_pipeline_runs_if_it_is_due(
    due: bool, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Watch:
        def __init__(self, config: Any, run: str) -> None:
            calls.append(config.run.home)

        def look(self, **limits: Any) -> Verdict:
            calls.append(limits)
            return Verdict(due, "Due" if due else "Waiting", "3 new rows")

        def started(self) -> bool:
            calls.append("started")
            return recorded

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
    if due and not recorded:
        assert calls == [*looked, "started"]
        assert (state.name, state.type) == ("Waiting", StateType.COMPLETED)
    elif due:
        assert calls == [*looked, "started", overrides, "w"]
        assert state == {"weights_sha256": "w"}
    else:
        assert calls == looked
        assert (state.name, state.message) == ("Waiting", "3 new rows")


def test_a_look_that_fails_is_a_notification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(module, "notify", lambda subject, body: sent.append((subject, body)))
    flow_run = SimpleNamespace(id=None, name="demo-seed0-a1")
    monkeypatch.setattr(module, "runtime", SimpleNamespace(flow_run=flow_run))
    missing = (f"run.home={tmp_path}", f"data.sft=[{{path: {tmp_path}/rows.jsonl}}]")
    with pytest.raises(DataError):
        module.retrain.fn("deployments/configs/demo.yaml", missing)
    [(subject, body)] = sent
    assert subject == "demo-seed0-a1 failed"
    assert body.startswith("DataError: ") and f"{tmp_path}/rows.jsonl" in body
    assert module.retrain.on_crashed_hooks == [notify_failure]
