"""Evidence of a match and the levels of tests.

- the evidence is a mean of products, at its largest prefix; ties do not change it
- under the null hypothesis its mean is 1, and it exceeds 1 / level with a probability of at most the level
- the levels in any 365 days add up to at most the budget
- 52 matches of equal policies rarely promote one; a policy that wins 55 % is promoted within three weeks; the
  same with two judges, of which one favours each candidate
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from rlhf_core.tracking.gate import BETS, YEAR, Spent, log_evidence, next_level
from tests.benchmarks import promotion


def test_evidence_is_the_mean_over_bets_of_the_largest_prefix() -> None:
    # One win: (1.1 + 1.2 + 1.4) / 3. A loss after it does not reduce the largest value.
    assert math.exp(log_evidence([1])) == pytest.approx(3.7 / 3)
    assert log_evidence([1, -1]) == log_evidence([1]) == log_evidence([0, 1, 0])
    # A loss, then two wins, for each bet.
    last = sum((1 - bet) * (1 + bet) ** 2 for bet in BETS) / 3
    assert math.exp(log_evidence([-1, 1, 1])) == pytest.approx(last)
    assert log_evidence([]) == log_evidence([-1, -1]) == log_evidence([0, 0]) == 0.0


def test_all_sequences_of_12_prompts_keep_the_inequality() -> None:
    largest = []
    for outcomes in itertools.product((-1, 1), repeat=12):
        largest.append(log_evidence(outcomes))
    for level in (0.5, 0.2, 0.1):
        share = np.mean(np.array(largest) >= -math.log(level))
        assert 0 < share <= level


def test_evidence_of_long_matches_is_finite() -> None:
    assert log_evidence([1] * 200_000) == pytest.approx(200_000 * math.log(1.4) - math.log(3))


def test_levels_of_any_year_add_up_to_at_most_the_budget() -> None:
    chance = random.Random(0)
    for pause in (3600.0, 86400.0, 7 * 86400.0, 40 * 86400.0):
        now = 0.0
        spent: list[Spent] = []
        for _ in range(800):
            level = next_level(spent, now, 0.05)
            assert level > 0
            spent.append(Spent(now, level))
            now += chance.expovariate(1 / pause)
        for first in spent:
            within = [test.level for test in spent if first.time <= test.time < first.time + YEAR]
            assert sum(within) <= 0.05


def test_a_pause_makes_levels_larger_and_a_clock_set_back_does_not() -> None:
    week = YEAR / 52
    spent = [Spent(0.0, 0.0025)]
    assert next_level([], 0.0, 0.05) == pytest.approx(0.0025)  # a quarter of a fifth of 5 %
    assert next_level(spent, 0.0, 0.05) == pytest.approx(0.001875)  # a quarter of 1 % - 0.25 %
    assert next_level(spent, week, 0.05) == pytest.approx((0.0075 + 0.04 / 52) / 4)
    assert next_level(spent, YEAR, 0.05) == pytest.approx(0.0025)
    assert next_level(spent, -week, 0.05) == next_level(spent, 0.0, 0.05)


def test_a_clock_that_is_ahead_does_not_refill_the_budget() -> None:
    spent = [Spent(YEAR, 0.0025)]
    for number in range(20):
        spent.append(Spent(float(number), next_level(spent, float(number), 0.05)))
    assert sum(test.level for test in spent) < 0.0101  # a fifth of 5 %, and what accrues in 20 s


def test_the_simulation_uses_the_evidence_of_the_module() -> None:
    outcomes = promotion.matches(np.random.default_rng(1), 20, 64, 0.6, 0.2)
    assert {-1, 0, 1} == set(np.unique(outcomes))
    expected = [log_evidence(row) for row in outcomes]
    assert np.maximum(promotion.largest_log_evidence(outcomes), 0) == pytest.approx(expected)


def test_equal_policies_are_rarely_promoted_and_a_better_one_soon() -> None:
    chance = np.random.default_rng(0)
    shares = promotion.equal_policies(chance, 128, 0.1, histories=200)
    assert shares["interval"] > 0.5 and shares["changing champion"] > 0.5
    assert shares["present"] <= 0.05
    for after in (0, 52):
        share = promotion.better_policy(chance, promotion.LEAST_PROMPTS, 0.55, 0.0, after, histories=200)
        assert share >= 0.8


def test_a_judge_that_favours_each_candidate_does_not_promote_equal_policies() -> None:
    chance, least = np.random.default_rng(0), promotion.LEAST_PROMPTS_OF_TWO
    favoured = promotion.two_judges(chance, 1024, (0.55, 0.5), 52, histories=40)
    assert favoured["before"] > 0.9 and favoured["present"] <= 0.05
    for after in (0, 52):
        better = promotion.two_judges(chance, least, (0.55, 0.55), 3, after, histories=1000)
        assert better["present"] >= 0.8
