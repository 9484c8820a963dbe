"""Ranks of one stage as Ray actors: what the stage gets from them. Real processes and gloo.

- what rank 0 returns comes back; its calls of metrics, progress, checkpoints and files, its log and its
  errors reach the stage's process, and a stop request reaches rank 0
- an error of another rank arrives with its class and the rank's number, though rank 0 only sees a broken
  collective; so it does where rank 0 sees nothing, as in NCCL's collectives
- a rank that dies without a word, or before it runs, is named within seconds; a commit is finished first
- a rank that is suspended or stalled is named within its timeout and 10 s, in the groups that DeepSpeed
  makes, too; stacks are saved, and no rank is left
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from ray import cloudpickle

from rlhf_core.cluster.ranks import map_ranks, ray_session, run_ranks
from rlhf_core.config import PipelineConfig
from rlhf_core.engines.distributed import bound_collectives
from rlhf_core.errors import DataError, OutOfMemory, StoreError, WorkerDied, WorkerStuck
from rlhf_core.evaluation.plots import reliability
from rlhf_core.evaluation.statistics import calibration
from rlhf_core.system.heartbeat import Monitor, heartbeat
from rlhf_core.system.processes import EXIT_STOPPED, StopRequest
from rlhf_core.testing import FolderCheckpoints, RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.types import StageContext


@pytest.fixture(scope="module", autouse=True)
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests here: starting it is not what they are about."""
    # pytest imports this module by a name that other processes cannot import.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with (
        Monitor(tmp_path_factory.mktemp("monitor")) as monitor,
        ray_session(2, "cpu", None, monitor),
    ):
        yield


def _sum_of_ranks(rank: Any, _context: Any) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(rank.rank))
    dist.all_reduce(total)
    return float(total)


def _one_raises(rank: Any, _context: Any) -> float:
    if rank.rank == 1:
        raise DataError("pairs.jsonl:7: no rejected response")
    return _sum_of_ranks(rank, None)


def _one_fails_unnoticed(rank: Any, _context: Any) -> None:
    """As under NCCL, whose collectives do not break when a peer is gone."""
    if rank.rank == 1:
        raise OutOfMemory("80 GiB are not enough")
    time.sleep(60)


def _all_are_asked_to_stop(rank: Any, context: StageContext | None) -> None:
    """The others leave; rank 0 still commits."""
    if context is None:
        raise SystemExit(EXIT_STOPPED)
    context.stop.defer()
    context.metrics.log_metrics({"in the loop": 1.0}, 0)
    while not context.stop.requested:
        time.sleep(0.1)
    context.metrics.log_metrics({"committed": 1.0}, 1)
    context.stop.exit()


def _one_fails_during_a_commit(rank: Any, context: StageContext | None) -> None:
    if context is None:
        raise OutOfMemory("80 GiB are not enough")
    heartbeat("commit")
    time.sleep(8)
    context.metrics.log_metrics({"committed": 1.0}, 1)
    heartbeat("the next step")
    time.sleep(60)


def _calls_the_context(rank: Any, context: StageContext | None) -> str:
    if context is None:
        return "not rank 0"
    logging.getLogger("rlhf_core.stages").warning("rows are %s", "padded")
    context.progress("sft", 3, 10, "steps", loss=0.5)
    context.metrics.log_metrics({"train/loss": 0.5}, 3)
    context.metrics.flush()
    file = context.scratch / "examination.json"
    file.write_text("{}")
    context.metrics.log_file(file, "reward")
    found = calibration(np.array([[1.0, 0.0], [0.0, 2.0]]))
    context.metrics.log_figure("reliability", reliability(found))
    folder = context.scratch / "checkpoint"
    context.checkpoints.prepare(3, folder, 100)
    (folder / "state").write_text("7")
    context.checkpoints.save(3, folder)
    latest = context.checkpoints.latest()
    assert latest is not None
    return f"{context.inputs['data']} {latest[0]} {(latest[1] / 'state').read_text()}"


def _saves(rank: Any, context: StageContext | None) -> None:
    if context is not None:
        context.checkpoints.prepare(1, context.scratch / "checkpoint", 10**15)


def _one_dies(rank: Any, death: Path, _context: Any) -> float:
    if rank.rank == 1:
        death.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    return _sum_of_ranks(rank, None)


def _one_is_suspended(rank: Any, _context: Any) -> float:
    bound_collectives(rank.collective_seconds)
    heartbeat("optimizer step 7")
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _sum_of_ranks(rank, None)


def _one_stalls(rank: Any, _context: Any) -> float:
    import torch
    import torch.distributed as dist

    # As ZeRO does it: without a timeout of its own.
    group = dist.new_group(range(2))
    bound_collectives(rank.collective_seconds)
    heartbeat("optimizer step 7")
    if rank.rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.zeros(1), group=group)
    return 0.0


class _KillsItsReader:
    """Dies where it is unpickled: before the target runs."""

    def __reduce__(self) -> Any:
        return (os._exit, (7,))


def _takes_an_argument(_rank: Any, _argument: Any, _context: Any) -> None: ...


def without_group(work: Any, context: StageContext | None) -> list[Any]:
    """Run two ranks without the imports that a process group needs."""
    return map_ranks(work, 2, "cpu", context=context, label="training rank")


def test_rank_zeros_result_comes_back() -> None:
    assert run_ranks(_sum_of_ranks, 2, "cpu", context=None) == 1.0


def test_calls_of_rank_zero_run_in_the_stages_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = stage_context(tmp_path, inputs={"data": tmp_path / "data"}, metrics=_Drawing())
    result = without_group(_calls_the_context, context)
    assert result == [f"{tmp_path / 'data'} 3 7", "not rank 0"]
    metrics, progress, checkpoints = context.metrics, context.progress, context.checkpoints
    assert isinstance(metrics, RecordingMetrics) and isinstance(progress, RecordingProgress)
    assert metrics.rows == [(3, {"train/loss": 0.5})] and metrics.flushes == 1
    assert metrics.files == ["reward/examination.json"] and metrics.figures == ["reliability"]
    assert progress.reports == [("sft", 3, 10, "steps")]
    assert checkpoints.latest() is not None
    assert ("rlhf_core.stages", logging.WARNING, "rows are padded") in caplog.record_tuples


class _Drawing(RecordingMetrics):
    def log_figure(self, name: str, figure: Any) -> None:
        figure.savefig(io.BytesIO(), format="png")
        super().log_figure(name, figure)


class _FullDisk(FolderCheckpoints):
    def prepare(
        self, step: int, folder: Path, size: int, unsharded: int | None = None, *, own: int = 0
    ) -> None:
        raise StoreError(f"{folder} has too little space for {size} bytes")


def test_an_error_of_the_context_is_raised_in_rank_zero_and_arrives_as_itself(tmp_path: Path) -> None:
    context = replace(stage_context(tmp_path), checkpoints=_FullDisk(tmp_path))
    with pytest.raises(StoreError, match=r"^\S+ has too little space for 1000000000000000 bytes$"):
        without_group(_saves, context)


def test_an_error_of_another_rank_arrives_as_itself() -> None:
    with pytest.raises(DataError, match=r"training rank 1: pairs.jsonl:7: no rejected response"):
        run_ranks(_one_raises, 2, "cpu", context=None)


def test_unnoticed_error_of_another_rank_ends_the_stage() -> None:
    with pytest.raises(OutOfMemory, match="training rank 1: 80 GiB are not enough"):
        without_group(_one_fails_unnoticed, None)


def test_a_stop_request_reaches_rank_zero_which_commits(tmp_path: Path) -> None:
    context = replace(stage_context(tmp_path), stop=StopRequest())
    metrics = context.metrics
    assert isinstance(metrics, RecordingMetrics)

    def ask() -> None:
        while not metrics.rows:
            time.sleep(0.1)
        context.stop.on_signal(signal.SIGINT, None)  # raises SystemExit unless it is deferred

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    with pytest.raises(SystemExit) as stopped:
        without_group(_all_are_asked_to_stop, context)
    assert stopped.value.code == EXIT_STOPPED
    assert metrics.last == {"in the loop": 1.0, "committed": 1.0}


def test_a_commit_is_finished_before_a_failed_rank_ends_the_stage(tmp_path: Path) -> None:
    context = stage_context(tmp_path)
    with pytest.raises(OutOfMemory, match="training rank 1: "):
        without_group(_one_fails_during_a_commit, context)
    assert isinstance(context.metrics, RecordingMetrics) and context.metrics.last == {"committed": 1.0}


def test_a_rank_that_dies_is_named_within_seconds(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"^training rank 1 died; "):
        run_ranks(_one_dies, 2, "cpu", tmp_path / "death", context=None)
    # Not from the start of the ranks, which takes a minute on a busy machine.
    assert time.monotonic() - float((tmp_path / "death").read_text()) < 30


def test_rank_that_dies_at_start_does_not_block_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"^training rank [01] died; "):
        run_ranks(_takes_an_argument, 2, "cpu", _KillsItsReader(), context=None)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("work", "activity", "inside"),
    [
        (_one_is_suspended, r"has been suspended \(SIGSTOP\)", "suspended"),
        (_one_stalls, r'has made no progress in "optimizer step 7"', "_one_stalls"),
    ],
    ids=["suspended", "stalled"],
)
def test_a_rank_that_does_not_move_is_named_within_its_timeout(
    work: Any, activity: str, inside: str, tmp_path: Path
) -> None:
    config = PipelineConfig.model_validate({"run": {"timeouts": {"stall": 3.0}}})
    began: list[float] = []
    with ExitStack() as stack:
        monitor = stack.enter_context(Monitor(tmp_path / "stacks"))
        seen = threading.Thread(target=_note_start, args=(monitor, began), daemon=True)
        seen.start()
        with pytest.raises(
            WorkerStuck, match=rf"\(run.timeouts.stall=3\): training rank 1 \(process \d+\) {activity}"
        ) as caught:
            run_ranks(work, 2, "cpu", context=None, run=config.run, monitor=monitor)
        assert time.monotonic() - began[0] < 3 + 10
        assert work.__name__ in (monitor.folder / "training_rank_0.stacks").read_text()
        assert inside in (monitor.folder / "training_rank_1.stacks").read_text()
    process = re.search(r"\(process (\d+)\)", caught.value.message)
    assert process is not None
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(process[1])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(process[1]))


def _note_start(monitor: Monitor, began: list[float]) -> None:
    """When rank 1 was through with its start."""
    while not began:
        participant = monitor.participant("training rank 1")
        if participant is not None and (
            participant.state == "suspended" or participant.activity not in ("", "start", "prepare")
        ):
            began.append(time.monotonic())
        time.sleep(0.1)
