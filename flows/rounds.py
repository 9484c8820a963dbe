"""Several rounds: each one is a run of the pipeline with the samples of the rounds before."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.notify import notify_failure
from flows.rlhf import File, Override, rlhf, run_name
from rlhf_core.config.base import PositiveInt
from rlhf_core.config.load import load_config
from rlhf_core.run.parameters import DEFAULT_CONFIG
from rlhf_core.run.rounds import pinned_rounds, round_overrides


# The flow of each round sends its own failures, so `on_failure` is not set.
@flow(name="rlhf-rounds", flow_run_name=run_name, persist_result=False, on_crashed=[notify_failure])
def rounds(
    config: File = DEFAULT_CONFIG,
    number: PositiveInt = 2,
    overrides: tuple[Override, ...] = (),
) -> list[dict[str, Any]]:
    """Run the pipeline several times. The best answers of each policy, and its pairs of best and worst
    answers, are data of the next round. Finished rounds are reused, an interrupted one is continued.

    Args:
        config: YAML file, as the worker sees it.
        number: Number of rounds.
        overrides: Other fields, each as `section.field=value`.
    """
    first = load_config(config, overrides)
    summaries: list[dict[str, Any]] = []
    with pinned_rounds(first) as pins:
        for _ in range(number):
            own = round_overrides(first, summaries)
            summaries.append(rlhf(config=config, overrides=(*overrides, *pins, *own)))
    return summaries
