"""A stage of the pipeline as a Prefect task. The work is done by `rlhf_core.run.stage_runner`.

Prefect shows each attempt, asks the retry policy of the run, and gets a reused artifact as the state
`Skipped`. Its own result cache is off: it cannot see whether an artifact still exists, and it stores pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.notify import emit, notify
from flows.pages import ProgressPage, publish_drift, publish_stage
from rlhf_core.ops.drift import DriftReport, compare_with_champion
from rlhf_core.pipeline import StageName
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.run.stage_runner import RETRY_DELAYS, RetryPolicy, get_or_run_stage
from rlhf_core.types import ArtifactRef

MAX_RETRIES = 1000
"""The limit that Prefect gets. `RetryPolicy` decides earlier."""


def run_stage(run: PipelineRun, stage: StageName) -> ArtifactRef | None:
    """Return the artifact of `stage`, reused or made by its task; None if this run does not have
    the stage.

    Raises InputError if `run` has not made an input of the stage yet.
    """
    if not run.includes(stage):
        return None
    retry_policy = RetryPolicy(run.config.run.retries)
    # Prefect draws an edge from the task that has returned an artifact to the task that gets it.
    #
    # A task that returns a state, as `Skipped` is, returns the state and not its data unless the state is
    # requested.
    state: State[Any] = stage_task(stage, retry_policy)(
        run, stage, run.inputs(stage), retry_policy, return_state=True
    )
    ref: ArtifactRef = state.result()
    return ref


def stage_task(stage: StageName, retry_policy: RetryPolicy) -> Any:
    """Return the task `attempt` under the name of `stage`, retried as `retry_policy` decides."""
    return attempt.with_options(
        name=stage,
        task_run_name=stage,
        retries=MAX_RETRIES,
        retry_delay_seconds=list(RETRY_DELAYS),
        # Prefect accepts only a plain function, and takes every other callable for a "no".
        retry_condition_fn=lambda task, task_run, state: retry_policy.should_retry(_error_of(state)),
    )


def _error_of(state: State[Any]) -> BaseException:
    if isinstance(state.data, BaseException):
        return state.data
    error: BaseException = state.result(raise_on_failure=False)
    return error


def check_drift(run: PipelineRun, data: ArtifactRef | None) -> None:
    """Compare the data with those of the champion, as a task if it is configured.

    Raises DataDrifted if they differ too much.
    """
    if run.config.drift is not None and data is not None:
        drift(run, data)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="drift")
def drift(run: PipelineRun, data: ArtifactRef) -> None:
    """Measure the drift, show its page, and raise DataDrifted if it is above a limit."""
    report = compare_with_champion(run, data)
    if report is not None:
        follow_drift(report, run.name)


def follow_drift(report: DriftReport, run_name: str) -> None:
    """Show the page of `report`, and raise DataDrifted if the drift is above a limit that ends the run.

    The failure of the flow is its notification, and a warning has one of its own.
    """
    publish_drift(report)
    if above := report.above("warn", "stop"):
        emit("data.drifted", f"run.{run_name}", reason="; ".join(above))
    report.raise_stop()
    if above:
        notify(f"{run_name} drifted", f"From the data of {report.champion}: {'; '.join(above)}")


@task(cache_policy=NO_CACHE, persist_result=False)
def attempt(
    run: PipelineRun, stage: StageName, inputs: Mapping[StageName, ArtifactRef], retry_policy: RetryPolicy
) -> State[ArtifactRef] | ArtifactRef:
    """Find the artifact of `stage`, or have a child process make it."""
    with ProgressPage(stage) as page:

        def on_event(event: dict[str, Any]) -> None:
            page.event(event)
            if event["event"] == "warning" and "guard" in event:
                # Not in the child, which gets none of Prefect's variables (`spec.stage_environment`).
                emit("guard.raised", f"run.{run.name}", guard=event["guard"], reason=event["message"])

        record = get_or_run_stage(run, stage, inputs, retry_policy, on_event)
    publish_stage(run, stage, record)
    if record.reused:
        return Completed(name="Skipped", message=f"reused {record.ref.uri}", data=record.ref)
    return record.ref
