"""Estimators of the KL divergence from samples, and controllers of its coefficient.

Axes: B sequences, T response tokens. Estimators are elementwise and take any shape.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.algo.masking import as_float

Estimator = Literal["k1", "abs", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log-ratio that is exponentiated, in nats: far from overflow, and beyond any ratio
that means something."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate of KL(policy || reference) at tokens sampled from the policy, in nats.

    With d = logprobs - ref_logprobs (Schulman 2020, "Approximating KL divergence"):

        k1   d                    unbiased, may be negative
        abs  |d|
        k2   d^2 / 2              biased; its expected gradient is that of the KL
        k3   exp(-d) - 1 + d      unbiased and never negative; d is clamped to [-20, 20] inside exp

    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")
    tensor([0.1250])
    """
    d = as_float(logprobs) - as_float(ref_logprobs)
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        # expm1: exp(-d) - 1 cancels for small d, and in float32 the estimate would come out negative.
        return torch.expm1(-d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + d
    raise ValueError(f"estimator must be one of k1, abs, k2, k3; got {estimator!r}")


class FixedKL:
    """A constant KL coefficient. `coef`: reward per nat.

    >>> FixedKL(0.1).coef
    0.1
    """

    def __init__(self, coef: float) -> None:
        self.coef = float(coef)

    def update(self, kl: float, n_sequences: int) -> None:
        """Do nothing. Both controllers have the same interface."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


class AdaptiveKL:
    """A KL coefficient that is adapted to reach a target.

        coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon

    (Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2.) `coef` starts at
    `init`: reward per nat. `target`: nats per sequence, the unit of `kl`. `horizon`: sequences.

    >>> controller = AdaptiveKL(init=0.1, target=5.0, horizon=1000)
    >>> controller.update(kl=10.0, n_sequences=100)  # twice the target: the change is clipped to 0.2 x 0.1
    >>> round(controller.coef, 4)
    0.102
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        if not target > 0:
            raise ValueError(f"target must be above 0 nats; got {target}")
        if not horizon > 0:
            raise ValueError(f"horizon must be above 0 sequences; got {horizon}")
        self.coef = float(init)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, n_sequences: int) -> None:
        """Move `coef` after `n_sequences` whose mean KL was `kl`: the token SUM of k1 per sequence, in nats.

        A `kl` that is not finite changes nothing. It belongs to a skipped step, and must not enter the
        coefficient and its checkpoints.
        """
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        factor = 1.0 + error * n_sequences / self.horizon
        # `PPOConfig.problems` refuses such a horizon before the run. This is for other callers.
        if factor <= 0:
            raise ValueError(
                f"horizon must be above n_sequences / 5 ({n_sequences / 5:g}), "
                f"or the coefficient turns negative; got {self.horizon:g}; raise it"
            )
        self.coef *= factor

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `coef`; target and horizon belong to the configuration."""
        self.coef = float(state["coef"])
