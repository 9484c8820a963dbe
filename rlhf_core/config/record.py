"""Section `record`: what is kept of the rollouts of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.base import Section, execution

RecordLevel = Literal["none", "rewards", "logprobs", "all"]
"""Each level has what the ones before it have."""


class RecordConfig(Section):
    """The record of rollouts."""

    level: RecordLevel = execution("logprobs")
    """What is [recorded](record.md) of each response of PPO: `rewards` (tokens and rewards), `logprobs`
    (also log-probabilities of engine, policy and reference, and values), `all` (also advantages, returns, and
    log-probabilities after the update, for which the policy computes each batch once more) or `none`. Answers
    of `sample`, of the evaluation and of the match have the columns of `rewards`, unless it is `none`
    """
    max_bytes: Annotated[int, Field(ge=1, le=10**15)] = execution(20 * 10**9)
    """Size of the record, in bytes before compression. Nothing is recorded from the step on that would exceed
    it
    """
