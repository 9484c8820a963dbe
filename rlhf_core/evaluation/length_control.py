"""The win rate that two models would have with responses of equal length (Dubois et al. 2024,
Length-Controlled AlpacaEval).

    P(win) = sigmoid(a + b tanh(d / s))      d: difference of lengths in tokens, s: its standard deviation

The result is sigmoid(a), the prediction for d = 0. If the mean of d is more than 2 s away from 0, hardly any
response is as long as the other model's: the data do not identify the result, which is close to the plain win
rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from rlhf_core.algo.groups import effective_count
from rlhf_core.evaluation.statistics import Interval

_ITERATIONS = 50
_LIMIT = 30.0
"""Largest logit for which the sigmoid is computed."""


@dataclass(frozen=True)
class LengthControlled(Interval):
    """A length-controlled win rate."""

    identified: bool = True
    """Whether the data have responses of about equal length."""

    def to_json(self) -> dict[str, float]:
        """Return the interval, and if the rate is not identified also `identified`, which is 0."""
        found = {"mean": self.mean, "low": self.low, "high": self.high}
        return found if self.identified else found | {"identified": 0.0}


def length_controlled(
    preferences: Sequence[float],
    differences: Sequence[float],
    confidence: float,
    groups: Sequence[str] | None = None,
) -> LengthControlled:
    """Return the length-controlled win rate and its Wald interval on the scale of logits. With groups, the
    standard error is that of the effective number of residuals.

    The maximum of the likelihood is found by Newton's method. Two additional ties, at the differences s and
    -s, keep it finite if one model wins all prompts or if the length alone decides.

    Args:
        preferences: (n,) 1 for a win, 0.5 for a tie, 0 for a loss. n is at least 1.
        differences: (n,) tokens of the response minus those of the other model's response.
        confidence: Level of the interval, in [0, 1].
        groups: (n,) group of each value; None: each value is its own.
    """
    d = np.asarray(differences, dtype=np.float64)
    scale = float(d.std()) or 1.0  # 0 if all differences are equal
    x = np.tanh(np.concatenate([d, [scale, -scale]]) / scale)
    y = np.concatenate([np.asarray(preferences, dtype=np.float64), [0.5, 0.5]])
    features = np.stack([np.ones_like(x), x], axis=1)
    weights = np.zeros(2)
    for _ in range(_ITERATIONS):
        p = _sigmoid(features @ weights)
        hessian = features.T @ (features * (p * (1 - p))[:, None])
        step = np.linalg.solve(hessian, features.T @ (y - p))
        weights += np.clip(step, -1.0, 1.0)  # the first steps of separable data are too long
        if np.abs(step).max() < 1e-10:
            break
    p = _sigmoid(features @ weights)
    hessian = features.T @ (features * (p * (1 - p))[:, None])
    error = math.sqrt(np.linalg.inv(hessian)[0, 0])
    residuals = (y - p)[: d.size].tolist()
    error *= math.sqrt(d.size / effective_count(residuals, groups, confidence))
    half = NormalDist().inv_cdf((1 + confidence) / 2) * error
    mean, low, high = (float(_sigmoid(weights[0] + shift)) for shift in (0.0, -half, half))
    return LengthControlled(mean, low, high, identified=abs(float(d.mean())) <= 2 * float(d.std()))


def _sigmoid(logits: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-np.clip(logits, -_LIMIT, _LIMIT)))
