"""Statistics of the evaluation.

- bootstrap intervals depend on the seed, cover the truth, and are a point for equal values
- a win counts 1, a tie 0.5 and a loss 0; the win rates of both models sum to 1
- the interval of equal verdicts is Wilson's, and the sign test is exact (values by hand)
- distinct n-grams have the values by hand and do not depend on the length of the texts
"""

import random
from typing import Any

import numpy as np
import pytest

from rlhf_core.errors import DataError, NonFiniteError
from rlhf_core.evaluation.statistics import (
    Answer,
    Interval,
    Verdicts,
    bootstrap_mean,
    compare,
    difference_of_shares,
    distinct_n,
    win_rate,
)
from rlhf_core.types import RewardInput

SETTINGS: dict[str, Any] = {"resamples": 500, "confidence": 0.95, "seed": 3}


def mean_of(values: list[float], confidence: float = 0.95, seed: int = 3, resamples: int = 500) -> Interval:
    return bootstrap_mean(values, resamples=resamples, confidence=confidence, seed=seed)


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


def test_empty_and_nonfinite_values_are_refused() -> None:
    with pytest.raises(DataError, match="at least 1 value"):
        mean_of([])
    with pytest.raises(NonFiniteError, match="value 1 of 2"):
        mean_of([0.0, float("nan")])


def answers(*scores: float) -> list[Answer]:
    return [Answer(RewardInput(f"p{i}", "q", "r", (), (), True), {"gold": s}) for i, s in enumerate(scores)]


def test_higher_score_wins_and_close_scores_tie() -> None:
    a, b = answers(1.0, 2.0, 3.0, 0.0), answers(0.0, 2.0 + 1e-9, 4.0, -1.0)
    result = compare(a, b, "gold", **SETTINGS)
    assert result.preferences == (1.0, 0.5, 0.0, 1.0)
    assert result.win_rate.mean == (1 + 0.5 + 0 + 1) / 4
    assert result.verdicts == Verdicts(wins=2, losses=1, ties=1)


def test_win_rates_of_both_models_sum_to_one() -> None:
    a, b = answers(1.0, 2.0, 3.0, 0.0), answers(0.0, 2.0 + 1e-9, 4.0, -1.0)
    ours = compare(a, b, "gold", **SETTINGS).win_rate
    theirs = compare(b, a, "gold", **SETTINGS).win_rate
    assert theirs.mean == 1 - ours.mean
    assert (theirs.low, theirs.high) == pytest.approx((1 - ours.high, 1 - ours.low), abs=0.02)


def test_answers_to_different_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="same prompts"):
        compare(answers(1.0), answers(1.0, 2.0), "gold", **SETTINGS)


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


def test_equal_verdicts_have_a_wilson_interval() -> None:
    settings: dict[str, Any] = {"resamples": 100, "confidence": 0.95, "seed": 0}
    # z = 1.96: z^2 = 3.8415; n = 2: low = 1 / (1 + z^2 / n) = 0.3424; n = 50: 0.9287.
    found = win_rate([1.0, 1.0], **settings)
    assert (found.mean, found.high) == (1.0, 1.0) and found.low == pytest.approx(0.3424, abs=1e-4)
    assert win_rate([1.0] * 50, **settings).low == pytest.approx(0.9287, abs=1e-4)
    tied = win_rate([0.5] * 50, **settings)
    assert tied.low == pytest.approx(1 - tied.high) and tied.low == pytest.approx(0.3664, abs=1e-3)
    mixed = [1.0, 0.0, 1.0, 0.5]
    assert win_rate(mixed, **settings) == bootstrap_mean(mixed, **settings)


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
