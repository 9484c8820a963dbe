"""Means with bootstrap intervals, comparisons of two models with their exact test, text statistics, and the
calibration of a reward model.

The unit of every interval is a group of values: those of one template, document or conversation, or all
values of one prompt. Values of different groups are independent. Without groups each value is its own.

Intervals of means are percentile bootstraps (Efron 1979) over groups (Field and Welsh 2007). They are seeded,
so the same values give the same interval. Those of shares are Wilson's (1927) for the effective number of
values (Korn and Graubard 1998).

The tests compare with SciPy. Its Wilson interval takes whole numbers of wins only, and its bootstrap differs
in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.algo.groups import by_group, effective_count, widening
from rlhf_core.data.words import word_units
from rlhf_core.errors import DataError, NonFiniteError
from rlhf_core.types import PairExample, PromptExample, RewardInput

TIE = 1e-6
"""Scores closer than this are a tie: the score of one text can differ in the last bits between batches."""

_CHUNK = 2_000_000
"""Resampled values held in memory at once."""
_ITERATIONS = 50
# From 37 on, p rounds to 1 and p (1 - p) to 0, and the Hessian of `length_controlled` would be singular.
_LIMIT = 30.0
"""Largest logit for which the sigmoid is computed."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval, in the unit of the values."""

    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def group_of(example: PromptExample | PairExample) -> str:
    """Return the group of a prompt or pair. Without one, all values of the same prompt are a group."""
    return example.group or example.prompt_id


def units(groups: int, prompts: int, name: str = "prompts") -> str:
    """Return the number of groups of prompts in words, which is that of prompts if each is its own."""
    return f"{groups} groups of {prompts} {name}" if groups < prompts else f"{groups} {name}"


def bootstrap_mean(
    values: Sequence[float],
    *,
    resamples: int,
    confidence: float,
    seed: int,
    groups: Sequence[str] | None = None,
) -> Interval:
    """Return the mean of `values` (n,) and its percentile bootstrap interval over groups. If all values are
    of one group, it is their range.

    Args:
        values: Values of n prompts.
        resamples: Number of bootstrap samples.
        confidence: Level of the interval, in [0, 1].
        seed: Seed of the resampling.
        groups: (n,) group of each value; None: each value is its own.

    Raises:
        DataError: There are no values.
        NonFiniteError: A value is NaN or infinite.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        raise DataError(
            "a confidence interval needs at least 1 value; got 0; hold out more prompts (data.eval_fraction)"
        )
    # A NaN would make the whole interval NaN, and nobody would know which response it came from.
    if not np.isfinite(x).all():
        index = int(np.flatnonzero(~np.isfinite(x))[0])
        raise NonFiniteError(f"value {index} of {x.size} to average is {x[index]}, but all must be finite")
    mean = float(x.mean())
    # The mean of equal floats can differ from them in the last bit.
    if x.min() == x.max():
        return Interval(float(x[0]), float(x[0]), float(x[0]))
    grouped = by_group(x.tolist(), groups)
    if len(grouped) == 1:
        return Interval(mean, float(x.min()), float(x.max()))
    # Means of groups would weight a group of one value as much as a large one, so sums and sizes are
    # resampled.
    sums = np.array(list(map(sum, grouped)))
    sizes = np.array(list(map(len, grouped)))
    rng = np.random.default_rng(seed)
    # In chunks, because all resampled values at once would need resamples x n x 8 bytes. The generator gives
    # the same indices for any chunk size.
    rows = max(1, _CHUNK // sums.size)
    chunks = []
    for done in range(0, resamples, rows):
        indices = rng.integers(0, sums.size, (min(rows, resamples - done), sums.size))
        chunks.append(sums[indices].sum(axis=1) / sizes[indices].sum(axis=1))
    low, high = np.quantile(np.concatenate(chunks), [(1 - confidence) / 2, (1 + confidence) / 2])
    # The bootstrap takes no account of how few groups there are: they have fewer degrees of freedom.
    if sums.size < x.size:
        wider = widening(x.size, sums.size, confidence)
        # The wider interval could leave the range of the values, which no mean does.
        low = max(mean - (mean - low) * wider, x.min())
        high = min(mean + (high - mean) * wider, x.max())
    return Interval(mean, float(low), float(high))


def win_rate(
    preferences: Sequence[float], *, confidence: float, groups: Sequence[str] | None = None
) -> Interval:
    """Return the mean of `preferences` (n,) in [0, 1], at least one, and Wilson's interval for it (`wilson`).

    A tie counts as half a win and half a loss. m (1 - m) is the largest variance of values in [0, 1] with the
    mean m (Bhatia and Davis 2000), so the interval is conservative with ties: it covers the truth in 99.6 %
    instead of 95 % if half of the prompts are ties. A bootstrap is not used, because it has width 0 for equal
    values, and covers less than its level near 0 and 1.

    Related values count less: the number of values is the effective one (`effective_count`).

    Args:
        preferences: 1 for a win, 0.5 for a tie, 0 for a loss, or means of these.
        confidence: Level of the interval, in [0, 1].
        groups: (n,) group of each value; None: each value is its own.
    """
    # Measured: this covers 0.93 to 0.96, and a bootstrap of groups 0.85 to 0.95 (decision 53).
    share = fmean(preferences)
    return wilson(share, effective_count(preferences, groups, confidence), confidence)


def wilson(share: float, count: float, confidence: float) -> Interval:
    """Return Wilson's score interval for a `share` of `count` trials.

        (m + z^2 / 2n +- z sqrt(m (1 - m) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    where m is the share, n the count and z the normal quantile of the level. The level is approximate for few
    trials. The interval is [0.34, 1] for two wins out of two.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    scale = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Rounding can give a bound just inside [0, 1].
    low = centre - half if share > 0 else 0.0
    high = centre + half if share < 1 else 1.0
    return Interval(share, max(0.0, low), min(1.0, high))


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
    """Return the win rate that two models would have with responses of equal length (Dubois et al. 2024,
    Length-Controlled AlpacaEval), and its Wald interval on the scale of logits:

        P(win) = sigmoid(a + b tanh(d / s))      d: difference of lengths in tokens, s: its standard deviation

    The result is sigmoid(a), the prediction for d = 0. If the mean of d is more than 2 s away from 0, hardly
    any response is as long as the other model's: the data do not identify the result, which is close to the
    plain win rate. With groups, the standard error is that of the effective number of residuals.

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
    # On the scale of logits, so that the bounds stay within 0 and 1.
    half = NormalDist().inv_cdf((1 + confidence) / 2) * error
    mean, low, high = (float(_sigmoid(weights[0] + shift)) for shift in (0.0, -half, half))
    return LengthControlled(mean, low, high, identified=abs(float(d.mean())) <= 2 * float(d.std()))


def _sigmoid(logits: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-np.clip(logits, -_LIMIT, _LIMIT)))


def difference_of_means(a: Interval, b: Interval) -> Interval:
    """Return a minus b of two independent means, with the interval that follows from theirs (MOVER, Zou and
    Donner 2008, Stat. Med. 27:1693):

        low  = a - b - sqrt((a - low_a)^2 + (high_b - b)^2)
        high = a - b + sqrt((high_a - a)^2 + (b - low_b)^2)

    >>> difference_of_means(Interval(5.0, 2.0, 9.0), Interval(1.0, -2.0, 5.0))
    Interval(mean=4.0, low=-1.0, high=9.0)
    """
    mean = a.mean - b.mean
    low = mean - math.hypot(a.mean - a.low, b.high - b.mean)
    return Interval(mean, low, mean + math.hypot(a.high - a.mean, b.mean - b.low))


def difference_of_shares(
    share_a: float, count_a: int, share_b: float, count_b: int, confidence: float
) -> Interval:
    """Return `share_a` - `share_b` of two independent samples, with Newcombe's hybrid score interval (1998,
    method 10): that of `difference_of_means`, where the bounds of each share are Wilson's.

    Args:
        share_a: Share of the first sample, in [0, 1].
        count_a: Its number of trials.
        share_b: Share of the second sample.
        count_b: Its number of trials.
        confidence: Level of the interval, in [0, 1].
    """
    return difference_of_means(wilson(share_a, count_a, confidence), wilson(share_b, count_b, confidence))


@dataclass(frozen=True)
class Verdicts:
    """Numbers of prompts, or of groups of related prompts, that were won, lost and tied."""

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
    groups: tuple[str, ...] | None = None
    """(n,) group of each preference; None: each is its own."""

    @property
    def group_preferences(self) -> list[float]:
        """Mean preference of each group, in the order of the prompts."""
        return list(map(fmean, by_group(self.preferences, self.groups)))

    @property
    def verdicts(self) -> Verdicts:
        """Verdicts of the groups: related prompts, and several answers to a prompt, count once."""
        return Verdicts.of(self.group_preferences)


def compare(
    answers_a: Sequence[Answer],
    answers_b: Sequence[Answer],
    measure: str,
    *,
    confidence: float,
    groups: Sequence[str] | None = None,
) -> Comparison:
    """Compare the scores of two models' answers to the same prompts.

    Args:
        answers_a: (n,) answers of model `a`.
        answers_b: (n,) answers of model `b`, in the same order of prompts.
        measure: Name of the score. The higher score wins.
        confidence: Level of the interval, in [0, 1].
        groups: (n,) group of each prompt; None: each prompt is its own.

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
    interval = win_rate(preferences, confidence=confidence, groups=groups)
    return Comparison(interval, tuple(preferences), None if groups is None else tuple(groups))


def preference(a: float, b: float) -> float:
    """Return 1 if `a` is higher, 0 if `b` is higher, and 0.5 for a tie."""
    if abs(a - b) <= TIE:
        return 0.5
    return 1.0 if a > b else 0.0


def regression_differences(
    found: Mapping[str, Mapping[str, Any]], policy: str
) -> dict[str, dict[str, float]]:
    """Return what decides for each regression set: `mean`, `low` and `high` of the difference of a policy and
    its opponent, paired by prompt, and `margin`.

    `found` has the results of `evaluation.regression`.
    """
    sets = {}
    for name, each in found.items():
        sets[name] = {part: round(value, 9) for part, value in each["difference"][policy].items()}
        sets[name]["margin"] = each["margin"]
    return sets


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
    # The ratio falls with the length, so all models are measured on as many n-grams.
    size = min(map(len, grams.values()))
    if size == 0:
        return dict.fromkeys(grams, 0.0)
    return {name: _mean_distinct(group, size) for name, group in grams.items()}


def _n_grams(texts: Sequence[str], n: int) -> list[tuple[str, ...]]:
    grams = []
    for text in texts:
        words = list(chain.from_iterable(map(word_units, text.casefold().split())))
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


# -- calibration and length bias of a reward model --
#
# Axes: `P` held-out pairs. One with equal scores counts as half correct in every measure.


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
    # Not more groups than pairs: an empty one has no smallest length.
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
    # Sorted, because a set of texts has another order in each process.
    return {name: float(correct_P[names_P == name].mean()) for name in sorted(set(names))}


def _gap(scores_P2: Any) -> Floats:
    scores: Floats = np.asarray(scores_P2, dtype=np.float64)
    return scores[:, 0] - scores[:, 1]


def _correct(gap_P: Floats) -> Floats:
    """Return 1 for gaps above 0 and 0.5 for gaps of 0."""
    return np.heaviside(gap_P, 0.5)
