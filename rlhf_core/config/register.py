"""Sections `sample` and `register`: answers of the policy as the data of a next round, the registry, and the
rules of promotion.
"""

from __future__ import annotations

from typing import Literal, get_args

from rlhf_core.config.base import (
    TEMPERATURE,
    FiniteFloat,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    UserPath,
    content,
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


PolicyStage = Literal["ppo", "dpo"]
"""The stages whose policy can be registered."""
POLICIES: tuple[PolicyStage, ...] = get_args(PolicyStage)


class RegisterConfig(Section):
    """The MLflow registry."""

    model: str | None = result(
        None, pattern=r"^[\w.-]{1,100}$", form="1 to 100 letters, digits, `.`, `_` and `-`"
    )
    """Registered name; default `{run.name}-policy`"""
    policy: PolicyStage = result("ppo", later=True)
    """The stage whose policy is registered, evaluated and matched with the champion. With `dpo`
    ([promotion](promotion.md#the-policy-of-dpo)) PPO is trained too, if it is enabled, and the report
    compares both
    """
    min_win_rate: Fraction = result(0.5)
    """Against SFT; below this value the alias `champion` is not set"""
    min_prompts: NonNegativeInt = result(50)
    """A match or evaluation with fewer prompts does not set the alias `champion`"""
    alpha: PositiveFloat = result(
        0.05, within=Range(1e-6, 0.5, "0 allows no champion, and above 0.5 chance decides")
    )
    """Maximum probability that, within 365 days, any candidate that is not better than the champion replaces
    it ([promotion](promotion.md)); while there is no champion, the k-th test has the level alpha / (k (k +
    1)), in addition to the budget of the year
    """
    votes: tuple[UserPath, ...] = content(())
    """Files of [votes](promotion.md#votes-of-people) about this policy and its SFT model, or about this
    policy and the champion
    """
    votes_margin: PositiveFloat | None = result(
        None, within=Range(0.001, 0.5, "with 0.5 only the loss of every pair refuses"), later=True
    )
    """The alias `champion` is not set unless people voted (`votes`) and the lower bound of the policy's win
    rate by their votes is above 0.5 - this; null: votes are only shown
    """
    independent_judge: bool = result(False, later=True)
    """The alias `champion` is not set if the policy was trained on the judge of its evaluation, whose win
    rate rises under over-optimisation
    """
