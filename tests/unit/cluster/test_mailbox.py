"""Calls of rank 0 that run in the stage's process: the two sides in two threads, without Ray.

- values and errors of calls come back, in order; what is posted is executed without a reply
- a stop request of the stage reaches rank 0, and the stage defers it while rank 0 is in its loop
- files and figures of rank 0 arrive by content, logs by name and level
- what is sent to another host has no part that belongs to the stage's process
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rlhf_core.cluster.mailbox import END, CallReply, ContextServer, LogForwarder, Mailbox, portable
from rlhf_core.errors import StoreError, UnexpectedError
from rlhf_core.system.processes import StopRequest
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.types import AnsweredPrompt, StageContext


def served(context: StageContext, work: Callable[[StageContext], None]) -> None:
    """Run `work` with a remote context in a thread of its own, and serve its calls. Raises its error."""
    mailbox, server = Mailbox(), ContextServer(context)
    failures: list[Exception] = []

    def rank_zero() -> None:
        try:
            # As Ray sends it.
            work(mailbox.context(pickle.loads(pickle.dumps(portable(context)))))
        except Exception as error:
            failures.append(error)
        finally:
            mailbox.post(END)

    thread = threading.Thread(target=rank_zero, daemon=True)
    thread.start()
    reply: CallReply | None = None
    while True:
        request = mailbox.exchange(reply, server.stop_requested, 0.1)
        sent = cloudpickle.loads(cloudpickle.dumps(request))  # as Ray sends it
        if sent == END:
            break
        reply = None if sent is None else server.execute(sent)
    thread.join(10)
    if failures:
        raise failures[0]


class BrokenMetrics(RecordingMetrics):
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if "full" in metrics:
            raise StoreError("the disk is full")
        if "bug" in metrics:
            raise KeyError("step")
        super().log_metrics(metrics, step)


def test_values_and_errors_come_back_in_order(tmp_path: Path) -> None:
    context = stage_context(tmp_path, metrics=BrokenMetrics())

    def work(remote: StageContext) -> None:
        assert remote.checkpoints.latest() is None
        with pytest.raises(StoreError, match="the disk is full"):
            remote.metrics.log_metrics({"full": 1.0}, 1)
        with pytest.raises(UnexpectedError, match="KeyError: 'step'"):
            remote.metrics.log_metrics({"bug": 1.0}, 1)
        for step in range(3):
            remote.metrics.log_metrics({"loss": 1.0 / (1 + step)}, step)
        remote.progress("sft", 1, 2, "steps", loss=0.5)
        remote.checkpoints.prepare(3, remote.scratch / "c", 10)
        remote.checkpoints.save(3, remote.scratch / "c")
        latest = remote.checkpoints.latest()
        assert latest is not None and latest[0] == 3

    served(context, work)
    assert isinstance(context.metrics, RecordingMetrics)
    assert context.metrics.column("loss") == [1.0, 0.5, 1.0 / 3.0]


def test_a_stop_request_is_deferred_while_rank_zero_is_in_its_loop(tmp_path: Path) -> None:
    context = replace(stage_context(tmp_path), stop=StopRequest())

    def work(remote: StageContext) -> None:
        remote.stop.defer()
        assert not remote.stop.requested
        context.stop.on_signal(15, None)  # would exit if it were not deferred
        remote.metrics.flush()
        assert remote.stop.requested

    served(context, work)


def test_files_answers_and_logs_of_rank_zero_arrive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contents: dict[str, str] = {}

    class Reading(RecordingMetrics):
        def log_file(self, path: Path, folder: str = "") -> None:
            contents[f"{folder}/{path.name}"] = path.read_text()

    metrics = Reading()
    context = stage_context(tmp_path, metrics=metrics)
    answered = AnsweredPrompt("a", {"PPO": "b"}, {"winner": "PPO"}, "gold")

    def work(remote: StageContext) -> None:
        remote.metrics.log_answers([answered])
        file = tmp_path / "examination.json"
        file.write_text("{}")
        remote.metrics.log_file(file, "reward")

    served(context, work)
    assert contents == {"reward/examination.json": "{}"} and metrics.answers == [answered]

    mailbox, server = Mailbox(), ContextServer(None)
    record = logging.LogRecord(
        "rlhf_core.stages.sft", logging.WARNING, "", 0, "rows are %s", ("padded",), None
    )
    LogForwarder(mailbox).emit(record)
    request = mailbox.exchange(None, False, 0.1)
    assert request is not None and server.execute(request) is None
    assert ("rlhf_core.stages.sft", logging.WARNING, "rows are padded") in caplog.record_tuples


def test_what_is_sent_has_no_part_of_the_stages_process(tmp_path: Path) -> None:
    sent: Any = portable(stage_context(tmp_path, inputs={"data": tmp_path}))
    assert (sent.checkpoints, sent.metrics, sent.progress, sent.monitor) == (None, None, None, None)
    assert sent.inputs == {"data": tmp_path}
