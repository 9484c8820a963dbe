"""Several rounds: each one is a run of the pipeline with the samples of the rounds before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.notify import notify, notify_failure
from flows.pages import publish_process
from flows.rlhf import File, Override, rlhf, run_name
from rlhf_core.config.base import PositiveInt
from rlhf_core.config.load import DEFAULT_CONFIG, load_config
from rlhf_core.ops.rounds import Rounds, each_round
from rlhf_core.pipeline import END_OF_ROUND, EndOfRound


@flow(name="rlhf-rounds", flow_run_name=run_name, persist_result=False, on_crashed=[notify_failure])
def rounds(
    config: File = DEFAULT_CONFIG,
    number: PositiveInt = 2,
    overrides: tuple[Override, ...] = (),
    until: EndOfRound = END_OF_ROUND,
) -> Rounds | State[Rounds]:
    """Run the pipeline several times. The best answers of each policy, and its pairs of best and worst
    answers, are data of the next round. Finished rounds are reused, an interrupted one is continued. With
    `sample.judge: people` it ends when votes are needed; start it again when they are recorded.

    Args:
        config: YAML file, as the worker sees it.
        number: Number of rounds.
        overrides: Other fields, each as `section.field=value`.
        until: Last stage of each round.
    """
    publish_process()
    return end_of_rounds(run_rounds_with(rlhf, config, number, overrides, until))


def run_rounds_with(
    pipeline: Callable[..., dict[str, Any]],
    config: str,
    number: int,
    overrides: tuple[str, ...],
    until: EndOfRound = END_OF_ROUND,
) -> Rounds:
    """Call `pipeline` once per round, until votes of people are needed. These, and an error outside a round,
    are a notification.

    Args:
        pipeline: The flow of a round.
        config: YAML file.
        number: Number of rounds.
        overrides: Other fields, each as `section.field=value`.
        until: Last stage of each round.
    """
    in_round = False

    def run_round(own: Sequence[str]) -> dict[str, Any]:
        nonlocal in_round
        in_round = True
        summary = pipeline(config=config, overrides=(*overrides, *own), until=until)
        in_round = False
        return summary

    try:
        done = each_round(load_config(config, overrides), number, run_round)
    except Exception as error:
        if not in_round:  # the flow of a round sends its own failure
            notify(f"{runtime.flow_run.name} failed", f"{type(error).__name__}: {error}")
        raise
    if done.votes_needed is not None:
        notify(f"{runtime.flow_run.name} needs votes", done.votes_needed)
    return done


def end_of_rounds(done: Rounds) -> Rounds | State[Rounds]:
    """Return the result of the flow, or its last state if votes are needed: `Votes needed`, with the text."""
    if done.votes_needed is None:
        return done
    return Completed(name="Votes needed", message=done.votes_needed, data=done)
