"""Whether PPO over-optimises the reward model (Gao et al. 2022, Scaling Laws for Reward Model
Overoptimization): an independent reward model, the judge, does not agree with it any more, and the policy
still moves away.

    agreement    the correlation of both scores over the responses to the held-out prompts, compared with that
                 over the SFT model's responses
    movement     the rise of the square root of the KL per step since the last evaluation, compared with its
                 mean over all steps so far. The KL is that above the SFT model's, which is rounding

A policy that is tilted further towards the reward model, p(y) exp(t r(y)), changes the mean score of the
judge by Cov(judge, r) for each unit of t, and that of the reward model by Var(r). So the correlation is the
rise of the judge's mean for each rise of the reward model's mean that more training brings, both in standard
deviations. It falls before the judge's mean does, and one evaluation measures it, where a difference of two
means has the noise of both. It also falls in a sound run, after the policy has learned what both models agree
on. But there the KL penalty holds the policy, and it moves more slowly than before. Both conditions must
hold in two consecutive evaluations, because the KL between two of them is noisy.

Both scores are those of one reward model each, normalised in the same way, without weights and penalties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_core.algo.groups import effective_count

Evaluations = Mapping[int, Mapping[str, float]]
"""Metrics `eval/...` by policy version, in order."""

SCORE, KL = "eval/score", "eval/kl"
CORRELATION, CORRELATION_ERROR = "eval/judge_correlation", "eval/judge_correlation_error"
_SAME_SPEED = 0.95
"""A policy of this share of the mean speed has not become slower; the rest is noise of the KL."""


@dataclass(frozen=True)
class Divergence:
    """Reward model and judge do not agree on the responses of a policy that still moves."""

    version: int
    """Version of the last evaluation."""
    correlation: float
    """Over its responses."""
    initial: float
    """Over the SFT model's responses."""
    kl: float
    """KL of the version, in nats per response."""


def correlation(
    x: Sequence[float], y: Sequence[float], groups: Sequence[str] | None = None
) -> tuple[float, float]:
    """Return the Pearson correlation r and its standard error (1 - r^2) / sqrt(n - 1). Points with a NaN are
    left out. NaN with fewer than three points, or if all values of one side are equal.

    With groups of points, the error is that of the effective number of influences u v - r (u^2 + v^2) / 2,
    where u and v are the standardized values: r is their mean to first order.
    """
    points = np.asarray([x, y], dtype=np.float64)
    known = np.isfinite(points).all(axis=0)
    points = points[:, known]
    count = points.shape[1]
    if count < 3 or (np.ptp(points, axis=1) == 0).any():
        return math.nan, math.nan
    value = float(np.corrcoef(points)[0, 1])
    error = (1 - value**2) / math.sqrt(count - 1)
    if groups is None:
        return value, error
    u, v = (points - points.mean(axis=1, keepdims=True)) / points.std(axis=1, keepdims=True)
    influences = (u * v - value * (u**2 + v**2) / 2).tolist()
    return value, error * math.sqrt(count / effective_count(influences, np.asarray(groups)[known].tolist()))


def divergence(evaluations: Evaluations, ratio: float) -> Divergence | None:
    """Return what the last evaluation shows, or None if it or the one before shows no over-optimisation."""
    before = sorted(evaluations)[:-1]
    if divergence_of_last({version: evaluations[version] for version in before}, ratio) is None:
        return None
    return divergence_of_last(evaluations, ratio)


def divergence_of_last(evaluations: Evaluations, ratio: float) -> Divergence | None:
    """Return what the last evaluation shows by itself, or None.

    Its correlation must be below `ratio` times that of the SFT model's responses by more than one standard
    error, and the policy must not move more slowly than before. None also without a reward model or judge,
    and if the two do not agree on the SFT model's responses either.
    """
    if len(evaluations) < 2:
        return None
    versions = sorted(evaluations)
    first, last = versions[0], versions[-1]
    initial, initial_error = _correlation(evaluations[first])
    value, error = _correlation(evaluations[last])
    # Comparisons with NaN, of an evaluation without one of the models, are false.
    agreed = initial > 2 * initial_error
    if agreed and value + error < ratio * initial and _moves(evaluations):
        return Divergence(last, value, initial, evaluations[last][KL])
    return None


def _correlation(found: Mapping[str, float]) -> tuple[float, float]:
    return found.get(CORRELATION, math.nan), found.get(CORRELATION_ERROR, math.nan)


def _moves(evaluations: Evaluations) -> bool:
    """Return whether the square root of the KL has risen per step since the last evaluation about as much as
    in the mean of all steps.
    """
    versions = sorted(evaluations)
    first, before, last = versions[0], versions[-2], versions[-1]
    distance = {}
    for version in (before, last):
        kl = evaluations[version].get(KL, math.nan) - evaluations[first].get(KL, math.nan)
        # The KL is an estimate from samples: close to 0 it can be negative.
        distance[version] = math.sqrt(max(kl, 0.0))
    speed = (distance[last] - distance[before]) / (last - before)
    mean = distance[last] / (last - first)
    return mean > 0 and speed >= _SAME_SPEED * mean


def in_words(evaluations: Evaluations, measure: str, label: str) -> str:
    """Describe what `measure` did between its highest value and the last evaluation, compared with the
    training score; an empty text if it is not known. `label` names the measure.

    A fall by at most the standard error of the difference, paired by prompt (`..._change_error`), is none.
    """
    known = [version for version, found in evaluations.items() if measure in found and SCORE in found]
    if len(known) < 2:
        return ""
    best, last = max(known, key=lambda version: (evaluations[version][measure], -version)), known[-1]
    if best == last:
        return f"{label} is highest in the last evaluation (step {last})."
    change = evaluations[last][measure] - evaluations[best][measure]
    score = evaluations[last][SCORE] - evaluations[best][SCORE]
    error = evaluations[last].get(f"{measure}_change_error", 0.0)
    text = f"From step {best} to step {last}, {label[0].lower()}{label[1:]}"
    if -change <= error:
        return f"{text} does not change measurably ({change:+.2f}, standard error {error:.2f})."
    text += f" falls by {-change:.2f}"
    if score > 0:
        return f"{text} while the training score rises by {score:.2f}: the policy is over-optimised there."
    return f"{text}, and the training score by {-score:.2f}."
