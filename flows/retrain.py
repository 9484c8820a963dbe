"""Retraining on a schedule: the pipeline again, if what goes into it has changed."""

from __future__ import annotations

import logging
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.rlhf import File, Override, rlhf, run_name
from rlhf_core.config.keys import pipeline_key
from rlhf_core.config.load import load_config
from rlhf_core.run.external_inputs import external_digests
from rlhf_core.run.parameters import DEFAULT_CONFIG
from rlhf_core.system.files import read_json
from rlhf_core.system.home import Home
from rlhf_core.tracking.tracker import open_tracking

log = logging.getLogger(__name__)


@flow(name="rlhf-retrain", flow_run_name=run_name, persist_result=False)
def retrain(
    config: File = DEFAULT_CONFIG, overrides: tuple[Override, ...] = ()
) -> dict[str, Any] | State[Any]:
    """Run the pipeline if its data, base model, reward code or configuration differ from every finished
    run's.

    Args:
        config: YAML file, as the worker sees it.
        overrides: Other fields, each as `section.field=value`.
    """
    settings = load_config(config, overrides)
    key = pipeline_key(settings, external_digests(settings))
    finished = finished_run(Home.of(settings.run.home), key)
    if finished and not open_tracking(settings).is_missing(
        settings.registered_model, finished["weights_sha256"]
    ):
        return Completed(name="Unchanged", message=f"nothing has changed since {finished['run']}")
    return rlhf(config=config, overrides=overrides)


def finished_run(home: Home, key: str) -> dict[str, Any] | None:
    """Summary of the run that finished all stages with this pipeline key, if there is one."""
    for path in sorted(home.summaries()):
        summary = read_json(path) or {}
        if summary.get("pipeline_key") == key and "register" in summary.get("stages", {}):
            return summary
    return None
