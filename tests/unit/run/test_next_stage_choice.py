"""Which process a stage takes, without processes:

- the one that was prepared for it, once
- none if the stage, the configuration, the environment or the source code is another one, or if it has died
- a process that could not be started, or that is not taken, leaves no files
- it is prepared at the first progress of the stage before, once, and only for a stage that runs here
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.executors import child
from rlhf_core.executors.child import NextStage, StageProcess
from rlhf_core.executors.spec import StageSpec
from rlhf_core.run import stage_runner

CONFIG = PipelineConfig()
OTHER = PipelineConfig.model_validate({"run": {"seed": 1}})
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Started:
    """Starts processes that sleep in place of those that import a stage."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.processes: list[StageProcess] = []

    def start(self, spec: StageSpec, log_file: Path, environment: object, *, waits: bool) -> StageProcess:
        assert waits
        self.stages.append(spec.stage)
        spec.write(log_file.with_suffix(".json"))
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.processes.append(StageProcess(process, log_file, io.BytesIO(), io.BytesIO()))
        return self.processes[-1]

    @property
    def alive(self) -> int:
        return sum(process.is_alive() for process in self.processes)


@pytest.fixture
def started() -> Iterator[Started]:
    started = Started()
    yield started
    for process in started.processes:
        process.kill()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "loss.py").write_text("a = 1\n")
    return folder


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "logs" / "sft-01.log"
    file.parent.mkdir()
    file.touch()
    return file


@pytest.fixture
def prepared(started: Started, sources: Path, log: Path) -> NextStage:
    following = NextStage(started.start, sources)
    following.prepare("sft", CONFIG, ENVIRONMENT, log)
    return following


def test_a_process_is_taken_once(prepared: NextStage, started: Started) -> None:
    process = prepared.take("sft", CONFIG, dict(ENVIRONMENT))
    assert process is not None
    assert prepared.take("sft", CONFIG, ENVIRONMENT) is None
    prepared.close()
    assert started.alive == 1
    assert process.log_file.exists()


def _change_source(started: Started, sources: Path) -> None:
    (sources / "loss.py").write_text("a = 10\n")


def _die(started: Started, sources: Path) -> None:
    process = started.processes[0].process
    process.kill()
    process.wait()


def _nothing(started: Started, sources: Path) -> None:
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
    sources: Path,
    log: Path,
    change: Callable[[Started, Path], None],
    config: PipelineConfig,
    environment: dict[str, str],
) -> None:
    change(started, sources)
    assert prepared.take("sft", config, environment) is None
    assert started.alive == 0
    assert not list(log.parent.iterdir())


def test_a_preparation_that_fails_does_not_end_the_running_stage(tmp_path: Path) -> None:
    def no_space(stage: str) -> Path:
        raise OSError("No space left on device")

    run: Any = SimpleNamespace(
        config=CONFIG, next_stage=NextStage(), stage_after=lambda stage: "sft", log_file=no_space
    )
    stage_runner.prepare_next(run, "data", {"event": "progress", "done": 1})
    assert run.next_stage.stage is None


def test_source_files_that_cannot_be_read_are_left_out(sources: Path) -> None:
    (sources / ".#loss.py").symlink_to("user@host.1:2")  # of an editor
    assert list(child._modification_times(sources)) == [str(sources / "loss.py")]


def test_a_process_for_another_stage_keeps_waiting(prepared: NextStage, started: Started) -> None:
    assert prepared.take("data", CONFIG, ENVIRONMENT) is None
    assert started.alive == 1
    assert prepared.take("sft", CONFIG, ENVIRONMENT) is not None


def test_a_process_that_cannot_be_started_leaves_no_log(log: Path) -> None:
    following = NextStage()
    environment = {**ENVIRONMENT, "LONG": "x" * 2**20}  # more than the kernel accepts
    following.prepare("sft", CONFIG, environment, log)
    assert following.stage == "sft"  # it is not tried at each progress
    assert following.take("sft", CONFIG, environment) is None
    assert not list(log.parent.iterdir())


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
        next_stage=NextStage(started.start),
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
