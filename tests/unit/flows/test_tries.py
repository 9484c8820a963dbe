"""How often a stage is tried again.

- `retries` times in a row; what it has committed in between makes up for the failures before
- not at all after what only the user can mend, or what would come out again
- once after memory did not suffice
- all tries share the time of the stage
- Prefect's own engine takes it from there
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed
from prefect.task_engine import SyncTaskRunEngine

from flows import tasks as stages
from flows.tasks import NEVER_RETRIED, Tries, configured
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import OutOfMemory, RLHFError, StageFailed

KILLED = StageFailed("stage ppo was killed by SIGKILL")
CHECKPOINT = {"event": "checkpoint", "step": 10}


def again(tries: Tries, error: BaseException) -> bool:
    """What Prefect is told of an attempt that failed of `error`; the user has been told the same."""
    said = tries.left(error)
    told = tries.another(Failed(data=error))
    assert told == (said > 0)
    return told


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_stage_that_gets_nowhere_is_tried_again_so_often(retries: int) -> None:
    tries = Tries(retries)
    assert [again(tries, KILLED) for _ in range(retries + 2)] == [True] * retries + [False] * 2


def test_a_checkpoint_makes_up_for_the_failures_before_it() -> None:
    tries = Tries(2)
    for _ in range(20):
        assert again(tries, KILLED) and again(tries, KILLED)
        tries.event({"event": "progress", "task": "ppo", "done": 3, "total": 9})
        tries.event({"event": "resumed", "step": 10})
        tries.event(CHECKPOINT)
    assert [again(tries, KILLED) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("kind", NEVER_RETRIED)
def test_what_would_come_out_again_is_not_tried_again(kind: type[RLHFError]) -> None:
    tries = Tries(5)
    tries.event(CHECKPOINT)
    assert not again(tries, kind("no"))


@pytest.mark.parametrize(("retries", "expected"), [(0, [False]), (1, [True, False]), (5, [True, False])])
def test_memory_that_did_not_suffice_may_once_have_been_taken_by_others(
    retries: int, expected: list[bool]
) -> None:
    tries = Tries(retries)
    assert [again(tries, OutOfMemory("CUDA out of memory")) for _ in expected] == expected


def test_memory_counts_apart_from_what_else_fails() -> None:
    tries = Tries(3)
    assert [again(tries, error) for error in (KILLED, OutOfMemory("x"), KILLED, OutOfMemory("x"))] == [
        True
    ] * 3 + [False]
    tries = Tries(3)
    assert [again(tries, error) for error in (OutOfMemory("x"), OutOfMemory("x"))] == [True, False]


def test_all_tries_share_the_time_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [1000.0], []

    def child(spec: Any, log_file: Path, environment: Any, timeout: float, on_event: Any) -> Any:
        given.append(timeout)
        now[0] += 45.0
        raise KILLED

    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(stages, "run_child", child)
    run: Any = SimpleNamespace(
        config=PipelineConfig.model_validate({"run": {"stage_timeout": 100}}),
        began={},
        parent_run_id=None,
        ensure_parent=lambda: None,
        spec=lambda stage, inputs: SimpleNamespace(stage=stage, key="0" * 16),
        find=lambda spec: None,
        log_file=lambda stage: tmp_path / "data.log",
        begin=lambda stage, log_file: None,
        tracking=SimpleNamespace(finish_stage=lambda *given: None),
    )
    for _ in range(4):
        with pytest.raises(StageFailed):
            stages.execute.fn(run, "data", {}, Tries(5))
    assert given == [100.0, 55.0, 10.0, 0.0]


@pytest.mark.parametrize("retries", [0, 2])
def test_prefect_asks_and_obeys(retries: int) -> None:
    settings = PipelineConfig.model_validate({"run": {"retries": retries}}).run
    engine: SyncTaskRunEngine[Any] = SyncTaskRunEngine(task=configured("sft", settings, Tries(retries)))
    engine.task_run = TaskRun(task_key="sft", dynamic_key="0")
    assert [engine.can_retry(KILLED) for _ in range(retries + 2)] == [True] * retries + [False] * 2


def test_a_warning_of_a_guard_becomes_a_tag_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[str, str]] = []

    def child(spec: Any, log_file: Path, environment: Any, timeout: float, on_event: Any) -> Any:
        on_event({"event": "warning", "message": "the disk is nearly full"})
        on_event({"event": "warning", "message": "step 4: guard loops: 30 %", "guard": "loops"})
        raise KILLED

    monkeypatch.setattr(stages, "run_child", child)
    run: Any = SimpleNamespace(
        config=PipelineConfig(),
        began={},
        parent_run_id=None,
        ensure_parent=lambda: None,
        spec=lambda stage, inputs: SimpleNamespace(stage=stage, key="0" * 16),
        find=lambda spec: None,
        log_file=lambda stage: tmp_path / "data.log",
        begin=lambda stage, log_file: None,
        note_guard=lambda *given: noted.append(given),
        tracking=SimpleNamespace(finish_stage=lambda *given: None),
    )
    with pytest.raises(StageFailed):
        stages.execute.fn(run, "ppo", {}, Tries(0))
    assert noted == [("loops", "step 4: guard loops: 30 %")]
