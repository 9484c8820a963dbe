"""Which process a stage takes, without processes:

- the one that was prepared for it, once
- none if the stage, the configuration, the environment or the source code is another one, or if it has died
- a process that could not be started, or that is not taken, leaves no files
- it is prepared at the first progress of the stage before, once, and only for a stage that runs here
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.run import next_stage, stage_runner
from rlhf_core.run.next_stage import NextStage

CONFIG = PipelineConfig()
OTHER = PipelineConfig.model_validate({"run": {"seed": 1}})
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Started:
    """Records the processes that would be started."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.killed = 0
        self.alive = True

    def start(self, spec: Any, log_file: Path, environment: Any, *, waits: bool) -> Any:
        assert waits
        self.stages.append(spec.stage)
        spec.write(log_file.with_suffix(".json"))
        return SimpleNamespace(
            log_file=log_file,
            spec_file=log_file.with_suffix(".json"),
            is_alive=lambda: self.alive,
            kill=self.kill,
        )

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(next_stage, "start_child", started.start)
    return started


@pytest.fixture
def prepared(tmp_path: Path, started: Started) -> NextStage:
    following = NextStage()
    log = tmp_path / "sft-01.log"
    log.touch()
    following.prepare("sft", CONFIG, ENVIRONMENT, log)
    return following


def test_a_process_is_taken_once(prepared: NextStage, started: Started) -> None:
    process = prepared.take("sft", CONFIG, dict(ENVIRONMENT))
    assert process is not None
    assert prepared.take("sft", CONFIG, ENVIRONMENT) is None
    prepared.close()
    assert started.killed == 0
    assert process.log_file.exists()


def _change_source(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_stage, "_modification_times", lambda: {"loss.py": (1, 2)})


def _die(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    started.alive = False


def _nothing(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "config", "environment"),
    [
        (_nothing, OTHER, ENVIRONMENT),
        (_nothing, CONFIG, {**ENVIRONMENT, "NCCL_DEBUG": "INFO"}),
        (_nothing, CONFIG, {"OMP_NUM_THREADS": "2"}),
        (_change_source, CONFIG, ENVIRONMENT),
        (_die, CONFIG, ENVIRONMENT),
    ],
)
def test_a_process_that_would_differ_from_a_new_one_is_ended(
    prepared: NextStage,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[..., None],
    config: PipelineConfig,
    environment: dict[str, str],
) -> None:
    change(started, monkeypatch)
    assert prepared.take("sft", config, environment) is None
    assert started.killed == 1
    assert not list(tmp_path.iterdir())


def test_a_preparation_that_fails_does_not_end_the_running_stage(tmp_path: Path) -> None:
    def no_space(stage: str) -> Path:
        raise OSError("No space left on device")

    run: Any = SimpleNamespace(
        config=CONFIG, next_stage=NextStage(), stage_after=lambda stage: "sft", log_file=no_space
    )
    stage_runner.prepare_next(run, "data", {"event": "progress", "done": 1})
    assert run.next_stage.stage is None


def test_source_files_that_cannot_be_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / ".#a.py").symlink_to("user@host.1:2")  # of an editor
    monkeypatch.setattr(next_stage, "_SOURCES", tmp_path)
    assert list(next_stage._modification_times()) == [str(tmp_path / "a.py")]


def test_a_process_for_another_stage_keeps_waiting(prepared: NextStage, started: Started) -> None:
    assert prepared.take("data", CONFIG, ENVIRONMENT) is None
    assert started.killed == 0
    assert prepared.take("sft", CONFIG, ENVIRONMENT) is not None


def test_a_process_that_cannot_be_started_leaves_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_given: Any, **_options: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(next_stage, "start_child", fail)
    following = NextStage()
    log = tmp_path / "sft-01.log"
    log.touch()
    following.prepare("sft", CONFIG, ENVIRONMENT, log)
    assert following.stage == "sft"  # it is not tried at each progress
    assert following.take("sft", CONFIG, ENVIRONMENT) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("run_section", "expected"),
    [
        ({}, ["sft"]),
        ({"prepare_next": False}, []),
        ({"resources": {"sft": {"executor": "slurm"}}}, []),
    ],
)
def test_the_next_stage_is_prepared_once_at_the_first_progress(
    tmp_path: Path, started: Started, run_section: dict[str, Any], expected: list[str]
) -> None:
    run: Any = SimpleNamespace(
        config=PipelineConfig.model_validate({"run": run_section}),
        next_stage=NextStage(),
        stage_after=lambda stage: "sft" if stage == "data" else None,
        log_file=lambda stage: tmp_path / f"{stage}-01.log",
    )
    stage_runner.prepare_next(run, "data", {"event": "started"})
    stage_runner.prepare_next(run, "data", {"event": "progress", "done": 0})
    assert started.stages == []
    for done in (1, 2, 3):
        stage_runner.prepare_next(run, "data", {"event": "progress", "done": done})
        stage_runner.prepare_next(run, "sft", {"event": "progress", "done": done})
    assert started.stages == expected
