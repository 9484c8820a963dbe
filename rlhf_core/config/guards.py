"""`ppo.guards` and `ppo.guard_limits`: conditions that indicate a failing training run (docs/guards.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from rlhf_core.config.base import NonNegativeFloat

GuardName = Literal[
    "eos_loss",
    "entropy_collapse",
    "entropy_explosion",
    "negative_kl",
    "length_drift",
    "loops",
    "score_length",
    "blind_critic",
    "score_clip",
    "overoptimization",
]
GuardAction = Literal["warn", "stop", "off"]
"""`warn`: log, metric and tag. `stop`: the stage also ends. `off`: the condition is not checked."""


class GuardLimit(NamedTuple):
    """The limit of a guard: its default, and the values that it must be above and below."""

    default: float
    above: float = 0.0
    below: float = math.inf
    reason: str = ""
    """Why a value outside makes no sense."""


_UNCHANGED = ", because an unchanged policy would raise the guard otherwise"
LIMITS: dict[GuardName, GuardLimit] = {
    # A multiple of the initial value: the share of responses with EOS, the entropy, the mean length.
    "eos_loss": GuardLimit(0.5, below=1, reason=_UNCHANGED),
    "entropy_collapse": GuardLimit(0.1, below=1, reason=_UNCHANGED),
    "entropy_explosion": GuardLimit(3.0, above=1, reason=_UNCHANGED),
    "length_drift": GuardLimit(2.0, above=1, reason=_UNCHANGED),
    # Nats per response below 0, as in TRL's warning.
    "negative_kl": GuardLimit(1.0),
    # A share of the responses, and of the scores.
    "loops": GuardLimit(0.2, below=1),
    "score_clip": GuardLimit(0.01, below=1),
    # A Pearson correlation of either sign.
    "score_length": GuardLimit(0.9, below=1),
    # Consecutive steps, in place of `ppo.guard_patience`.
    "blind_critic": GuardLimit(20),
    # A multiple of the correlation over the SFT model's responses.
    "overoptimization": GuardLimit(0.65, below=1),
}


def _check_limits(limits: dict[GuardName, float]) -> dict[GuardName, float]:
    for name, value in limits.items():
        default, above, below, reason = LIMITS[name]
        if not above < value < below:
            rule = f"above {above:g}" if value <= above else f"below {below:g}"
            raise ValueError(
                f"ppo.guard_limits.{name} must be {rule}{reason}; got {value:g}; leave it out ({default:g})"
            )
    return limits


GuardLimits = Annotated[dict[GuardName, NonNegativeFloat], AfterValidator(_check_limits)]


def guard_limit(limits: Mapping[GuardName, float], name: GuardName) -> float:
    """Return the limit of a guard in `ppo.guard_limits`, or its default."""
    return limits.get(name, LIMITS[name].default)
