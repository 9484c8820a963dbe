"""The tasks: one per stage. No machine learning here, only "is it there already, and if not, who makes it?".

    spec (key)  ->  manifest of that key?  -- yes -->  state `Skipped`, the artifact as its data
                           | no
                    child process  -- error -->  tried again from its checkpoint, unless the user must act
                           |
                    artifact, published by the child

Prefect's own result cache is off: it cannot see whether an artifact still exists, and it keeps pickles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.pages import ProgressPage, publish_stage
from rlhf_core.config.pipeline import RunConfig
from rlhf_core.errors import (
    CorruptArtifact,
    GateFailed,
    InputError,
    NonFiniteError,
    OutOfMemory,
    StageHeld,
    StageTimedOut,
    Superseded,
    UnexpectedError,
)
from rlhf_core.pipeline import StageName
from rlhf_core.run.child import OnEvent, run_child
from rlhf_core.run.display import current_display
from rlhf_core.run.environment import stage_environment
from rlhf_core.run.pipeline import Pipeline, StageRecord
from rlhf_core.run.spec import StageSpec
from rlhf_core.stages.gates import check_gate
from rlhf_core.system.failpoints import failpoint
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
"""Only the user can help, another attempt has taken over, the stage's time is up, the inputs of this run are
gone, or the same would come out again.
"""

MOST_RETRIES = 1000
"""What Prefect is told; `Tries` decides."""
_DELAYS = 6
"""The wait before a retry doubles this often at most."""

Ref = ArtifactRef | None
"""None: this run does not have the stage (`--until`, or no reward model asked for)."""


def make_stage(run: Pipeline, stage: StageName, *inputs: Ref) -> Ref:
    """Return the artifact of `stage`, reused or made by its task; None if this run does not have the stage."""
    if not run.wants(stage):
        return None
    tries = Tries(run.config.run.retries)
    make = configured(stage, run.config.run, tries)
    # A task that returns a state, as `Skipped` is, gives the state and not its data unless the state is asked
    # for.
    state: State[Any] = make(run, stage, {ref.kind: ref for ref in inputs if ref}, tries, return_state=True)
    ref: ArtifactRef = state.result()
    return ref


def configured(stage: StageName, settings: RunConfig, tries: Tries) -> Any:
    """The task `execute` under the name of `stage`, tried again as `tries` says."""
    return execute.with_options(
        name=stage,
        task_run_name=stage,
        retries=MOST_RETRIES,
        retry_delay_seconds=[settings.retry_delay * 2**n for n in range(_DELAYS)],
        # Prefect takes a plain function only, and what else it is given for a "no".
        retry_condition_fn=lambda task, task_run, state: tries.another(state),
    )


class Tries:
    """How often a stage is tried again: `retries` times in a row that get no further than the last
    checkpoint.

    A run of days outlives many failures, as long as it moves between them.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._failed = 0
        self._starved = False
        """Whether memory did not suffice in one of those that failed."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Of the stage's process: what it has committed makes up for the failures before."""
        if event["event"] == "checkpoint":
            self._failed, self._starved = 0, False

    def left(self, error: BaseException) -> int:
        """How many more there are if the attempt at hand fails of `error`."""
        if isinstance(error, NEVER_RETRIED):
            return 0
        again = self._starved and isinstance(error, OutOfMemory)
        return 0 if again else max(0, self._retries - self._failed)

    def another(self, state: State[Any]) -> bool:
        """Prefect asks this once of every failed attempt."""
        error = state.data if isinstance(state.data, BaseException) else state.result(raise_on_failure=False)
        left = self.left(error)
        self._failed += 1
        self._starved = self._starved or isinstance(error, OutOfMemory)
        return left > 0


@task(cache_policy=NO_CACHE, persist_result=False)
def execute(
    run: Pipeline, stage: StageName, inputs: Mapping[StageName, ArtifactRef], tries: Tries
) -> State[ArtifactRef] | ArtifactRef:
    """Find the artifact of `stage`, or have a child process make it."""
    began = run.began.setdefault(stage, time.monotonic())
    run.ensure_parent()
    spec = run.spec(stage, inputs)
    display = current_display()
    ref = run.find(spec)
    reused, continued = ref is not None, False
    if ref is None:
        log_file = run.log_file(stage)
        display.started(stage, str(log_file))
        run.begin(stage, log_file)
        failpoint("flow.stage")
        with ProgressPage(stage) as page:

            def on_event(event: dict[str, Any]) -> None:
                nonlocal reused, continued
                reused = reused or event["event"] == "reused"
                continued = continued or event["event"] == "resumed"
                if event["event"] == "warning" and "guard" in event:
                    run.note_guard(event["guard"], event["message"])
                tries.event(event)
                display.event(stage, event)
                page.event(event)

            ref = _make(run, spec, log_file, on_event, tries)
        failpoint("flow.made")
    if reused:
        check_gate(run.config, stage, ref.metrics)
        run.tidy(spec)
        run.tracking.link_reused(run.parent_run_id, stage, ref)
    record = StageRecord(ref, time.monotonic() - began, reused, continued)
    run.record(stage, record)
    display.finished(stage, record)
    publish_stage(run, stage, record)
    return Completed(name="Skipped", message=f"reused {ref.uri}", data=ref) if reused else ref


def _make(run: Pipeline, spec: StageSpec, log_file: Path, on_event: OnEvent, tries: Tries) -> ArtifactRef:
    """Run the child; one that was killed could not end its MLflow run itself."""
    settings = run.config
    try:
        left = settings.run.stage_timeout - (time.monotonic() - run.began[spec.stage])
        return run_child(spec, log_file, stage_environment(settings), max(0.0, left), on_event)
    except (StageHeld, Superseded):
        raise  # what there is in MLflow is the other attempt's
    except Exception as error:
        run.tracking.finish_stage(run.parent_run_id, spec.key, "FAILED")
        if left := tries.left(error):
            log.warning("%s; trying again from the last checkpoint, %d tries left", error, left)
        raise
    except BaseException:
        run.tracking.finish_stage(run.parent_run_id, spec.key, "KILLED")
        raise
