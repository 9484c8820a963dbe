"""Gets the artifact of a stage: reused if it exists, otherwise made by a child process or a job.

    spec (key)  ->  manifest of that key?  -- yes -->  reused
                           | no
                 child process or job  -- error -->  retried from its checkpoint (`RetryPolicy`)
                           |
                 artifact, published by the child process or the job

Prefect's task calls `get_or_run_stage` and retries by itself; `run_with_retries` does both without Prefect.
Both ask the same policy when a failed stage is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception, wait_chain, wait_fixed

from rlhf_core.errors import (
    CorruptArtifact,
    GateFailed,
    InputError,
    NonFiniteError,
    OutOfMemory,
    StageTimedOut,
    Superseded,
    UnexpectedError,
)
from rlhf_core.executors.child import OnEvent, StageProcess, run_child
from rlhf_core.executors.follow import JobFollower, open_scheduler
from rlhf_core.executors.spec import StageRecord, StageSpec, stage_environment
from rlhf_core.pipeline import StageName
from rlhf_core.run.display import Pace, current_display
from rlhf_core.run.pipeline_run import PipelineRun, budget_spent
from rlhf_core.stages.gates import check_gate
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.tracker import Status
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

NEVER_RETRIED = (
    InputError,
    Superseded,
    StageTimedOut,
    CorruptArtifact,
    GateFailed,
    NonFiniteError,
    UnexpectedError,
)
"""Retrying cannot help: user error, another attempt has taken over, out of time, lost inputs, or a
deterministic failure.
"""

RETRY_DELAYS = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Seconds before each retry. The last one is for all further ones."""


class RetryPolicy:
    """Allows `retries` failures in a row without a new checkpoint.

    A run of days survives many failures, as long as it makes progress between them.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._failures = 0
        self._out_of_memory = False
        """Whether one of these failures was a lack of memory."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Forget earlier failures if `event` of the stage reports a committed checkpoint."""
        if event["event"] == "checkpoint":
            self._failures, self._out_of_memory = 0, False

    def remaining(self, error: BaseException) -> int:
        """Return the number of retries that are left if the present attempt fails with `error`."""
        if not isinstance(error, Exception) or isinstance(error, NEVER_RETRIED):
            return 0
        if self._out_of_memory and isinstance(error, OutOfMemory):
            # Another process may have taken the memory once; twice, the settings need too much.
            return 0
        return max(0, self._retries - self._failures)

    def should_retry(self, error: BaseException) -> bool:
        """Count a failed attempt and return whether there is another. Call this once for each failure."""
        remaining = self.remaining(error)
        self._failures += 1
        self._out_of_memory = self._out_of_memory or isinstance(error, OutOfMemory)
        return remaining > 0


def retry_with(retry_policy: RetryPolicy) -> Retrying:
    """Return a caller that repeats a failed call as `retry_policy` allows, after `RETRY_DELAYS`."""
    return Retrying(
        # Without `stop`, tenacity never ends: the policy does,
        # which counts failures since the last checkpoint only.
        retry=retry_if_exception(retry_policy.should_retry),
        wait=wait_chain(*map(wait_fixed, RETRY_DELAYS)),
        reraise=True,
    )


def run_with_retries(run: PipelineRun, stage: StageName) -> StageRecord:
    """Run `stage` with the retries of the configuration, and return its outcome.

    Raises InputError if `run` has not made an input of the stage yet.
    """
    retry_policy = RetryPolicy(run.config.run.retries)
    return retry_with(retry_policy)(get_or_run_stage, run, stage, run.inputs(stage), retry_policy)


def get_or_run_stage(
    run: PipelineRun,
    stage: StageName,
    inputs: Mapping[StageName, ArtifactRef],
    retry_policy: RetryPolicy,
    on_event: OnEvent | None = None,
) -> StageRecord:
    """Find the artifact of `stage`, or have a child process or a job make it. This is one attempt.

    Args:
        run: The run that the stage belongs to.
        stage: Name of the stage.
        inputs: Artifacts of earlier stages; those that the stage does not read are ignored.
        retry_policy: Receives the events of the child.
        on_event: Also receives them, for example to show the progress.

    Raises:
        RLHFError: As the child reported it, see `run_child`.
        GateFailed: A reused artifact does not meet the limits of this configuration.
    """
    began = run.first_started.setdefault(stage, time.monotonic())
    run.ensure_parent()  # again in each attempt: MLflow may not have answered before
    spec = run.spec(stage, inputs)
    display = current_display()
    ref = run.find(spec)
    reused = ref is not None
    seen: set[str] = set()  # kinds of events of the child
    if ref is None:
        affordable = run.budget_left(spec)
        waiting = run.next_stage.take(stage, run.config, stage_environment(run.config))
        # A process that waited has written to its log since it began.
        log_file = run.log_file(stage) if waiting is None else waiting.log_file
        display.started(stage, str(log_file))
        run.record_start(stage, log_file)
        failpoint("flow.stage")

        pace = Pace()

        def dispatch(event: dict[str, Any]) -> None:
            seen.add(event["event"])
            if event["event"] == "progress":
                event = {**event, "left": pace.left(event)}  # the executor keeps its own
                run.record_progress(stage, event)
            if event["event"] == "resumed":
                run.record_resumed(stage, event["step"])
            if event["event"] == "warning" and "guard" in event:
                run.record_guard(event["guard"], event["message"])
            prepare_next(run, stage, event)
            # Before the display and the handler: an error there must not undo that a checkpoint was made.
            retry_policy.on_event(event)
            display.event(stage, event)
            if on_event is not None:
                on_event(event)

        ref = _run_stage(run, spec, log_file, dispatch, retry_policy, waiting, seen, affordable)
        failpoint("flow.made")
        reused = "reused" in seen
    elif run.next_stage.stage == stage:
        run.next_stage.close()  # the store has the artifact, which `prepare_next` does not look for
    if reused:
        # An artifact that was made under other limits must meet those of this configuration.
        check_gate(run.config, stage, ref.metrics)
        run.remove_leftovers(spec)
        run.tracking.link_reused(run.parent_run_id, stage, ref, run.name)
    record = StageRecord(ref, time.monotonic() - began, reused, continued="resumed" in seen)
    run.record_result(stage, record)
    display.finished(stage, record)
    return record


def prepare_next(run: PipelineRun, stage: StageName, event: Mapping[str, Any]) -> None:
    """Start the process of the stage after `stage`, at the first event of `stage` that reports progress.

    Earlier, it would delay the start of `stage` itself.
    """
    if event["event"] != "progress" or not event["done"] or not run.config.run.prepare_next:
        return
    following = run.stage_after(stage)
    if following is None or following == run.next_stage.stage:
        return
    if run.config.run.executor_of(following) != "local":
        return
    try:
        environment = stage_environment(run.config)
        run.next_stage.prepare(following, run.config, environment, run.log_file(following))
    except (InputError, OSError) as error:  # the running stage does not depend on it
        log.info("the process of stage %s starts later: %s", following, error)


def _run_stage(
    run: PipelineRun,
    spec: StageSpec,
    log_file: Path,
    on_event: OnEvent,
    retry_policy: RetryPolicy,
    waiting: StageProcess | None,
    seen: Collection[str],
    affordable: float,
) -> ArtifactRef:
    """Run the child process or the job of a stage. End the stage's MLflow run if it fails, because a killed
    process cannot do that itself. `seen` has the kinds of the events that have come, `affordable` the seconds
    that the budget of the run leaves.
    """
    config = run.config
    # All attempts of a stage share its time.
    left = max(0.0, config.run.stage_timeout - (time.monotonic() - run.first_started[spec.stage]))
    began = time.monotonic()
    try:
        if config.run.executor_of(spec.stage) == "local":
            environment = stage_environment(config)
            return run_child(spec, log_file, environment, min(left, affordable), on_event, waiting)
        scheduler = open_scheduler(config, spec.stage)
        return JobFollower(scheduler, spec, log_file, min(left, affordable), on_event).run()
    except Superseded:
        raise  # The MLflow run belongs to the other attempt.
    except BaseException as error:  # also KeyboardInterrupt and Prefect's cancellation
        # Before it has started, another attempt may hold the stage, which has the same MLflow run.
        if "started" in seen:
            status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
            run.tracking.finish_stage(run.parent_run_id, spec.key, status)
        # A scheduler has time limits of its own.
        is_over = affordable < left and time.monotonic() - began >= affordable
        if isinstance(error, StageTimedOut) and config.run.budget is not None and is_over:
            raise budget_spent(config.run.budget, spec.stage) from error
        retries = retry_policy.remaining(error)
        if retries:
            log.warning("%s; trying again from the last checkpoint, %d tries left", error, retries)
        raise
