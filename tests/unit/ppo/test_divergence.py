"""Over-optimisation in the evaluations during PPO.

- the slope of the judge's score over the reward model's, and its standard error, have the values worked out
  by hand; responses without one of the scores are left out
- on responses of a tilted policy, the slope is the ratio of the rises that further tilting brings
- a slope far below that of the SFT model's responses is found if the KL still rises; one within its error, a
  policy that slows down, evaluations without a judge, and a judge that never agreed are not
- the guard warns for each such evaluation, sets its metric, and ends the run if it is set to `stop`
- the sentence of the report says where the true reward or the judge is highest and what followed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest

from rlhf_core.config.guards import GuardsConfig
from rlhf_core.ppo.divergence import Divergence, divergence, in_words, regression_slope
from rlhf_core.ppo.guards import check_divergence

Found = dict[int, dict[str, float]]


def test_the_slope_has_the_value_worked_out_by_hand() -> None:
    # Deviations of x: -1, 0, 1, of y: -1, -1, 2. Slope (1 + 0 + 2) / 2 = 1.5.
    # Residuals: -1 + 1.5 = 0.5, -1, 2 - 1.5 = 0.5. Error sqrt(0.25 + 0 + 0.25) / 2.
    slope, error = regression_slope([1.0, 2.0, 3.0, math.nan, 9.0], [0.0, 0.0, 3.0, 5.0, math.nan])
    assert (slope, error) == (pytest.approx(1.5), pytest.approx(math.sqrt(0.5) / 2))


@pytest.mark.parametrize(("x", "y"), [([1.0, 2.0], [1.0, 2.0]), ([1.0] * 4, [1.0, 2.0, 3.0, 4.0]), ([], [])])
def test_a_slope_that_is_not_defined_is_nan(x: list[float], y: list[float]) -> None:
    assert all(math.isnan(value) for value in regression_slope(x, y))


def test_the_slope_is_the_ratio_of_the_rises_that_more_tilting_brings() -> None:
    """A policy over eight responses, tilted by exp(t r): exact means at t and t + dt."""
    draws = np.random.default_rng(3)
    reward, judge = draws.normal(size=(2, 8))
    t, dt = 0.7, 1e-5

    def means(tilt: float) -> np.ndarray:
        weights = np.exp(tilt * reward)
        return np.stack([reward, judge]) @ (weights / weights.sum())

    rise_of_reward, rise_of_judge = means(t + dt) - means(t)
    # Responses in the proportions of the tilted policy.
    shares = np.exp(t * reward) / np.exp(t * reward).sum()
    counts = np.round(shares * 200_000).astype(int)
    slope, _ = regression_slope(np.repeat(reward, counts).tolist(), np.repeat(judge, counts).tolist())
    assert slope == pytest.approx(rise_of_judge / rise_of_reward, rel=1e-3)


def evaluations(*slopes: float, kl: Sequence[float] = (0.0, 1.0, 4.0)) -> Found:
    """Of the versions 0, 10, 20."""
    return {
        10 * number: {"eval/judge_slope": slope, "eval/judge_slope_error": 0.05, "eval/kl": kl[number]}
        for number, slope in enumerate(slopes)
    }


def test_a_slope_that_falls_is_found() -> None:
    assert divergence(evaluations(0.8, 0.6, 0.3), 0.5) == Divergence(20, 0.3, 0.8, 4.0)


@pytest.mark.parametrize(
    "found",
    [
        {},
        evaluations(0.8),
        evaluations(0.8, 0.6, 0.45),
        evaluations(0.8, 0.6, 0.36),  # 0.36 + 0.05 is not below 0.4
        evaluations(0.8, 0.6, 0.3, kl=(0.0, 1.0, 3.9)),  # 0.97 in ten steps after 1 in ten steps
        evaluations(0.8, 0.6, 0.3, kl=(0.0, 1.0, -0.1)),
        evaluations(0.8, 0.3, 0.6),  # of the last evaluation only
        evaluations(0.09, -0.4),  # did not agree on the SFT model's responses
        evaluations(0.8, math.nan),
        {version: {"eval/score": 1.0, "eval/kl": version} for version in (0, 10)},
    ],
)
def test_sound_and_unknown_evaluations_are_no_divergence(found: Found) -> None:
    assert divergence(found, 0.5) is None


def test_the_guard_warns_and_stops_where_it_is_set_to(caplog: pytest.LogCaptureFixture) -> None:
    metrics: dict[str, float] = {}
    fallen, sound = evaluations(0.8, 0.6, 0.3), evaluations(0.8, 0.6)
    with caplog.at_level(logging.WARNING):
        assert check_divergence(GuardsConfig(), fallen, metrics) is None
    assert metrics == {"guards/overoptimization": 1.0}
    assert [record.guard for record in caplog.records] == ["overoptimization"]  # type: ignore[attr-defined]
    assert "step 20" in caplog.text and "rises by 0.30 for each unit" in caplog.text
    stopped = check_divergence(GuardsConfig(overoptimization="stop"), fallen, metrics)
    assert stopped is not None and "raise ppo.kl.coef" in stopped
    assert check_divergence(GuardsConfig(), sound, metrics) is None
    assert metrics == {"guards/overoptimization": 0.0}
    assert check_divergence(GuardsConfig(overoptimization="off"), fallen, off := {}) is None and off == {}


def scored(*values: tuple[float, float]) -> Found:
    """(training score, judge's score) of the versions 0, 10, 20, ..."""
    return {
        10 * number: {"eval/score": score, "eval/judge": judge}
        for number, (score, judge) in enumerate(values)
    }


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
def test_the_report_says_what_followed_the_best_step(found: Found, text: str) -> None:
    sentence = in_words(found, "eval/judge", "The judge's score")
    assert text in sentence and bool(text) == bool(sentence)
