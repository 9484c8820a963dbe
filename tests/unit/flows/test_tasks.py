"""Tasks of the flow.

- Prefect's own engine asks the retry policy of a stage and follows it
- the flow calls all stages in the order of the table, and each task gets the artifacts that its stage reads
- drift is shown on a page before it ends the run
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.task_engine import SyncTaskRunEngine

from flows import tasks
from flows.rlhf import rlhf
from flows.tasks import stage_task
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import DataDrifted, StageFailed
from rlhf_core.executors.spec import StageRecord
from rlhf_core.ops.drift import DriftReport, Finding
from rlhf_core.ops.drift_measures import Drift
from rlhf_core.pipeline import STAGES
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.run.stage_runner import RetryPolicy
from rlhf_core.types import ArtifactRef
from tests.support.prefect_api import PrefectApi

KILLED = StageFailed("stage sft was killed by SIGKILL")


@pytest.mark.parametrize("retries", [0, 2])
def test_prefect_follows_the_retry_policy(retries: int) -> None:
    task = stage_task("sft", RetryPolicy(retries))
    engine: SyncTaskRunEngine[..., Any] = SyncTaskRunEngine(task=task)
    engine.task_run = TaskRun(task_key="sft", dynamic_key="0")
    assert [engine.can_retry(KILLED) for _ in range(retries + 2)] == [True] * retries + [False] * 2


def test_the_flow_calls_all_stages_in_their_order() -> None:
    assert re.findall(r'run_stage\(run, "(\w+)"\)', inspect.getsource(rlhf.fn)) == list(STAGES)


def test_a_task_gets_the_artifacts_that_its_stage_reads(tmp_path: Path) -> None:
    run = PipelineRun(PipelineConfig.model_validate({"run": {"home": str(tmp_path)}}), "demo.yaml")
    given = {}
    for stage in STAGES:
        if run.includes(stage):
            given[stage] = list(run.inputs(stage))
            ref = ArtifactRef(stage, "a" * 16, "d", f"/{stage}")
            run.records[stage] = StageRecord(ref, 1.0, False)
    assert given["reward"] == ["data", "sft"]
    assert given["register"] == ["data", "sft", "reward", "ppo", "evaluate"]
    assert "dpo" not in given and tasks.run_stage(run, "dpo") is None


def test_prefect_gets_the_page_before_the_run_ends(tmp_path: Path, api: PrefectApi) -> None:
    finding = Finding(Drift("sources", 1.0, "sft"), None, 0.5)
    report = DriftReport("fox-policy version 3", [finding], "# Data drift", tmp_path / "drift.md")
    with pytest.raises(DataDrifted, match=r"sources 1 \(sft\), above drift\.stop\.sources=0\.5"):
        tasks.follow_drift(report, "fox-seed0")
    [page] = api.artifacts
    assert (page["key"], page["type"], page["data"]) == ("data-drift", "markdown", "# Data drift")
    assert api.messages == []
    report.findings[:] = [Finding(finding.drift, 0.5, None)]
    tasks.follow_drift(report, "fox-seed0")
    warning = "sources 1 (sft), above drift.warn.sources=0.5"
    assert api.messages == [("fox-seed0 drifted", f"From the data of fox-policy version 3: {warning}")]
