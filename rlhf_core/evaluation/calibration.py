"""Calibration of the reward model's probabilities, and its length bias. Uses numpy only.

A pair with equal scores counts as half correct in every measure.

Axes: `P` held-out pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BINS = 10
_LENGTH_BUCKETS = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Accuracy by predicted probability, in bins of equal width."""

    error: float
    """Expected calibration error (Guo et al. 2017): the mean over pairs of |accuracy - mean confidence| of
    their bin.
    """
    confidence: list[float]
    """Mean predicted probability of the preferred response of each non-empty bin, 0.5 to 1."""
    accuracy: list[float]
    """Share of pairs of each bin for which the model prefers the chosen response."""
    count: list[int]
    """Number of pairs of each bin."""


def calibration(scores_P2: Any) -> Calibration:
    """Return the calibration of the probabilities sigmoid(chosen - rejected).

    `scores_P2` are raw scores (pairs, 2), with the chosen response first.
    """
    gap_P = _gap(scores_P2)
    confidence_P = 1.0 / (1.0 + np.exp(-np.abs(gap_P)))
    correct_P = _correct(gap_P)
    # A confidence of exactly 1 belongs to the last bin.
    index_P = np.minimum(((confidence_P - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    confidence, accuracy, count = [], [], []
    gaps = []
    for i in range(_BINS):
        in_bin_P = index_P == i
        if not in_bin_P.any():
            continue
        confidence.append(float(confidence_P[in_bin_P].mean()))
        accuracy.append(float(correct_P[in_bin_P].mean()))
        count.append(int(in_bin_P.sum()))
        gaps.append(count[-1] * abs(accuracy[-1] - confidence[-1]))
    return Calibration(sum(gaps) / len(gap_P), confidence, accuracy, count)


def length_bias(scores_P2: Any, lengths_P2: Any) -> dict[str, float]:
    """Measure whether the model prefers the longer response.

    `lengths_P2` are response tokens (pairs, 2), with the chosen response first. The result has these entries,
    as far as any pair defines them:

    - `longer_wins`: share of pairs in which the longer response has the higher score
    - `longer_chosen`: share of pairs in which the annotators chose the longer response
    - `accuracy_longer`, `accuracy_shorter`: accuracy if the chosen response is the longer or the shorter one
    - `correlation` of score and length over all responses
    """
    gap_P, lengths = _gap(scores_P2), np.asarray(lengths_P2, dtype=float)
    difference_P = lengths[:, 0] - lengths[:, 1]
    measures: dict[str, float] = {}
    uneven = difference_P != 0
    if uneven.any():
        measures["longer_wins"] = float(_correct(gap_P * np.sign(difference_P))[uneven].mean())
        measures["longer_chosen"] = float((difference_P > 0)[uneven].mean())
    for name, selected_P in (("accuracy_longer", difference_P > 0), ("accuracy_shorter", difference_P < 0)):
        if selected_P.any():
            measures[name] = float(_correct(gap_P)[selected_P].mean())
    scores = np.asarray(scores_P2, dtype=float)
    # A correlation divides by both.
    if scores.std() > 0 and lengths.std() > 0:
        measures["correlation"] = float(np.corrcoef(scores.ravel(), lengths.ravel())[0, 1])
    return measures


def accuracy_by_length(scores_P2: Any, lengths_P2: Any) -> list[dict[str, float]]:
    """Return the accuracy of four groups of pairs, ordered by the length of their longer response.

    Each group has `from` and `to` (tokens), `pairs` and `accuracy`.
    """
    gap_P, longest_P = _gap(scores_P2), np.asarray(lengths_P2, dtype=float).max(axis=1)
    # Stable: the order of equal lengths, and with it the groups, would otherwise depend on the CPU.
    order = np.argsort(longest_P, kind="stable")
    groups = []
    for part in np.array_split(order, min(_LENGTH_BUCKETS, len(order))):
        group = {
            "from": float(longest_P[part].min()),
            "to": float(longest_P[part].max()),
            "pairs": float(len(part)),
            "accuracy": float(_correct(gap_P)[part].mean()),
        }
        groups.append(group)
    return groups


def accuracy_by(names: Sequence[str], scores_P2: Any) -> dict[str, float]:
    """Return the accuracy for each name in `names` (pairs,), for example by data source."""
    correct_P = _correct(_gap(scores_P2))
    names_P = np.asarray(names)
    return {name: float(correct_P[names_P == name].mean()) for name in sorted(set(names))}


def _gap(scores_P2: Any) -> Floats:
    scores: Floats = np.asarray(scores_P2, dtype=np.float64)
    return scores[:, 0] - scores[:, 1]


def _correct(gap_P: Floats) -> Floats:
    """Return 1 for gaps above 0 and 0.5 for gaps of 0."""
    return np.heaviside(gap_P, 0.5)
