"""What people see in Prefect's pages: a progress bar that moves, a report of each stage and one of the run.

Prefect only shows the run. If it cannot be reached, the run continues: failures are logged once, and the
progress bar has a thread of its own, so that a slow server never makes the stage wait.
"""

from __future__ import annotations

import contextvars
import json
import logging
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, cast
from uuid import UUID

from prefect import get_client, runtime
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext

from flows.notify import view_only
from rlhf_core.executors.spec import StageRecord
from rlhf_core.ops.drift import DriftReport
from rlhf_core.ops.servers.reconcile import COMMAND_TAG, PROCESS_LABEL
from rlhf_core.pipeline import StageName
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.run.summary import duration, headline, run_markdown, stage_markdown, verdict
from rlhf_core.system.processes import RecordedProcess

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
"""The progress artifact moves at most this often."""
# Then the progress is left out, so that a server that is down does not fill the log.
_MAX_FAILURES = 3


def _artifact_key(stage: str, content: str) -> str:
    """Return the key of a Prefect artifact. Prefect allows lowercase letters, digits and dashes."""
    return f"{stage.replace('_', '-')}-{content}"


class ProgressPage:
    """The progress artifact `<stage>-progress`, fed by the child's events from within `with`."""

    def __init__(self, stage: StageName, seconds: float = PROGRESS_SECONDS) -> None:
        self._stage = stage
        self._seconds = seconds
        self._latest: dict[str, Any] | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        context = contextvars.copy_context()  # the artifact belongs to the task run that is in it
        self._thread = threading.Thread(
            target=context.run, args=(self._loop,), daemon=True, name=f"{stage}-progress"
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closed.set()
        self._changed.set()  # wakes the thread, which reports the last event
        # Not longer: a server that does not answer must not hold the stage. The thread is a daemon.
        self._thread.join(timeout=2 * self._seconds)

    def event(self, event: dict[str, Any]) -> None:
        """Store an event of the child, for the thread that updates the page."""
        if event["event"] == "progress" and event.get("total"):
            self._latest = event
            self._changed.set()

    def _loop(self) -> None:
        artifact: UUID | None = None
        failures = 0
        while failures < _MAX_FAILURES:
            self._changed.wait()
            # Before `_latest` is read, so that an event that arrives in between is not lost.
            self._changed.clear()
            if self._latest is not None:
                event = self._latest
                percent, text = describe(event)
                taken = False
                with view_only(f"Prefect did not take the progress of {self._stage}"):
                    if artifact is None:
                        artifact = cast(
                            UUID,
                            create_progress_artifact(
                                percent, key=_artifact_key(self._stage, "progress"), description=text
                            ),
                        )
                    else:
                        update_progress_artifact(artifact, percent, description=text)
                    taken = True
                failures += not taken
            # The pause bounds the rate of requests. What has come during it is sent before the thread ends.
            if self._closed.wait(self._seconds) and not self._changed.is_set():
                return


def describe(event: dict[str, Any]) -> tuple[float, str]:
    """Return the percentage and a sentence for a progress event."""
    percent = min(100.0, round(100.0 * event["done"] / event["total"], 1))
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in (event.get("metrics") or {}).items())
    text = f"{event['task']}: {event['done']} of {event['total']} {event['unit']}, {percent:.0f} %"
    if event.get("left") is not None:
        text += f", {duration(event['left'])} left"
    return percent, f"{text} ({metrics})" if metrics else text


def show_log_lines() -> None:
    """Let Prefect show this project's log lines on a run's page: it adds a handler, but leaves the level."""
    for name in ("flows", "rlhf_core"):
        logging.getLogger(name).setLevel(logging.INFO)


def publish_process() -> None:
    """Give the flow run of a command, or one inside it, the identity of its process, for the reconciler of
    `rlhf up`.
    """
    with _report("process"), get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(runtime.flow_run.id)
        root = client.read_flow_run(runtime.flow_run.root_flow_run_id)
        # The process of a deployment's run is known by a variable that Prefect sets in it
        # (`reconcile.ENGINE_VARIABLE`).
        if root.deployment_id is None:
            client.update_flow_run_labels(flow_run.id, {PROCESS_LABEL: json.dumps(RecordedProcess.own())})
            client.update_flow_run(flow_run.id, tags=[*flow_run.tags, COMMAND_TAG])


def publish_name(run: PipelineRun) -> None:
    """Give the flow run the name of the pipeline in MLflow and on the disk, and tags that tell it from
    others.
    """
    settings = run.config.run
    wanted = [settings.name, f"seed={settings.seed}", f"pipeline={run.key[:8]}"]
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        context.flow_run.name = run.name  # the copy that the hooks of its end get
    with _report("name"), get_client(sync_client=True) as client:
        # An update replaces all tags, and the reconciler needs `auto-recover`.
        known = client.read_flow_run(runtime.flow_run.id).tags
        tags = [*known, *(tag for tag in wanted if tag not in known)]
        client.update_flow_run(runtime.flow_run.id, name=run.name, tags=tags)


def publish_stage(run: PipelineRun, stage: StageName, record: StageRecord) -> None:
    """Report of a finished stage, with its numbers and links."""
    links = run.links(record.ref.mlflow_run_id)
    with _report(stage):
        create_markdown_artifact(
            stage_markdown(stage, record, links),
            key=_artifact_key(stage, "report"),
            description=f"Stage {stage}: {headline(stage, record.ref.metrics)}",
        )


def publish_drift(report: DriftReport) -> None:
    """Publish the page of the comparison with the champion's data."""
    with _report("drift"):
        create_markdown_artifact(
            report.markdown, key="data-drift", description=f"Drift from the data of {report.champion}"
        )


def publish_reason(reason: str) -> None:
    """Publish the page of a retraining with the reason why it began."""
    with _report("the reason"):
        create_markdown_artifact(f"Training began: {reason}", key="retraining-reason", description=reason)


def publish_run(run: PipelineRun) -> None:
    """Report of the whole run, with its results and links."""
    summary = run.summary()
    with _report("run"):
        create_markdown_artifact(
            run_markdown(summary), key="pipeline-report", description=verdict(summary) or "Whole pipeline"
        )


def _report(what: str) -> AbstractContextManager[None]:
    return view_only(f"Prefect did not take the report of {what}")


def flow_run_tags() -> dict[str, str]:
    """Return tags by which an MLflow run leads back to the flow run that it belongs to."""
    tags = {
        "prefect.flow_run_id": runtime.flow_run.id,
        "prefect.flow_run_url": runtime.flow_run.ui_url,
    }
    if runtime.deployment.id:
        tags["mlflow.source.type"] = "JOB"
    return {name: str(value) for name, value in tags.items() if value}
