"""Section `evaluate`: prompts, judges and regression sets of the evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from rlhf_core.config.base import (
    RANKS,
    TEMPERATURE,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    execution,
    result,
)
from rlhf_core.config.language_model import LanguageModelConfig
from rlhf_core.config.regression import RegressionSet


class EvaluateConfig(Section):
    """The policy against the SFT model on held-out prompts."""

    prompts: PositiveInt = result(
        128,
        "Held-out prompts, or all if there are fewer. Those that choose PPO's policy are left out if at least"
        " 50 others remain. The default on GPUs is 384: those of `data.max_eval` that are not"
        " `ppo.evaluate_prompts`",
    )
    answers_per_prompt: PositiveInt = result(
        1,
        "Answers of each model to each held-out prompt, in the evaluation and in the match. The outcomes of a"
        " prompt are averaged, so that a small difference needs fewer prompts"
        " ([promotion](promotion.md#how-many-prompts))",
        within=Range(1, 64, "more answers hardly change the mean of a prompt"),
        later=True,
    )
    temperature: PositiveFloat | None = result(
        None,
        "Sampling temperature of both models; null: ppo.temperature",
        within=TEMPERATURE,
    )
    bootstrap: PositiveInt = result(
        2000,
        "Resamples for the confidence intervals",
        within=Range(1, 200_000, "intervals no longer change, and each resample is held in memory"),
    )
    confidence: PositiveFloat = result(
        0.95,
        "Level of the intervals",
        within=Range(0.5, 0.999, "no interval has the level 1, and levels below 0.5 are not useful"),
    )
    judge: Literal["auto", "language_model", "gold", "judge_model", "reward_model", "rules"] = result(
        "auto",
        "The judge of a win. `auto`: the language model if there is one, else the true reward if there is"
        " one, else the second reward model (`reward.judge`), else the reward model, else the rules",
    )
    language_model: LanguageModelConfig | None = result(
        None,
        "A language model that judges the evaluation and the match; null: none",
        later=True,
    )
    samples: PositiveInt = result(
        20,
        "Sample pairs in the table and report",
        within=Range(1, 10_000, "rows of one table"),
    )
    chosen: bool = result(
        True,
        "Compare both models also with the `chosen` answers of held-out pairs, at most `prompts`; needs a"
        " judge that is no rule",
        later=True,
    )
    regression: tuple[RegressionSet, ...] = result(
        (),
        "Prompts on which the policy must not be worse than the SFT model, and in a match than the champion:"
        " otherwise it is not promoted ([promotion](promotion.md#regression-sets))",
        max_length=16,
        later=True,
    )
    ranks: PositiveInt = execution(
        1,
        "Ranks that compute log-probabilities and scores of the reward model, in the evaluation and in the"
        " match (one GPU each where there are GPUs). A model that was trained with ZeRO-3 is sharded over"
        " them; otherwise each has a copy",
        within=RANKS,
    )
    engines: PositiveInt = execution(
        1,
        "Engines that sample at the same time, in the evaluation and in the match, with"
        " `ppo.engine.tensor_parallel` GPUs each",
        within=RANKS,
    )

    @field_validator("regression")
    @classmethod
    def _check_names(cls, sets: tuple[RegressionSet, ...]) -> tuple[RegressionSet, ...]:
        names = [each.name for each in sets]
        if len(set(names)) < len(names):
            raise ValueError(f"evaluate.regression needs distinct names; got {', '.join(names)}")
        return sets
