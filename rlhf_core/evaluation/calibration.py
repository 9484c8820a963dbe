"""How far the reward model's probabilities can be believed, and whether it rewards length. Numpy only.

A pair whose scores are equal is half right, wherever it is counted.

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
    """Predicted against found: by bins of equal width of the predicted probability that the chosen response
    wins.
    """

    error: float
    """Expected calibration error (Guo et al. 2017): mean over pairs of |share right - mean confidence| of
    their bin.
    """
    confidence: list[float]
    """Mean predicted probability of the answer the model prefers, 0.5 to 1, per bin that is not empty."""
    accuracy: list[float]
    """Share of its pairs where it prefers the chosen response."""
    count: list[int]


def calibration(scores_P2: Any) -> Calibration:
    """`scores_P2`: raw scores (pairs, 2), chosen first; probabilities are sigmoid(chosen - rejected)."""
    gap_P = _gap(scores_P2)
    confidence_P = 1.0 / (1.0 + np.exp(-np.abs(gap_P)))
    right_P = _right(gap_P)
    index_P = np.minimum(((confidence_P - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    bins = [index_P == i for i in range(_BINS) if (index_P == i).any()]
    confidence = [float(confidence_P[b].mean()) for b in bins]
    accuracy = [float(right_P[b].mean()) for b in bins]
    count = [int(b.sum()) for b in bins]
    gaps = [n * abs(a - c) for n, a, c in zip(count, accuracy, confidence, strict=True)]
    return Calibration(sum(gaps) / len(gap_P), confidence, accuracy, count)


def length_bias(scores_P2: Any, lengths_P2: Any) -> dict[str, float]:
    """Does the model prefer the longer response? `lengths_P2`: response tokens (pairs, 2), chosen first.

    `longer_wins`: share of pairs in which the longer response has the higher score; `longer_chosen`: the same
    share among the annotators; `accuracy_longer`, `accuracy_shorter`: accuracy where the chosen response is
    the longer, the shorter one; `correlation`: of score with length over all responses. What no pair can tell
    is left out.
    """
    gap_P, lengths = _gap(scores_P2), np.asarray(lengths_P2, dtype=float)
    difference_P = lengths[:, 0] - lengths[:, 1]
    found: dict[str, float] = {}
    uneven = difference_P != 0
    if uneven.any():
        found["longer_wins"] = float(_right(gap_P * np.sign(difference_P))[uneven].mean())
        found["longer_chosen"] = float((difference_P > 0)[uneven].mean())
    for name, where in (("accuracy_longer", difference_P > 0), ("accuracy_shorter", difference_P < 0)):
        if where.any():
            found[name] = float(_right(gap_P)[where].mean())
    scores = np.asarray(scores_P2, dtype=float)
    if scores.std() > 0 and lengths.std() > 0:
        found["correlation"] = float(np.corrcoef(scores.ravel(), lengths.ravel())[0, 1])
    return found


def accuracy_by_length(scores_P2: Any, lengths_P2: Any) -> list[dict[str, float]]:
    """Accuracy in quarters of the pairs by their longer response: `from`, `to` (tokens), `pairs`, `accuracy`."""
    gap_P, longest_P = _gap(scores_P2), np.asarray(lengths_P2, dtype=float).max(axis=1)
    order = np.argsort(longest_P, kind="stable")
    return [
        {
            "from": float(longest_P[part].min()),
            "to": float(longest_P[part].max()),
            "pairs": float(len(part)),
            "accuracy": float(_right(gap_P)[part].mean()),
        }
        for part in np.array_split(order, min(_LENGTH_BUCKETS, len(order)))
    ]


def accuracy_by(names: Sequence[str], scores_P2: Any) -> dict[str, float]:
    """Accuracy of the pairs of each name (their source)."""
    right_P = _right(_gap(scores_P2))
    of = np.asarray(names)
    return {name: float(right_P[of == name].mean()) for name in sorted(set(names))}


def _gap(scores_P2: Any) -> Floats:
    scores: Floats = np.asarray(scores_P2, dtype=np.float64)
    return scores[:, 0] - scores[:, 1]


def _right(gap_P: Floats) -> Floats:
    """1 where the gap is above 0, one half where it is 0."""
    return np.heaviside(gap_P, 0.5)
