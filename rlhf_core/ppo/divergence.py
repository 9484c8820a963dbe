"""Whether PPO over-optimises the reward model (Gao et al. 2022, Scaling Laws for Reward Model
Overoptimization): an independent reward model, the judge, does not agree with it any more, and the policy
still moves away.

    scores of the responses to the held-out prompts: judge's = intercept + slope x reward model's
    agreement    the slope of the present version, compared with that of the SFT model's responses
    movement     the rise of the square root of the KL per step since the last evaluation, compared with its
                 mean over all steps so far

A policy that is tilted further towards the reward model, p(y) exp(t r(y)), changes the mean score of the
judge by Cov(judge, r) for each unit of t, and that of the reward model by Var(r). So the slope, which is the
ratio of both, is the rise of the judge's score for each unit of the reward model's that more training brings.
It falls before the judge's mean does, and one evaluation measures it, where a difference of two means has the
noise of both. The slope also falls in a sound run, after the policy has learned what both models agree on.
But there the KL penalty holds the policy, and it moves more slowly than before.

Both scores are those of one reward model each, normalised in the same way, without weights and penalties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Evaluations = Mapping[int, Mapping[str, float]]
"""Metrics `eval/...` by policy version, in order."""

SCORE, KL = "eval/score", "eval/kl"
SLOPE, SLOPE_ERROR = "eval/judge_slope", "eval/judge_slope_error"


@dataclass(frozen=True)
class Divergence:
    """Reward model and judge do not agree on the responses of a policy that still moves."""

    version: int
    """Version of the last evaluation."""
    slope: float
    """Of its responses."""
    initial: float
    """Of the SFT model's responses."""
    kl: float
    """Of the version, in nats per response."""


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
    """Return what the last evaluation shows, or None if it shows no over-optimisation.

    Its slope must be below `ratio` times that of the SFT model's responses by more than one standard error,
    and the policy must not move more slowly than before. None also without a reward model or judge, and if
    the two do not agree on the SFT model's responses either.
    """
    if len(evaluations) < 2:
        return None
    first, *_, last = sorted(evaluations)
    initial, initial_error = _slope(evaluations[first])
    slope, error = _slope(evaluations[last])
    # Comparisons with NaN, of an evaluation without one of the models, are false.
    agreed = initial > 2 * initial_error
    if agreed and slope + error < ratio * initial and _moves(evaluations):
        return Divergence(last, slope, initial, evaluations[last][KL])
    return None


def _slope(found: Mapping[str, float]) -> tuple[float, float]:
    return found.get(SLOPE, math.nan), found.get(SLOPE_ERROR, math.nan)


def _moves(evaluations: Evaluations) -> bool:
    """Return whether the square root of the KL has risen per step since the last evaluation as much as in the
    mean of all steps.
    """
    *_, before, last = sorted(evaluations)
    distance = {version: math.sqrt(max(evaluations[version].get(KL, 0.0), 0.0)) for version in (before, last)}
    speed = (distance[last] - distance[before]) / (last - before)
    return speed >= distance[last] / last > 0


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
