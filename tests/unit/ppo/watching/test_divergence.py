"""Over-optimisation in the evaluations during PPO.

- the correlation of two scores and its standard error have the values worked out by hand; responses without
  one of the scores are left out
- on responses of a tilted policy, it is the ratio of the rises that further tilting brings
- a correlation far below that over the SFT model's responses is found if the KL still rises, in two
  consecutive evaluations; one within its error, a policy that slows down, evaluations without a judge, and a
  judge that never agreed are not
- the guard warns for each such evaluation, sets its metric, and ends the run if it is set to `stop`
- responses with less than half of the SFT model's share of distinct word pairs raise a guard of their own
- the sentence of the report says where the true reward or the judge is highest and what followed; a fall
  within its standard error is none
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import GuardAction, GuardName
from rlhf_core.ppo.watching.guards import Divergence, check_evaluations, correlation, divergence, in_words

Found = dict[int, dict[str, float]]


def test_the_correlation_has_the_value_worked_out_by_hand() -> None:
    # Deviations of x: -1, 0, 1, of y: -1, -1, 2. Products 1 + 0 + 2 = 3, squares 2 and 6: 3 / sqrt(12).
    value, error = correlation([1.0, 2.0, 3.0, math.nan, 9.0], [0.0, 0.0, 3.0, 5.0, math.nan])
    assert value == pytest.approx(3 / math.sqrt(12))
    assert error == pytest.approx((1 - 9 / 12) / math.sqrt(2))


def test_related_points_count_once_in_the_error_of_a_correlation() -> None:
    x, y = np.random.default_rng(5).normal(size=(2, 100)).tolist()
    value, error = correlation(x, y)
    assert correlation(x, y, [str(index) for index in range(100)]) == (value, error)
    groups = [str(index // 8) for index in range(800)]
    of_copies, error_of_copies = correlation(np.repeat(x, 8).tolist(), np.repeat(y, 8).tolist(), groups)
    # Up to the correction of the intervals for few groups.
    assert (of_copies, error_of_copies) == pytest.approx((value, error), rel=0.02)


@pytest.mark.parametrize(("x", "y"), [([1.0, 2.0], [1.0, 2.0]), ([1.0] * 4, [1.0, 2.0, 3.0, 4.0]), ([], [])])
def test_a_correlation_that_is_not_defined_is_nan(x: list[float], y: list[float]) -> None:
    assert all(math.isnan(value) for value in correlation(x, y))


def test_the_correlation_is_the_ratio_of_the_rises_that_more_tilting_brings() -> None:
    """A policy over eight responses, tilted by exp(t r): exact means at t and t + dt, in standard
    deviations.
    """
    draws = np.random.default_rng(3)
    scores = draws.normal(size=(2, 8))  # of reward model and judge
    t, dt = 0.7, 1e-5

    def probabilities(tilt: float) -> np.ndarray:
        weights = np.exp(tilt * scores[0])
        shares: np.ndarray = weights / weights.sum()
        return shares

    now = probabilities(t)
    deviation = np.sqrt(scores**2 @ now - (scores @ now) ** 2)
    of_reward, of_judge = (scores @ probabilities(t + dt) - scores @ now) / deviation
    # Responses in the proportions of the tilted policy.
    counts = np.round(now * 200_000).astype(int)
    value, _ = correlation(np.repeat(scores[0], counts).tolist(), np.repeat(scores[1], counts).tolist())
    assert value == pytest.approx(of_judge / of_reward, rel=1e-3)


def evaluations(*values: float, kl: Sequence[float] = (0.0, 1.0, 4.0, 9.0)) -> Found:
    """Return evaluations of the versions 0, 10, 20, 30."""
    return {
        10 * number: {
            "eval/judge_correlation": value,
            "eval/judge_correlation_error": 0.05,
            "eval/kl": kl[number],
        }
        for number, value in enumerate(values)
    }


@pytest.mark.parametrize("rounding", [0.0, 1e-9, -1e-6])
def test_the_first_two_evaluations_can_show_it_whatever_the_rounding_of_the_kl(rounding: float) -> None:
    assert divergence(evaluations(0.8, 0.3, 0.3, kl=(rounding, 1.0, 4.0)), 0.5) is not None


def test_a_correlation_that_falls_is_found() -> None:
    assert divergence(evaluations(0.8, 0.6, 0.35, 0.3), 0.5) == Divergence(30, 0.3, 0.8, 9.0)


@pytest.mark.parametrize(
    "found",
    [
        {},
        evaluations(0.8),
        evaluations(0.8, 0.3),
        evaluations(0.8, 0.6, 0.6, 0.3),  # in one evaluation
        evaluations(0.8, 0.3, 0.6, 0.3),
        evaluations(0.8, 0.3, 0.45),
        evaluations(0.8, 0.3, 0.36),  # 0.36 + 0.05 is not below 0.4
        evaluations(0.8, 0.3, 0.3, kl=(0.0, 1.0, 3.5)),  # 0.87 in ten steps after 1 in ten steps
        evaluations(0.8, 0.3, 0.3, kl=(0.4, 1.4, 3.9)),
        evaluations(0.8, 0.3, 0.3, kl=(0.0, 1.0, math.nan)),
        evaluations(0.8, 0.3, 0.3, kl=(0.0, 1.0, -0.1)),
        evaluations(0.8, 0.3, 0.3, 0.6),  # not in the last one
        evaluations(0.09, -0.4, -0.4),  # did not agree on the SFT model's responses
        evaluations(0.8, 0.3, math.nan),
        {version: {"eval/score": 1.0, "eval/kl": version} for version in (0, 10)},
    ],
)
def test_sound_and_unknown_evaluations_are_no_divergence(found: Found) -> None:
    assert divergence(found, 0.5) is None


def test_the_guard_warns_and_stops_where_it_is_set_to(caplog: pytest.LogCaptureFixture) -> None:
    metrics: dict[str, float] = {}
    fallen, sound = evaluations(0.8, 0.3, 0.3), evaluations(0.8, 0.3)
    with caplog.at_level(logging.WARNING):
        assert check_evaluations(PPOConfig(), fallen, metrics) is None
    assert metrics == {"warnings/overoptimization": 1.0, "warnings/diversity_loss": 0.0}
    assert [record.guard for record in caplog.records] == ["overoptimization"]  # type: ignore[attr-defined]
    assert "step 20" in caplog.text and "a correlation of 0.30" in caplog.text
    stopped = check_evaluations(PPOConfig(guards={"overoptimization": "stop"}), fallen, metrics)
    assert stopped is not None and "raise ppo.kl.coef" in stopped
    assert check_evaluations(PPOConfig(), sound, metrics) is None
    assert metrics == {"warnings/overoptimization": 0.0, "warnings/diversity_loss": 0.0}
    off: dict[str, float] = {}
    nothing: dict[GuardName, GuardAction] = {"overoptimization": "off", "diversity_loss": "off"}
    assert check_evaluations(PPOConfig(guards=nothing), fallen, off) is None and off == {}


@pytest.mark.parametrize(
    ("shares", "raised"),
    [
        ((0.33, 0.33), False),
        ((0.33, 0.27, 0.21), False),  # the demo at its end
        ((0.24, 0.14, 0.11), True),  # deployments/configs/overoptimization.yaml, where the gold reward falls
        ((0.24, 0.11, 0.2), False),  # the last evaluation counts
        ((0.24,), False),
        ((0.0, 0.0), False),
    ],
)
def test_responses_that_become_alike_raise_a_guard_of_their_own(
    shares: tuple[float, ...], raised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = {10 * number: {"eval/distinct_2": share} for number, share in enumerate(shares)}
    metrics: dict[str, float] = {}
    assert check_evaluations(PPOConfig(), found, metrics) is None, "a warning, and no end of the run"
    assert metrics["warnings/diversity_loss"] == raised
    assert [record.guard for record in caplog.records] == ["diversity_loss"] * raised  # type: ignore[attr-defined]
    stopped = check_evaluations(PPOConfig(guards={"diversity_loss": "stop"}), found, metrics)
    assert (stopped is not None) == raised
    if stopped is not None:
        assert "step 20: 11.0% of the word pairs" in stopped and "24.0% in the SFT model's" in stopped
    assert check_evaluations(PPOConfig(guard_limits={"diversity_loss": 0.1}), found, metrics) is None
    assert metrics["warnings/diversity_loss"] == 0.0


def scored(*values: tuple[float, float]) -> Found:
    """(training score, judge's score) of the versions 0, 10, 20, ..."""
    return {
        10 * number: {"eval/score": score, "eval/judge": judge}
        for number, (score, judge) in enumerate(values)
    }


def test_a_fall_within_its_error_is_none() -> None:
    found = scored((0.0, 0.0), (1.0, 0.5), (1.1, 0.498))
    found[20]["eval/judge_change_error"] = 0.08
    sentence = in_words(found, "eval/judge", "The judge's score")
    assert "does not change measurably (-0.00, standard error 0.08)" in sentence
    found[20]["eval/judge_change_error"] = 0.001
    assert "falls by 0.00 while" in in_words(found, "eval/judge", "The judge's score")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (scored((0.0, 0.0), (0.6, 0.5), (1.2, 0.6), (1.6, 0.5)),
         "From step 20 to step 30, the judge's score falls by 0.10 while the training score rises"),
        (scored((0.0, 0.0), (1.0, 0.5), (0.7, 0.4)), "falls by 0.10, and the training score by 0.30."),
        (scored((0.0, 0.0), (1.0, 0.5)), "The judge's score is highest in the last evaluation"),
        (scored((0.0, 0.0)), ""),
    ],
)  # fmt: skip
def test_the_report_describes_what_followed_the_best_step(found: Found, text: str) -> None:
    sentence = in_words(found, "eval/judge", "The judge's score")
    assert text in sentence and bool(text) == bool(sentence)
