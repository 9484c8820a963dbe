"""Section `sample`: answers of the policy to training prompts, as the data of a next round."""

from __future__ import annotations

from typing import Literal

from rlhf_core.config.base import (
    TEMPERATURE,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    result,
)

SampledStage = Literal["ppo", "dpo", "sft"]
"""The stages whose model can answer."""


class SampleConfig(Section):
    """Several answers of the policy to each training prompt: the best ones as demonstrations, the best and
    the worst one as pairs.
    """

    answers: PositiveInt = result(4, within=Range(2, 1024, "a pair needs two, and all are held in memory"))
    """Answers to each prompt"""
    policy: SampledStage = result("ppo", later=True)
    """The stage whose model answers: `ppo` or `dpo`, if it is enabled, or `sft` for the SFT model alone. With
    `dpo` and `sft`, a run that ends at `sample` (`--until`) leaves PPO out
    """
    prompts: PositiveInt | None = result(None)
    """Training prompts, at equal distances; null or more than there are: all"""
    temperature: PositiveFloat | None = result(None, within=TEMPERATURE)
    """Sampling temperature; null: ppo.temperature"""
    judge: Literal["reward", "judge_model", "language_model", "people"] = result("reward")
    """Who scores the answers. `reward`: the rewards of PPO, with their weights; `judge_model`: the second
    reward model (`reward.judge`); `language_model`: `evaluate.language_model` compares each answer with the
    first one to the same prompt; `people`: nobody in the stage, and `rlhf rounds` waits for
    [votes](rounds.md#labels-of-people)
    """
    min_score: FiniteFloat | None = result(None)
    """The best answer to a prompt is no demonstration if its score is lower, for example 1 with a reward of 0
    or 1, or with a language model, for which 1 is a win; null: it always is
    """
