"""The win rate that two models would have with responses of equal length (Dubois et al. 2024,
Length-Controlled AlpacaEval).

    P(win) = sigmoid(a + b tanh(d / s))      d: difference of lengths in tokens, s: its standard deviation

The result is sigmoid(a), the prediction for d = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from rlhf_core.evaluation.statistics import Interval

_ITERATIONS = 50
_LIMIT = 30.0
"""Largest logit for which the sigmoid is computed."""


def length_controlled(
    preferences: Sequence[float], differences: Sequence[float], confidence: float
) -> Interval:
    """Return the length-controlled win rate and its Wald interval on the scale of logits.

    The maximum of the likelihood is found by Newton's method. Two additional ties, at the differences s and
    -s, keep it finite if one model wins all prompts or if the length alone decides.

    Args:
        preferences: (n,) 1 for a win, 0.5 for a tie, 0 for a loss. n is at least 1.
        differences: (n,) tokens of the response minus those of the other model's response.
        confidence: Level of the interval, in [0, 1].
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
    half = NormalDist().inv_cdf((1 + confidence) / 2) * error
    mean, low, high = (float(_sigmoid(weights[0] + shift)) for shift in (0.0, -half, half))
    return Interval(mean, low, high)


def _sigmoid(logits: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-np.clip(logits, -_LIMIT, _LIMIT)))
