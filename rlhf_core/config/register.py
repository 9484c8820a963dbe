"""Section `register`: the registry, and the rules of promotion."""

from __future__ import annotations

from typing import Literal, get_args

from rlhf_core.config.base import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    Range,
    Section,
    UserPath,
    content,
    result,
)

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
