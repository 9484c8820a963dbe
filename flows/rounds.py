"""Several rounds: each one is a run of the pipeline with the samples of the rounds before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import flow, runtime

from flows.notify import notify, notify_failure
from flows.rlhf import File, Override, rlhf, run_name
from rlhf_core.config.base import PositiveInt
from rlhf_core.config.load import load_config
from rlhf_core.run.parameters import DEFAULT_CONFIG
from rlhf_core.run.rounds import pinned_rounds, round_overrides


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
    return run_rounds_with(rlhf, config, number, overrides)


def run_rounds_with(
    pipeline: Callable[..., dict[str, Any]], config: str, number: int, overrides: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Call `pipeline` once per round and return the summaries. An error outside a round is a notification."""
    summaries: list[dict[str, Any]] = []
    in_round = False
    try:
        first = load_config(config, overrides)
        with pinned_rounds(first) as pins:
            for _ in range(number):
                own = round_overrides(first, summaries)
                in_round = True
                summaries.append(pipeline(config=config, overrides=(*overrides, *pins, *own)))
                in_round = False
    except Exception as error:
        if not in_round:  # the flow of a round sends its own failure
            notify(f"{runtime.flow_run.name} failed", f"{type(error).__name__}: {error}")
        raise
    return summaries
