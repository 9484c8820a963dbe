"""Section `ppo.guards`: conditions that indicate a failing training run, and the action for each of them."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator

from rlhf_core.config.base import Fraction, PositiveFloat, PositiveInt, Range, Section, execution

GuardAction = Literal["warn", "stop", "off"]
"""`warn`: log, metric and tag. `stop`: the stage also ends. `off`: the condition is not checked."""


class GuardsConfig(Section):
    """Conditions that indicate a failing training run, checked in the rollouts of every step: `warn`, `stop`
    (the stage ends) or `off`.

    The initial value of a metric is that of the first step, whose responses are sampled from the SFT model.
    See docs/guards.md.
    """

    patience: PositiveInt = execution(3, "Number of consecutive steps for which a condition must hold")
    eos_loss: GuardAction = execution("warn", "Responses no longer end with EOS")
    eos_loss_ratio: Fraction = execution(
        0.5,
        "Raised below this multiple of the initial share of responses with EOS",
    )
    entropy_collapse: GuardAction = execution("warn", "The policy has become nearly deterministic")
    entropy_collapse_ratio: Fraction = execution(
        0.1,
        "Raised below this multiple of the initial entropy per token",
    )
    entropy_explosion: GuardAction = execution("warn", "The policy has become nearly random")
    entropy_explosion_ratio: PositiveFloat = execution(
        3.0,
        "Raised above this multiple of the initial entropy per token",
    )
    negative_kl: GuardAction = execution(
        "warn",
        "The KL is negative, so the responses are not samples of the trained policy",
    )
    negative_kl_limit: PositiveFloat = execution(
        1.0,
        "Raised if the KL is below minus this value, in nats per response (1 as in TRL's warning)",
    )
    length_drift: GuardAction = execution("warn", "Responses are much longer or shorter than initially")
    length_drift_ratio: PositiveFloat = execution(
        2.0,
        "Raised above this multiple of the initial mean length, or below its inverse",
    )
    loops: GuardAction = execution("warn", "Responses repeat a piece of text of any length several times")
    loops_share: PositiveFloat = execution(
        0.2,
        "Raised at this share of responses or more",
        within=Range(0.001, 1, "a share of the responses"),
    )
    score_length: GuardAction = execution("warn", "The score mostly depends on the length of the response")
    score_length_correlation: PositiveFloat = execution(
        0.9,
        "Raised at this Pearson correlation over the batch or more, of either sign",
        within=Range(0.01, 1, "smaller correlations occur by chance"),
    )
    blind_critic: GuardAction = execution("warn", "The critic does not predict the returns")
    blind_critic_steps: PositiveInt = execution(
        20,
        "Number of consecutive steps with an explained variance of 0 or less after the critic's warm-up;"
        " replaces `patience`",
    )
    score_clip: GuardAction = execution("warn", "Scores of the reward model are clipped (`ppo.score_clip`)")
    score_clip_share: Fraction = execution(0.01, "Raised above this share of the scores")
    overoptimization: GuardAction = execution(
        "warn",
        "On the held-out prompts, the scores of the reward model and the judge (`reward.judge`) no longer"
        " agree, and the policy still moves away from the SFT model, in two consecutive evaluations",
    )
    overoptimization_ratio: Fraction = execution(
        0.65,
        "Raised if the correlation of both scores is below this multiple of that over the SFT model's"
        " responses",
    )

    @field_validator("entropy_explosion_ratio", "length_drift_ratio")
    @classmethod
    def _check_above_one(cls, ratio: float, info: ValidationInfo) -> float:
        if ratio <= 1:
            raise ValueError(cls._unchanged_policy_message(info, "above", ratio))
        return ratio

    @field_validator("eos_loss_ratio", "entropy_collapse_ratio")
    @classmethod
    def _check_below_one(cls, ratio: float, info: ValidationInfo) -> float:
        if ratio >= 1:
            raise ValueError(cls._unchanged_policy_message(info, "below", ratio))
        return ratio

    @classmethod
    def _unchanged_policy_message(cls, info: ValidationInfo, side: str, ratio: float) -> str:
        assert info.field_name is not None
        default = cls.model_fields[info.field_name].default
        return (
            f"ppo.guards.{info.field_name} must be {side} 1, because an unchanged policy would raise the"
            f" guard otherwise; got {ratio:g}; leave it out ({default:g})"
        )
