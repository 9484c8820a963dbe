"""Means with bootstrap intervals, comparisons of two models with their exact test, and text statistics.

Intervals are percentile bootstraps over prompts (Efron 1979). They are seeded, so the same values give the
same interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from rlhf_core.data.words import units
from rlhf_core.errors import DataError, NonFiniteError
from rlhf_core.types import RewardInput

TIE = 1e-6
"""Scores closer than this are a tie: the score of one text can differ in the last bits between batches."""

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
    """Return the mean of `values` (n,) and its percentile bootstrap interval.

    Args:
        values: Values of n prompts.
        resamples: Number of bootstrap samples.
        confidence: Level of the interval, in [0, 1].
        seed: Seed of the resampling.

    Raises:
        DataError: There are no values.
        NonFiniteError: A value is NaN or infinite.
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
    # The mean of equal floats can differ from them in the last bit.
    if x.min() == x.max():
        return Interval(float(x[0]), float(x[0]), float(x[0]))
    rng = np.random.default_rng(seed)
    # In chunks, because all resampled values at once would need resamples x n x 8 bytes. The generator gives
    # the same indices for any chunk size.
    rows = max(1, _CHUNK // x.size)
    chunks = []
    for done in range(0, resamples, rows):
        indices = rng.integers(0, x.size, (min(rows, resamples - done), x.size))
        chunks.append(x[indices].mean(axis=1))
    low, high = np.quantile(np.concatenate(chunks), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(mean, float(low), float(high))


def win_rate(preferences: Sequence[float], *, resamples: int, confidence: float, seed: int) -> Interval:
    """Return the mean of `preferences` (n,) in [0, 1] and its interval.

    A bootstrap of equal values has width 0 for any number of values. In this case Wilson's score interval
    (1927) is used, which is [0.34, 1] for two wins out of two.
    """
    if len(preferences) and min(preferences) == max(preferences):
        return wilson(preferences[0], len(preferences), confidence)
    return bootstrap_mean(preferences, resamples=resamples, confidence=confidence, seed=seed)


def wilson(share: float, count: int, confidence: float) -> Interval:
    """Return Wilson's score interval for a `share` of `count` trials."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    scale = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def difference_of_shares(
    share_a: float, count_a: int, share_b: float, count_b: int, confidence: float
) -> Interval:
    """Return `share_a` - `share_b` of two independent samples, with Newcombe's hybrid score interval (1998,
    method 10):

        low  = d - sqrt((a - low_a)^2 + (high_b - b)^2)
        high = d + sqrt((high_a - a)^2 + (b - low_b)^2)

    where the bounds of each share are Wilson's.

    Args:
        share_a: Share of the first sample, in [0, 1].
        count_a: Its number of trials.
        share_b: Share of the second sample.
        count_b: Its number of trials.
        confidence: Level of the interval, in [0, 1].
    """
    a, b = wilson(share_a, count_a, confidence), wilson(share_b, count_b, confidence)
    mean = share_a - share_b
    low = mean - math.hypot(share_a - a.low, b.high - share_b)
    high = mean + math.hypot(a.high - share_a, share_b - b.low)
    return Interval(mean, low, high)


@dataclass(frozen=True)
class Verdicts:
    """Numbers of prompts that were won, lost and tied."""

    wins: int
    losses: int
    ties: int

    @staticmethod
    def of(preferences: Sequence[float]) -> Verdicts:
        wins = sum(value > 0.5 for value in preferences)
        losses = sum(value < 0.5 for value in preferences)
        return Verdicts(wins, losses, len(preferences) - wins - losses)

    @property
    def prompts(self) -> int:
        return self.wins + self.losses + self.ties

    @property
    def p_value(self) -> float:
        """Exact one-sided sign test (Dixon and Mood 1946).

        The probability of at least this number of wins if each prompt without a tie is won with probability
        0.5. It is 1 if all prompts are ties.
        """
        decided = self.wins + self.losses
        # In whole numbers, because 2.0 ** decided overflows from 1024 prompts on.
        return sum(math.comb(decided, k) for k in range(self.wins, decided + 1)) / (1 << decided)


@dataclass(frozen=True)
class Answer:
    """One model's response to one held-out prompt, with its scores."""

    sample: RewardInput
    scores: Mapping[str, float] = field(default_factory=dict)
    """Score by measure: `gold`, `reward_model`, `rules`, `rule/<name>`."""


@dataclass(frozen=True)
class Comparison:
    """Result of model `a` against model `b`."""

    win_rate: Interval
    """Win rate of `a`, in [0, 1]; ties count half."""
    preferences: tuple[float, ...]
    """(n,) 1 where `a` wins, 0.5 for a tie, 0 where `b` wins."""

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts.of(self.preferences)


def compare(
    answers_a: Sequence[Answer],
    answers_b: Sequence[Answer],
    measure: str,
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> Comparison:
    """Compare the scores of two models' answers to the same prompts.

    Args:
        answers_a: (n,) answers of model `a`.
        answers_b: (n,) answers of model `b`, in the same order of prompts.
        measure: Name of the score. The higher score wins.
        resamples: Number of bootstrap samples.
        confidence: Level of the interval, in [0, 1].
        seed: Seed of the bootstrap.

    Raises:
        DataError: The answers are not to the same prompts, or there are none.
    """
    if [a.sample.prompt_id for a in answers_a] != [b.sample.prompt_id for b in answers_b]:
        raise DataError(
            f"a win rate compares answers to the same prompts in the same order; got {len(answers_a)} and"
            f" {len(answers_b)} others"
        )
    preferences = []
    for a, b in zip(answers_a, answers_b, strict=True):
        preferences.append(preference(a.scores[measure], b.scores[measure]))
    interval = win_rate(preferences, resamples=resamples, confidence=confidence, seed=seed)
    return Comparison(interval, tuple(preferences))


def preference(a: float, b: float) -> float:
    """Return 1 if `a` is higher, 0 if `b` is higher, and 0.5 for a tie."""
    if abs(a - b) <= TIE:
        return 0.5
    return 1.0 if a > b else 0.0


def regression_differences(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what decides for each regression set: `mean`, `low` and `high` of the paired difference, and
    `margin`.

    `found` has the results of `evaluation.regression`.
    """
    return {
        name: {part: round(value, 9) for part, value in each["difference"].items()}
        | {"margin": each["margin"]}
        for name, each in found.items()
    }


def failed_sets(sets: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a phrase for each regression set that failed: the lower bound of the difference is not above
    -margin.

    `sets` is what `regression_differences` returned.
    """
    phrases = []
    for name, found in sets.items():
        if not found["low"] > -found["margin"]:
            numbers = f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
            phrases.append(f"{name} {numbers} (margin {found['margin']:g})")
    return phrases


def distinct_n(groups: Mapping[str, Sequence[str]], n: int) -> dict[str, float]:
    """Return the ratio of distinct to all n-grams of words (Li et al. 2016) for each group of texts, in [0,
    1].

    The ratio decreases with the number of n-grams and therefore with the length of the texts. All groups
    therefore use the number of n-grams of the smallest group: the result is the mean over windows of that
    size, as in MATTR (Covington and McFall 2010). It is 0 if a group has no n-grams.
    """
    grams = {name: _n_grams(texts, n) for name, texts in groups.items()}
    size = min(map(len, grams.values()))
    if size == 0:
        return dict.fromkeys(grams, 0.0)
    return {name: _mean_distinct(group, size) for name, group in grams.items()}


def _n_grams(texts: Sequence[str], n: int) -> list[tuple[str, ...]]:
    grams = []
    for text in texts:
        words = [unit for piece in text.casefold().split() for unit in units(piece)]
        grams += [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return grams


def _mean_distinct(grams: Sequence[tuple[str, ...]], size: int) -> float:
    """Return the mean over consecutive windows. The last window ends at the end and may overlap."""
    starts = list(range(0, len(grams) - size + 1, size))
    if starts[-1] + size < len(grams):
        starts.append(len(grams) - size)
    shares = []
    for start in starts:
        window = grams[start : start + size]
        shares.append(len(set(window)) / size)
    return sum(shares) / len(starts)
