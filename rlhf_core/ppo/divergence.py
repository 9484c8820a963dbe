"""Whether the reward model that PPO maximises still agrees with an independent one, the judge. If it does
not, the policy is over-optimised (Gao et al. 2022, Scaling Laws for Reward Model Overoptimization).

    scores of the responses to the held-out prompts: judge's = intercept + slope x reward model's
    -> the slope of the present version, compared with that of the SFT model's responses

A policy that is tilted further towards the reward model, p(y) exp(t r(y)), changes the mean score of the
judge by Cov(judge, r) for each unit of t, and that of the reward model by Var(r). So the slope, which is the
ratio of both, is the rise of the judge's score for each unit of the reward model's that more training brings.
It falls before the judge's mean does, and one evaluation measures it, where a difference of two means has the
noise of both.

Both scores are those of one reward model each, normalised in the same way, without weights and penalties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Evaluations = Mapping[int, Mapping[str, float]]
"""Metrics `eval/...` by policy version, in order."""

SCORE = "eval/score"
SLOPE, SLOPE_ERROR = "eval/judge_slope", "eval/judge_slope_error"


@dataclass(frozen=True)
class Divergence:
    """A slope that has fallen too far."""

    version: int
    """Version of the last evaluation."""
    slope: float
    """Of its responses."""
    initial: float
    """Of the SFT model's responses."""


def regression_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the least-squares line of `y` over `x` and its standard error, which does not
    assume equal variances (White 1980). Points with a NaN are left out. NaN with fewer than three points or
    equal `x`.
    """
    points = np.asarray([x, y], dtype=np.float64)
    x_n, y_n = points[:, np.isfinite(points).all(axis=0)]
    if len(x_n) < 3:
        return math.nan, math.nan
    deviation = x_n - x_n.mean()
    spread = float(deviation @ deviation)
    if spread <= 0:
        return math.nan, math.nan
    slope = float(deviation @ (y_n - y_n.mean())) / spread
    residual = y_n - y_n.mean() - slope * deviation
    return slope, math.sqrt(float(((deviation * residual) ** 2).sum())) / spread


def divergence(evaluations: Evaluations, ratio: float) -> Divergence | None:
    """Return the slope of the last evaluation if it is below `ratio` times that of the SFT model's responses,
    by more than one standard error. None otherwise, without a reward model or judge, and if the two do not
    agree on the SFT model's responses either.
    """
    if len(evaluations) < 2:
        return None
    first, *_, last = sorted(evaluations)
    initial, initial_error = _slope(evaluations[first])
    slope, error = _slope(evaluations[last])
    # Comparisons with NaN, of an evaluation without one of the models, are false.
    if initial > 2 * initial_error and slope + error < ratio * initial:
        return Divergence(last, slope, initial)
    return None


def _slope(found: Mapping[str, float]) -> tuple[float, float]:
    return found.get(SLOPE, math.nan), found.get(SLOPE_ERROR, math.nan)


def in_words(evaluations: Evaluations, measure: str, label: str) -> str:
    """Describe what `measure` did between its highest value and the last evaluation, compared with the
    training score; an empty text if it is not known. `label` names the measure.
    """
    known = [version for version, found in evaluations.items() if measure in found and SCORE in found]
    if len(known) < 2:
        return ""
    best, last = max(known, key=lambda version: (evaluations[version][measure], -version)), known[-1]
    if best == last:
        return f"{label} is highest in the last evaluation (step {last})."
    change = evaluations[last][measure] - evaluations[best][measure]
    score = evaluations[last][SCORE] - evaluations[best][SCORE]
    text = f"From step {best} to step {last}, {label[0].lower()}{label[1:]} falls by {-change:.2f}"
    if score > 0:
        return f"{text} while the training score rises by {score:.2f}: the policy is over-optimised there."
    return f"{text}, and the training score by {-score:.2f}."
