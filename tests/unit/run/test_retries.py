"""When a failed stage is tried again:

- `retries` times in a row; a committed checkpoint makes up for the failures before it
- never after a user error or a deterministic failure, and not after an interrupt
- once after a lack of memory
- all attempts share the time of the stage, and all stages the budget of the run
- an attempt ends the MLflow run of its stage only after it has started, because another attempt can hold it
- `run_with_retries` follows the policy, with a delay that doubles
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import stage_inputs
from rlhf_core.errors import BudgetSpent, OutOfMemory, RLHFError, StageFailed, StageTimedOut
from rlhf_core.pipeline import StageName
from rlhf_core.run import stage_runner
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.run.stage_runner import (
    NEVER_RETRIED,
    RetryPolicy,
    get_or_run_stage,
    retry_with,
    run_with_retries,
)
from rlhf_core.types import ArtifactRef
from tests.support.toy_stage import toy_environment

KILLED = StageFailed("stage ppo was killed by SIGKILL")
CHECKPOINT = {"event": "checkpoint", "step": 10}


def again(retry_policy: RetryPolicy, error: BaseException) -> bool:
    """Return whether an attempt that failed with `error` is retried; the log announces the same."""
    remaining = retry_policy.remaining(error)
    retried = retry_policy.should_retry(error)
    assert retried == (remaining > 0)
    return retried


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_stage_without_progress_is_retried_that_often(retries: int) -> None:
    retry_policy = RetryPolicy(retries)
    assert [again(retry_policy, KILLED) for _ in range(retries + 2)] == [True] * retries + [False] * 2


def test_checkpoint_makes_up_for_the_failures_before_it() -> None:
    retry_policy = RetryPolicy(2)
    for _ in range(20):
        assert again(retry_policy, KILLED) and again(retry_policy, KILLED)
        retry_policy.on_event({"event": "progress", "task": "ppo", "done": 3, "total": 9})
        retry_policy.on_event({"event": "resumed", "step": 10})
        retry_policy.on_event(CHECKPOINT)
    assert [again(retry_policy, KILLED) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("kind", NEVER_RETRIED)
def test_deterministic_failure_is_not_retried(kind: type[RLHFError]) -> None:
    retry_policy = RetryPolicy(5)
    retry_policy.on_event(CHECKPOINT)
    assert not again(retry_policy, kind("no"))


@pytest.mark.parametrize(("retries", "expected"), [(0, [False]), (1, [True, False]), (5, [True, False])])
def test_lack_of_memory_is_retried_once(retries: int, expected: list[bool]) -> None:
    retry_policy = RetryPolicy(retries)
    assert [again(retry_policy, OutOfMemory("CUDA out of memory")) for _ in expected] == expected


def test_lack_of_memory_is_counted_separately() -> None:
    retry_policy = RetryPolicy(3)
    assert [again(retry_policy, error) for error in (KILLED, OutOfMemory("x"), KILLED, OutOfMemory("x"))] == [
        True
    ] * 3 + [False]
    retry_policy = RetryPolicy(3)
    assert [again(retry_policy, error) for error in (OutOfMemory("x"), OutOfMemory("x"))] == [True, False]


def test_interrupt_is_not_retried() -> None:
    assert not again(RetryPolicy(5), KeyboardInterrupt())


def test_failed_attempts_are_repeated_after_a_growing_delay() -> None:
    delays: list[float] = []
    outcomes: list[StageFailed | str] = [KILLED] * 7 + ["made"]

    def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, StageFailed):
            raise outcome
        return outcome

    assert retry_with(RetryPolicy(7)).copy(sleep=delays.append)(attempt) == "made"
    assert delays == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 160.0]


class Stages:
    """Runs of the pipeline in which the child process of each stage is a toy."""

    def __init__(self, folder: Path, database: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._database = database
        self._patch = patch
        patch.setattr(stage_runner, "RETRY_DELAYS", (0.1,))

    def run(self, body: str, **settings: Any) -> PipelineRun:
        """Return a run whose stages execute `body`."""
        self.change(body)
        tree = {
            "run": {"home": str(self._folder / "home"), "prepare_next": False, **settings},
            "tracking": {"uri": f"sqlite:///{self._database}", "system_metrics": False},
        }
        return PipelineRun(PipelineConfig.model_validate(tree), "demo.yaml")

    def change(self, body: str) -> None:
        for name, value in toy_environment(self._folder, body).items():
            self._patch.setenv(name, value)


@pytest.fixture
def stages(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    return Stages(tmp_path, database, monkeypatch)


FAILS = "from rlhf_core.errors import StageFailed\nraise StageFailed('rank 1 died')"
FAILS_ONCE = """
from rlhf_core.errors import StageFailed

(folder / "tries").open("a").write("x")
if (folder / "tries").read_text() == "x":
    raise StageFailed("rank 1 died")
return REF
"""


def test_a_failed_stage_is_made_by_the_next_attempt(stages: Stages, tmp_path: Path) -> None:
    run = stages.run(FAILS_ONCE, retries=1)
    assert run_with_retries(run, "data").ref.uri == "/store/x"
    assert (tmp_path / "tries").read_text() == "xx"
    assert [file.name for file in sorted(run.logs.glob("*.log"))] == ["data-01.log", "data-02.log"]


def test_the_last_failure_is_raised(stages: Stages) -> None:
    run = stages.run(FAILS, retries=1)
    with pytest.raises(StageFailed, match="rank 1 died"):
        run_with_retries(run, "data")
    assert len(list(run.logs.glob("*.log"))) == 2


def test_all_attempts_share_the_time_of_the_stage(stages: Stages) -> None:
    run = stages.run(FAILS, stage_timeout=100)
    with pytest.raises(StageFailed, match="rank 1 died"):
        get_or_run_stage(run, "data", {}, RetryPolicy(5))
    run.first_started["data"] -= 98.0
    stages.change("time.sleep(600)")
    limit = r"stopped after [0-2] seconds, all that run\.stage_timeout=100 left it"
    with pytest.raises(StageTimedOut, match=limit):
        get_or_run_stage(run, "data", {}, RetryPolicy(5))


def test_a_run_stops_when_its_budget_is_spent_and_goes_on_with_a_larger_one(stages: Stages) -> None:
    hours = 2.0 / 3600
    run = stages.run("time.sleep(600)", budget={"device_hours": hours, "price": 3600.0})
    spent = r"budget of the run is spent: 0\.000556 device hours \(2\.00\); raise run\.budget\.device_hours"
    with pytest.raises(BudgetSpent, match=spent):
        get_or_run_stage(run, "data", {}, RetryPolicy(5))
    larger = stages.run("return REF", budget={"device_hours": 1.0})
    assert (larger.key, larger.folder) == (run.key, run.folder), "it continues that run"
    made = run_with_retries(larger, "data")
    assert larger.budget_left(larger.spec("data", {})) == pytest.approx(3600 - made.seconds, abs=0.1)
    # What a checkpoint holds is spent, too: here all of it.
    larger.records["data"] = replace(made, seconds=3600.0)
    with pytest.raises(BudgetSpent, match="stage data continues from its last checkpoint"):
        larger.budget_left(larger.spec("data", {}))


WARNS = f"""
events.send("warning", message="the disk is nearly full")
events.send("warning", message="step 4: guard loops: 30 %", guard="loops")
{FAILS}
"""


def test_guards_become_tags_of_the_run(stages: Stages) -> None:
    run = stages.run(WARNS)
    inputs: dict[StageName, ArtifactRef] = {
        stage: ArtifactRef(stage, "a" * 16, f"digest-{stage}", f"/store/{stage}")
        for stage in stage_inputs(run.config, "ppo")
    }
    with pytest.raises(StageFailed):
        get_or_run_stage(run, "ppo", inputs, RetryPolicy(0))
    assert run.parent_run_id is not None
    tags = run.tracking.mlflow.tags(run.parent_run_id)
    noted = {name: text for name, text in tags.items() if name.startswith("rlhf.guard")}
    assert noted == {"rlhf.guard.loops": "step 4: guard loops: 30 %"}


@pytest.mark.parametrize("started", [True, False])
def test_an_attempt_that_did_not_start_leaves_the_mlflow_run_of_the_stage_to_its_holder(
    stages: Stages, started: bool
) -> None:
    run = stages.run(("events.send('started', attempt=1)\n" if started else "") + FAILS)
    run.ensure_parent()
    held = run.tracking.stage_run(run.parent_run_id, "data", run.spec("data", {}).key)
    assert held.run_id is not None
    with pytest.raises(StageFailed):
        get_or_run_stage(run, "data", {}, RetryPolicy(0))
    found = MlflowClient(run.tracking.uri).get_run(held.run_id)
    assert found.info.status == ("FAILED" if started else "RUNNING")
