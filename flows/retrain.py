"""Retraining on a schedule or by new data: the pipeline again, if what goes into it has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.notify import notify, notify_failure
from flows.pages import publish_reason, show_log_lines
from flows.rlhf import File, Override, rlhf, run_name
from rlhf_core.config.base import NonNegativeFloat, NonNegativeInt
from rlhf_core.config.load import load_config
from rlhf_core.ops.retraining import Retraining, RetrainingDecision
from rlhf_core.run.summary import verdict

log = logging.getLogger(__name__)


@flow(name="rlhf-retrain", flow_run_name=run_name, persist_result=False, on_crashed=[notify_failure])
def retrain(
    config: File,
    overrides: tuple[Override, ...] = (),
    min_new_rows: NonNegativeInt = 0,
    min_pause_hours: NonNegativeFloat = 0,
) -> State[Any]:
    """Run the pipeline if its data, base model, reward code or configuration differ from those of every
    policy that was registered.

    Args:
        config: YAML file, as the worker sees it.
        overrides: Other fields, each as `section.field=value`.
        min_new_rows: Rows that the sources must have more than at the last retraining. Replaced rows are not
            new ones.
        min_pause_hours: Hours since the start of the last retraining.
    """
    show_log_lines()
    try:
        retraining = Retraining(load_config(config, overrides), run=str(runtime.flow_run.id or ""))
        decision = retraining.check(min_new_rows=min_new_rows, min_pause_hours=min_pause_hours)
    except Exception as error:  # here, because the pipeline's own flow sends its failures
        notify(f"{runtime.flow_run.name} failed", f"{type(error).__name__}: {error}")
        raise
    return retrain_if_due(retraining, decision, lambda: rlhf(config=config, overrides=overrides))


def retrain_if_due(
    retraining: Retraining, decision: RetrainingDecision, pipeline: Callable[[], dict[str, Any]]
) -> State[Any]:
    """Call `pipeline` if `decision` says so, and have `retraining` record its start and end.

    Return the last state of the flow run. Its message has the result in one line.
    """
    if not decision.due:
        return Completed(name=decision.name, message=decision.message)
    # Without the record, the next check would start the same retraining again, without a pause.
    if not retraining.record_start():
        return Completed(name="Waiting", message="MLflow has not recorded the start of the retraining")
    log.info("training begins: %s", decision.message)
    publish_reason(decision.message)
    summary = pipeline()
    retraining.record_end(summary["weights_sha256"])
    return Completed(message=verdict(summary), data=summary)
