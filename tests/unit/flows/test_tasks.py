"""A stage as a Prefect task: Prefect's own engine asks the retry policy and follows it."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.task_engine import SyncTaskRunEngine

from flows.tasks import stage_task
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import StageFailed
from rlhf_core.run.retries import RetryPolicy

KILLED = StageFailed("stage sft was killed by SIGKILL")


@pytest.mark.parametrize("retries", [0, 2])
def test_prefect_follows_the_retry_policy(retries: int) -> None:
    settings = PipelineConfig.model_validate({"run": {"retries": retries}}).run
    engine: SyncTaskRunEngine[Any] = SyncTaskRunEngine(task=stage_task("sft", settings, RetryPolicy(retries)))
    engine.task_run = TaskRun(task_key="sft", dynamic_key="0")
    assert [engine.can_retry(KILLED) for _ in range(retries + 2)] == [True] * retries + [False] * 2
