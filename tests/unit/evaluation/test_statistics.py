"""Statistics of the evaluation.

- bootstrap intervals depend on the seed, cover the truth, and are a point for equal values
- a win counts 1, a tie 0.5 and a loss 0; the win rates of both models sum to 1
- the interval of a win rate is Wilson's, and the sign test is exact (values by hand)
- bootstrap intervals, Wilson's for whole numbers of wins and the sign test are those of SciPy
- values of one group count as one: groups of one value change no bit, copies change hardly anything, and the
  intervals cover the truth where those over single values do not
- distinct n-grams have the values by hand and do not depend on the length of the texts
"""

import random
from typing import Any

import numpy as np
import pytest
import scipy.stats

from rlhf_core.algo.groups import effective_count, widening
from rlhf_core.errors import DataError, NonFiniteError
from rlhf_core.evaluation.statistics import (
    Answer,
    Interval,
    Verdicts,
    bootstrap_mean,
    compare,
    difference_of_shares,
    distinct_n,
    wilson,
    win_rate,
)
from rlhf_core.types import RewardInput


def mean_of(
    values: list[float], seed: int = 3, resamples: int = 500, groups: list[str] | None = None
) -> Interval:
    return bootstrap_mean(values, resamples=resamples, confidence=0.95, seed=seed, groups=groups)


def test_interval_depends_on_the_seed() -> None:
    values = np.random.default_rng(0).normal(size=50).tolist()
    assert mean_of(values) == mean_of(values)
    assert mean_of(values) != mean_of(values, seed=4)


def test_interval_has_the_width_of_the_normal_theory() -> None:
    values = np.random.default_rng(1).normal(loc=2.0, size=400).tolist()
    interval = mean_of(values, resamples=4000)
    assert interval.low < interval.mean < interval.high
    # 2 * 1.96 * std / sqrt(n)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * np.std(values) / 20, rel=0.05)


def test_95_percent_interval_covers_the_truth_at_that_rate() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for seed in range(300):
        interval = mean_of(rng.normal(size=60).tolist(), seed=seed, resamples=300)
        hits += interval.low <= 0.0 <= interval.high
    assert 0.90 <= hits / 300 <= 0.98


def test_interval_of_equal_values_is_a_point() -> None:
    assert mean_of([0.7] * 9) == Interval(0.7, 0.7, 0.7)
    assert mean_of([4.0]) == Interval(4.0, 4.0, 4.0)


def test_many_resamples_are_those_of_one_draw() -> None:
    """They are made in chunks of 2 million values."""
    values = np.random.default_rng(5).normal(size=1500)
    drawn = np.random.default_rng(3).integers(0, 1500, (2000, 1500))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    found = mean_of(values.tolist(), seed=3, resamples=2000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize("sizes", [[1] * 30, [1, 5, 2, 2, 7, 1, 3, 4]], ids=["values", "groups"])
def test_an_interval_is_the_percentile_bootstrap_of_scipy(sizes: list[int]) -> None:
    values = np.random.default_rng(5).normal(size=sum(sizes))
    groups = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    found = mean_of(values.tolist(), groups=groups)
    sums = [float(part.sum()) for part in np.split(values, np.cumsum(sizes)[:-1])]
    expected = scipy.stats.bootstrap(
        (sums, sizes), lambda total, count, axis: total.sum(axis) / count.sum(axis), paired=True,
        vectorized=True, n_resamples=500, method="percentile", rng=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    wider = widening(len(values), len(sizes), 0.95)
    assert found.low == pytest.approx(found.mean - (found.mean - expected.low) * wider, rel=1e-12)
    assert found.high == pytest.approx(found.mean + (expected.high - found.mean) * wider, rel=1e-12)


def test_empty_and_nonfinite_values_are_refused() -> None:
    with pytest.raises(DataError, match="at least 1 value"):
        mean_of([])
    with pytest.raises(NonFiniteError, match="value 1 of 2"):
        mean_of([0.0, float("nan")])


def answers(*scores: float) -> list[Answer]:
    return [Answer(RewardInput(f"p{i}", "q", "r", (), (), True), {"gold": s}) for i, s in enumerate(scores)]


def test_higher_score_wins_and_close_scores_tie() -> None:
    a, b = answers(1.0, 2.0, 3.0, 0.0), answers(0.0, 2.0 + 1e-9, 4.0, -1.0)
    result = compare(a, b, "gold", confidence=0.95)
    assert result.preferences == (1.0, 0.5, 0.0, 1.0)
    assert result.win_rate.mean == (1 + 0.5 + 0 + 1) / 4
    assert result.verdicts == Verdicts(wins=2, losses=1, ties=1)


def test_win_rates_of_both_models_sum_to_one() -> None:
    a, b = answers(1.0, 2.0, 3.0, 0.0), answers(0.0, 2.0 + 1e-9, 4.0, -1.0)
    ours = compare(a, b, "gold", confidence=0.95).win_rate
    theirs = compare(b, a, "gold", confidence=0.95).win_rate
    assert theirs.mean == 1 - ours.mean
    assert (theirs.low, theirs.high) == pytest.approx((1 - ours.high, 1 - ours.low), abs=0.02)


def test_answers_to_different_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="same prompts"):
        compare(answers(1.0), answers(1.0, 2.0), "gold", confidence=0.95)


@pytest.mark.parametrize(
    ("a", "of_a", "b", "of_b", "low", "high"),
    # Newcombe (1998), table II, method 10.
    [(56, 70, 48, 80, 0.0524, 0.3339), (9, 10, 3, 10, 0.1705, 0.8090), (0, 10, 0, 20, -0.1611, 0.2775)],
)
def test_a_difference_of_shares_has_the_published_interval(
    a: int, of_a: int, b: int, of_b: int, low: float, high: float
) -> None:
    found = difference_of_shares(a / of_a, of_a, b / of_b, of_b, 0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((a / of_a - b / of_b, low, high), abs=5e-5)


def test_win_rates_have_a_wilson_interval() -> None:
    # z = 1.96: z^2 = 3.8415; n = 2: low = 1 / (1 + z^2 / n) = 0.3424; n = 50: 0.9287.
    found = win_rate([1.0, 1.0], confidence=0.95)
    assert (found.mean, found.high) == (1.0, 1.0) and found.low == pytest.approx(0.3424, abs=1e-4)
    assert win_rate([1.0] * 50, confidence=0.95).low == pytest.approx(0.9287, abs=1e-4)
    tied = win_rate([0.5] * 50, confidence=0.95)
    assert tied.low == pytest.approx(1 - tied.high) and tied.low == pytest.approx(0.3664, abs=1e-3)
    # m = 0.625, n = 4: (0.625 + 0.4802 +- 1.96 sqrt(0.0586 + 0.0600)) / 1.9604
    mixed = win_rate([1.0, 0.0, 1.0, 0.5], confidence=0.95)
    assert (mixed.mean, mixed.low, mixed.high) == pytest.approx((0.625, 0.2194, 0.9081), abs=1e-4)
    # Newcombe (1998), two-sided intervals of single proportions, method 3: 81 of 263.
    published = win_rate([1.0] * 81 + [0.0] * 182, confidence=0.95)
    assert (published.low, published.high) == pytest.approx((0.2553, 0.3662), abs=1e-4)


@pytest.mark.parametrize(("wins", "count"), [(0, 3), (2, 2), (7, 19), (150, 200), (611, 1300)])
def test_wilson_interval_and_sign_test_are_those_of_scipy(wins: int, count: int) -> None:
    for confidence in (0.8, 0.95, 0.99):
        expected = scipy.stats.binomtest(wins, count).proportion_ci(confidence, method="wilson")
        found = wilson(wins / count, count, confidence)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    test = scipy.stats.binomtest(wins, count, alternative="greater")
    assert Verdicts(wins, count - wins, ties=4).p_value == pytest.approx(test.pvalue, rel=1e-12)


def test_groups_of_one_value_change_no_bit() -> None:
    rng = np.random.default_rng(6)
    for count in (1, 2, 57, 400):
        values, wins = rng.normal(size=count).tolist(), rng.choice([0.0, 0.5, 1.0], count).tolist()
        groups = [f"group {index}" for index in range(count)]
        arguments: dict[str, Any] = {"resamples": 200, "confidence": 0.9, "seed": 1}
        assert bootstrap_mean(values, groups=groups, **arguments) == bootstrap_mean(values, **arguments)
        assert win_rate(wins, confidence=0.9, groups=groups) == win_rate(wins, confidence=0.9)
    # The mean and the draws are those of numpy on the values.
    drawn = np.random.default_rng(1).integers(0, count, (200, count))
    low, high = np.quantile(np.asarray(values)[drawn].mean(axis=1), [0.05, 0.95])
    found = bootstrap_mean(values, groups=groups, **arguments)
    assert (found.mean, found.low, found.high) == (float(np.mean(values)), float(low), float(high))


def test_copies_of_a_value_count_once() -> None:
    values = np.random.default_rng(7).choice([0.0, 1.0], 60, p=[0.3, 0.7]).tolist()
    copies, groups = [value for value in values for _ in range(8)], [str(i // 8) for i in range(480)]
    once, eight_times = win_rate(values, confidence=0.95), win_rate(copies, confidence=0.95, groups=groups)
    assert eight_times.mean == once.mean
    # Up to the correction for few groups: (60 x 479) / (59 x 480) and t with 59 degrees of freedom.
    assert effective_count(copies, groups, 0.95) == pytest.approx(60 / 1.0148 / 1.0366, rel=1e-3)
    assert 1.0 < (eight_times.high - eight_times.low) / (once.high - once.low) < 1.03
    apart = win_rate(copies, confidence=0.95)
    assert eight_times.high - eight_times.low > 2.5 * (apart.high - apart.low)
    mean, of_copies = mean_of(values), mean_of(copies, groups=groups)
    assert of_copies.mean == pytest.approx(mean.mean)
    assert of_copies.high - of_copies.low == pytest.approx((mean.high - mean.low) * 1.026, rel=0.01)


def test_one_group_says_nothing_about_others() -> None:
    wins = [1.0, 1.0, 0.0, 1.0]
    assert mean_of(wins, groups=["a"] * 4) == Interval(0.75, 0.0, 1.0)
    assert win_rate(wins, confidence=0.95, groups=["a"] * 4) == wilson(0.75, 1, 0.95)
    assert win_rate([1.0] * 4, confidence=0.95, groups=list("aabb")) == wilson(1.0, 2, 0.95)


def test_an_interval_over_few_groups_stays_in_the_range_of_the_values() -> None:
    values, groups = [1.0] * 40 + [0.0] * 40 + [1.0] * 20 + [0.0] * 20, [str(i // 40) for i in range(120)]
    found = mean_of(values, groups=groups)
    assert (found.low, found.high) == (0.0, 1.0)


@pytest.mark.parametrize(("groups", "size", "correlation", "rate"), [(32, 16, 0.3, 0.5), (16, 8, 0.3, 0.8)])
def test_intervals_over_groups_cover_the_truth(
    groups: int, size: int, correlation: float, rate: float
) -> None:
    rng = np.random.default_rng(8)
    scale = 1 / correlation - 1
    names = [str(index // size) for index in range(groups * size)]
    covered = {"wilson": 0, "bootstrap": 0, "without groups": 0}
    for seed in range(300):
        wins = rng.random((groups, size)) < rng.beta(rate * scale, (1 - rate) * scale, groups)[:, None]
        values = wins.astype(float).ravel().tolist()
        found = (
            win_rate(values, confidence=0.95, groups=names),
            mean_of(values, seed=seed, resamples=200, groups=names),
            win_rate(values, confidence=0.95),
        )
        for name, interval in zip(covered, found, strict=True):
            covered[name] += interval.low <= rate <= interval.high
    assert covered["wilson"] >= 0.91 * 300 and covered["bootstrap"] >= 0.89 * 300, covered
    assert covered["without groups"] <= 0.85 * 300, "the groups do not matter in this test"


def test_verdicts_are_those_of_groups() -> None:
    ours, theirs = answers(3.0, 0.0, 1.0, 1.0), answers(1.0, 1.0, 0.0, 1.0)
    result = compare(ours, theirs, "gold", confidence=0.95, groups=["a", "a", "b", "c"])
    assert result.preferences == (1.0, 0.0, 1.0, 0.5)
    assert result.group_preferences == [0.5, 1.0, 0.5]
    assert result.verdicts == Verdicts(wins=1, losses=0, ties=2)


def test_sign_test_is_exact_and_omits_ties() -> None:
    assert Verdicts.of([1.0, 1.0]).p_value == 1 / 4
    assert Verdicts.of([1.0, 1.0, 0.0, 0.5]).p_value == 4 / 8  # P(at least 2 of 3) = (3 + 1) / 8
    assert Verdicts.of([0.5] * 9).p_value == 1.0
    assert Verdicts.of([0.0] * 3).p_value == 1.0
    assert Verdicts.of([1.0] * 600 + [0.0] * 400).p_value == pytest.approx(1.364e-10, rel=1e-3)
    assert Verdicts.of([0.75, 0.25, 0.5]) == Verdicts(1, 1, 1)


def test_distinct_n_does_not_depend_on_text_length() -> None:
    chance = random.Random(0)
    words = [f"w{i}" for i in range(50)]

    def texts(length: int) -> list[str]:
        return [" ".join(chance.choices(words, k=length)) for _ in range(20)]

    for n, within in ((1, 0.03), (2, 0.03)):
        found = distinct_n({"short": texts(20), "long": texts(80)}, n)
        assert abs(found["short"] - found["long"]) < within, n


def test_distinct_n_counts_over_all_texts() -> None:
    texts = ["a b a", "A b c"]
    assert distinct_n({"x": texts}, 1) == {"x": 3 / 6}
    assert distinct_n({"x": texts}, 2) == {"x": 3 / 4}  # ab ba ab bc
    assert distinct_n({"x": texts, "y": ["a"]}, 2) == {"x": 0.0, "y": 0.0}
    # Windows of 2, as many as y has: (a b)(a a)(b c) and (d d).
    assert distinct_n({"x": texts, "y": ["d d"]}, 1) == {"x": (2 + 1 + 2) / 6, "y": 1 / 2}


def test_distinct_n_sees_loops_in_scripts_without_blanks() -> None:
    found = {
        script: distinct_n({"x": [loop]}, 2)["x"]
        for script, loop in (("Chinese", "你好" * 40), ("Thai", "สวัสดี" * 20), ("digits", "1" * 200))
    }
    assert max(found.values()) < 0.1
    assert distinct_n({"x": ["小狐狸在花园里睡觉"]}, 2) == {"x": 1.0}
