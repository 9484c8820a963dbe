"""Means with bootstrap intervals, and small text statistics. numpy only.

Intervals are percentile bootstraps over prompts (Efron 1979): seeded, so the same values give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rlhf_core.errors import DataError, NonFiniteError

_CHUNK = 2_000_000
"""Resampled values held in memory at once."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval, in the unit of the values."""

    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def bootstrap_mean(values: Sequence[float], *, resamples: int, confidence: float, seed: int) -> Interval:
    """Mean of `values` (n,) and its percentile bootstrap interval at level `confidence` in [0, 1].

    Raises `DataError` for no values and `NonFiniteError` for a NaN or Inf.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        raise DataError(
            "a confidence interval needs at least 1 value; got 0; hold out more prompts (data.eval_fraction)"
        )
    if not np.isfinite(x).all():
        index = int(np.flatnonzero(~np.isfinite(x))[0])
        raise NonFiniteError(f"value {index} of {x.size} to average is {x[index]}, but all must be finite")
    mean = float(x.mean())
    if x.min() == x.max():
        return Interval(float(x[0]), float(x[0]), float(x[0]))
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // x.size)
    means = np.concatenate(
        [
            x[rng.integers(0, x.size, (min(rows, resamples - done), x.size))].mean(axis=1)
            for done in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(mean, float(low), float(high))


def preference(a: float, b: float, tolerance: float) -> float:
    """1 if `a` is above `b` by more than `tolerance`, 0 if below, else 0.5."""
    if abs(a - b) <= tolerance:
        return 0.5
    return 1.0 if a > b else 0.0


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct / all n-grams of white-space separated words over all texts, in [0, 1] (Li et al. 2016); 0 without any."""
    grams: set[tuple[str, ...]] = set()
    total = 0
    for text in texts:
        words = text.casefold().split()
        for start in range(len(words) - n + 1):
            grams.add(tuple(words[start : start + n]))
            total += 1
    return len(grams) / total if total else 0.0
