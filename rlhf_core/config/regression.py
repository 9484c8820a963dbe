"""The items of `evaluate.regression`: prompts on which a new policy must not be worse."""

from __future__ import annotations

import math
from typing import Self

from pydantic import model_validator

from rlhf_core.config.base import PositiveFloat, Range, result
from rlhf_core.config.data import Source
from rlhf_core.config.rewards import AnyReward, ModelReward


class RegressionSet(Source):
    """Prompts with the reward source that scores their answers."""

    name: str = result(
        ...,
        "Name in results and reasons",
        pattern=r"^[a-z0-9_]{1,32}$",
        form="1 to 32 of a-z, 0-9 and `_`",
    )
    reward: AnyReward = result(
        ...,
        "Scores the answers: an item as in `ppo.rewards`, not of type `model`. Raw values are compared",
    )
    margin: PositiveFloat = result(
        0.02,
        "The set fails unless the lower bound of the mean difference, paired by prompt, is above -margin",
        within=Range(1e-6, 1e6, "with 0, a policy that is equally good fails half of the time"),
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.path == "synthetic":
            raise ValueError(
                "path: `synthetic` makes the prompts of training; got it for a regression set; give a file"
            )
        if isinstance(self.reward, ModelReward):
            raise ValueError(
                "reward.type: model is the reward model of the run, which judges no regression set; use"
                " another type, such as answer or python"
            )
        if getattr(self.reward, "on_error", "abort") != "abort":
            raise ValueError(
                "reward.on_error: mask would leave responses out of the comparison with a regression set; use"
                " abort"
            )
        if self.reward.weight != 1.0 or self.reward.normalize != "none":
            raise ValueError(
                "reward: a regression set compares raw values, so weight and normalize have no effect; leave"
                " them out"
            )
        return self


def prompts_for_margin(margin: float, confidence: float) -> int:
    """Return the least number of prompts of a set of right or wrong answers.

    A policy that loses a share `margin` of such answers loses none of n prompts with a probability of
    (1 - margin)^n <= exp(-margin n). The interval then has no width, and the set passes. With
    n = ln(2 / (1 - confidence)) / margin this probability is (1 - confidence) / 2, that of the lower bound.
    For a confidence of 0.95, n is 3.7 / margin.
    """
    return math.ceil(math.log(2 / (1 - confidence)) / margin)
