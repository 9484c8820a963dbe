"""Tasks of the flow.

- Prefect's own engine asks the retry policy of a stage and follows it
- drift is shown on a page before it ends the run
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.task_engine import SyncTaskRunEngine

from flows import pages, tasks
from flows.tasks import stage_task
from rlhf_core.config import PipelineConfig
from rlhf_core.data.drift import Drift
from rlhf_core.data.drift_page import Finding
from rlhf_core.errors import GateFailed, StageFailed
from rlhf_core.run.drift import DriftReport
from rlhf_core.run.retries import RetryPolicy
from rlhf_core.types import ArtifactRef

KILLED = StageFailed("stage sft was killed by SIGKILL")


@pytest.mark.parametrize("retries", [0, 2])
def test_prefect_follows_the_retry_policy(retries: int) -> None:
    settings = PipelineConfig.model_validate({"run": {"retries": retries}}).run
    engine: SyncTaskRunEngine[Any] = SyncTaskRunEngine(task=stage_task("sft", settings, RetryPolicy(retries)))
    engine.task_run = TaskRun(task_key="sft", dynamic_key="0")
    assert [engine.can_retry(KILLED) for _ in range(retries + 2)] == [True] * retries + [False] * 2


def test_prefect_gets_the_page_before_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(Drift("sources", 1.0, "sft"), None, 0.5)
    report = DriftReport("fox-policy version 3", [finding], "# Data drift", tmp_path / "drift.md")
    shown = []
    monkeypatch.setattr(tasks, "compare_with_champion", lambda run, data: report)
    monkeypatch.setattr(pages, "create_markdown_artifact", lambda text, **_: shown.append(text))
    data = ArtifactRef("data", "a" * 16, "d", "/data")
    with pytest.raises(GateFailed, match=r"sources 1 \(sft\), above drift\.stop\.sources=0\.5"):
        tasks.drift.fn(SimpleNamespace(), data)  # type: ignore[arg-type]
    assert shown == ["# Data drift"]
