"""The rules for the champion, each of them a test at a level.

- no champion below `min_win_rate` or with fewer than `min_prompts`; the first one must beat its SFT model
  significantly
- a match is an exact sign test; a candidate that loses by the champion's own reward model does not win it
- without a match only numbers of the same judge are compared, by a test of their difference
- candidates that are no better than the champion replace it with a total probability of at most alpha
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhf_core.evaluation.statistics import Verdicts
from rlhf_core.tracking.gate import Evaluation, Gate, Match, decide
from tests.benchmarks.gate_errors import crowned_at_least_once

GATE = Gate(0.5)


def record(wins: int = 80, prompts: int = 100, **fields: Any) -> Evaluation:
    return Evaluation(wins / prompts, wins, prompts - wins, **fields)


def match(wins: int, prompts: int = 100, **fields: Any) -> Match:
    return Match(wins / prompts, 0.0, 1.0, prompts, wins, prompts - wins, **fields)


@pytest.mark.parametrize(
    ("candidate", "becomes", "rule"),
    [
        (record(80), True, "first"),
        (record(51), False, "first"),
        (record(60), False, "first"),  # p = 0.028
        (record(61), True, "first"),  # p = 0.018
        (record(49), False, "min_win_rate"),
        (record(49, 49), False, "min_prompts"),
        (record(2, 2), False, "min_prompts"),
    ],
)
def test_the_first_champion_beats_its_sft_model_beyond_doubt(
    candidate: Evaluation, becomes: bool, rule: str
) -> None:
    decision = decide(candidate, None, gate=GATE)
    assert (decision.champion, decision.rule) == (becomes, rule), decision.reason


@pytest.mark.parametrize(
    ("played", "becomes", "rule"),
    [
        (match(61), True, "match"),
        (match(60), False, "match"),
        (match(2, 2), False, "min_prompts"),
        (match(70, judge="reward_model", away_win_rate=0.55), True, "match"),
        (match(70, judge="reward_model", away_win_rate=0.45), False, "away"),
        (match(70, judge="reward_model"), True, "match"),
    ],
)
def test_match_must_be_significant_under_both_judges(played: Match, becomes: bool, rule: str) -> None:
    better = record(gold_reward=9.0, gold_error=0.1, gold_digest="g")
    decision = decide(record(), better, played, gate=GATE)
    assert (decision.champion, decision.rule) == (becomes, rule), decision.reason
    assert decide(record(49), better, played, gate=GATE).rule == "min_win_rate"


def test_the_reason_says_that_only_the_candidates_reward_model_judged() -> None:
    decision = decide(record(), record(), match(70, judge="reward_model"), gate=GATE)
    assert "only the candidate's judged" in decision.reason and "test 1 at level 0.025" in decision.reason


GOLD = record(
    judge="gold", judge_digest="g", gold_reward=1.0, gold_error=0.05, gold_digest="g", sft_digest="s"
)
MODEL = record(
    judge="reward_model", judge_digest="m", reward_model=1.0, reward_model_error=0.05,
    reward_model_digest="m", sft_digest="s"
)  # fmt: skip


@pytest.mark.parametrize(
    ("candidate", "champion", "becomes", "rule"),
    [
        (replace(GOLD, gold_reward=1.2), GOLD, True, "gold_reward"),  # 2.8 standard errors
        (replace(GOLD, gold_reward=1.1), GOLD, False, "gold_reward"),  # 1.4
        (GOLD, replace(GOLD, gold_reward=1.2), False, "gold_reward"),
        (replace(MODEL, reward_model=1.2), MODEL, True, "reward_model"),
        (replace(MODEL, reward_model=9.0, reward_model_digest="other", judge_digest="other"), MODEL, False,
            "incomparable"),
        # The review's case: 0.96 by a reward model against 0.95 by the true reward.
        (replace(MODEL, win_rate=0.96, wins=96, losses=4), replace(GOLD, win_rate=0.95, wins=95, losses=5),
            False, "incomparable"),
        (record(96, judge="rules", judge_digest="r", sft_digest="s"),
            record(80, judge="rules", judge_digest="r", sft_digest="s"), True, "win_rate"),
        (record(81, judge="rules", judge_digest="r", sft_digest="s"),
            record(80, judge="rules", judge_digest="r", sft_digest="s"), False, "win_rate"),
        (record(96, judge="rules", judge_digest="r", sft_digest="s"),
            record(80, judge="rules", judge_digest="r", sft_digest="t"), False, "incomparable"),
        (record(96, judge="rules", judge_digest="r", sft_digest="s"),
            record(80, judge="rules", judge_digest="q", sft_digest="s"), False, "incomparable"),
        (record(96), record(80), False, "incomparable"),  # records of older code
        (replace(GOLD, gold_reward=1.2), Evaluation(0.5, gold_reward=1.0), False, "min_prompts"),
    ],
)  # fmt: skip
def test_records_of_different_judges_are_not_compared(
    candidate: Evaluation, champion: Evaluation, becomes: bool, rule: str
) -> None:
    decision = decide(candidate, champion, gate=GATE)
    assert (decision.champion, decision.rule) == (becomes, rule), decision.reason


def test_the_levels_of_all_tests_add_up_to_alpha() -> None:
    assert GATE.level(1) == 0.025
    assert sum(map(GATE.level, range(1, 10_001))) == pytest.approx(0.05, abs=1e-5)


def test_52_retrainings_of_equal_policies_crown_no_more_often_than_alpha() -> None:
    chance = np.random.default_rng(0)
    old, new = crowned_at_least_once(chance, runs=2000, matches=52, prompts=128, ties=0.1, gate=GATE)
    assert old > 0.5
    # 2,000 runs: a standard error of 0.005.
    assert new <= GATE.alpha


def test_the_sign_test_of_the_simulation_is_that_of_the_gate() -> None:
    assert Verdicts(61, 39, 0).p_value == pytest.approx(0.0176, abs=1e-4)
