"""When a failed stage is tried again:

- `retries` times in a row; a committed checkpoint makes up for the failures before it
- never after a user error or a deterministic failure, and not after an interrupt
- once after a lack of memory
- all attempts share the time of the stage
- `make_with_retries` follows the policy, with a delay that doubles
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import OutOfMemory, RLHFError, StageFailed
from rlhf_core.run import stage_runner
from rlhf_core.run.next_stage import NextStage
from rlhf_core.run.retries import NEVER_RETRIED, RetryPolicy
from rlhf_core.run.spec import StageRecord
from rlhf_core.types import ArtifactRef

KILLED = StageFailed("stage ppo was killed by SIGKILL")
CHECKPOINT = {"event": "checkpoint", "step": 10}


def again(policy: RetryPolicy, error: BaseException) -> bool:
    """Return whether an attempt that failed with `error` is retried; the log announces the same."""
    remaining = policy.remaining(error)
    retried = policy.should_retry(error)
    assert retried == (remaining > 0)
    return retried


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_stage_without_progress_is_retried_that_often(retries: int) -> None:
    policy = RetryPolicy(retries)
    assert [again(policy, KILLED) for _ in range(retries + 2)] == [True] * retries + [False] * 2


def test_checkpoint_makes_up_for_the_failures_before_it() -> None:
    policy = RetryPolicy(2)
    for _ in range(20):
        assert again(policy, KILLED) and again(policy, KILLED)
        policy.on_event({"event": "progress", "task": "ppo", "done": 3, "total": 9})
        policy.on_event({"event": "resumed", "step": 10})
        policy.on_event(CHECKPOINT)
    assert [again(policy, KILLED) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("kind", NEVER_RETRIED)
def test_deterministic_failure_is_not_retried(kind: type[RLHFError]) -> None:
    policy = RetryPolicy(5)
    policy.on_event(CHECKPOINT)
    assert not again(policy, kind("no"))


@pytest.mark.parametrize(("retries", "expected"), [(0, [False]), (1, [True, False]), (5, [True, False])])
def test_lack_of_memory_is_retried_once(retries: int, expected: list[bool]) -> None:
    policy = RetryPolicy(retries)
    assert [again(policy, OutOfMemory("CUDA out of memory")) for _ in expected] == expected


def test_lack_of_memory_is_counted_separately() -> None:
    policy = RetryPolicy(3)
    assert [again(policy, error) for error in (KILLED, OutOfMemory("x"), KILLED, OutOfMemory("x"))] == [
        True
    ] * 3 + [False]
    policy = RetryPolicy(3)
    assert [again(policy, error) for error in (OutOfMemory("x"), OutOfMemory("x"))] == [True, False]


def test_all_attempts_share_the_time_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [1000.0], []

    def child(
        spec: Any, log_file: Path, environment: Any, timeout: float, on_event: Any, waiting: Any
    ) -> Any:
        given.append(timeout)
        now[0] += 45.0
        raise KILLED

    monkeypatch.setattr(stage_runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(stage_runner, "run_child", child)
    run: Any = SimpleNamespace(
        config=PipelineConfig.model_validate({"run": {"stage_timeout": 100}}),
        began={},
        parent_run_id=None,
        ensure_parent=lambda: None,
        spec=lambda stage, inputs: SimpleNamespace(stage=stage, key="0" * 16),
        find=lambda spec: None,
        next_stage=NextStage(),
        stage_after=lambda stage: None,
        log_file=lambda stage: tmp_path / "data.log",
        begin=lambda stage, log_file: None,
        tracking=SimpleNamespace(finish_stage=lambda *given: None),
    )
    for _ in range(4):
        with pytest.raises(StageFailed):
            stage_runner.get_or_run_stage(run, "data", {}, RetryPolicy(5))
    assert given == [100.0, 55.0, 10.0, 0.0]


def test_interrupt_is_not_retried() -> None:
    assert not again(RetryPolicy(5), KeyboardInterrupt())


def test_failed_attempts_are_repeated_after_a_growing_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    record = StageRecord(ArtifactRef("data", "0" * 16, "d", "/store/data"), 1.0, False)
    outcomes = iter([*[KILLED] * 7, record])

    def attempt(*_given: Any) -> StageRecord:
        outcome = next(outcomes)
        if isinstance(outcome, StageFailed):
            raise outcome
        return outcome

    monkeypatch.setattr(stage_runner, "get_or_run_stage", attempt)
    monkeypatch.setattr("tenacity.nap.time.sleep", delays.append)
    run: Any = SimpleNamespace(
        config=PipelineConfig.model_validate({"run": {"retries": 7, "retry_delay": 2.0}}),
        inputs=lambda stage: {},
    )
    assert stage_runner.make_with_retries(run, "data") is record
    assert delays == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0]

    outcomes = iter([KILLED, KILLED])
    run.config = PipelineConfig.model_validate({"run": {"retries": 1}})
    with pytest.raises(StageFailed, match="killed by SIGKILL"):
        stage_runner.make_with_retries(run, "data")


def test_guards_and_advice_become_tags_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[str, str]] = []

    def child(
        spec: Any, log_file: Path, environment: Any, timeout: float, on_event: Any, waiting: Any
    ) -> Any:
        on_event({"event": "warning", "message": "the disk is nearly full"})
        on_event({"event": "warning", "message": "step 4: guard loops: 30 %", "guard": "loops"})
        on_event({"event": "warning", "message": "advice, step 4: 30 %", "advice": "sync"})
        raise KILLED

    monkeypatch.setattr(stage_runner, "run_child", child)
    run: Any = SimpleNamespace(
        config=PipelineConfig(),
        began={},
        parent_run_id=None,
        ensure_parent=lambda: None,
        spec=lambda stage, inputs: SimpleNamespace(stage=stage, key="0" * 16),
        find=lambda spec: None,
        next_stage=NextStage(),
        stage_after=lambda stage: None,
        log_file=lambda stage: tmp_path / "data.log",
        begin=lambda stage, log_file: None,
        note=lambda *given: noted.append(given),
        tracking=SimpleNamespace(finish_stage=lambda *given: None),
    )
    with pytest.raises(StageFailed):
        stage_runner.get_or_run_stage(run, "ppo", {}, RetryPolicy(0))
    assert noted == [("guard.loops", "step 4: guard loops: 30 %"), ("advice.sync", "advice, step 4: 30 %")]
