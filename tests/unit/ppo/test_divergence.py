"""Over-optimisation in the evaluations during PPO.

- a significant rise of the training score that the judge's score does not follow is found, also if both rose
  before; a rise within the noise, a judge that follows, and evaluations without a judge are not
- the guard warns once for each such evaluation, sets its metric, and ends the run if it is set to `stop`
- the sentence of the report says where the true reward or the judge is highest and what followed
"""

from __future__ import annotations

import logging

import pytest

from rlhf_core.config.guards import GuardsConfig
from rlhf_core.ppo.divergence import Divergence, divergence, in_words
from rlhf_core.ppo.guards import check_divergence

Found = dict[int, dict[str, float]]


def evaluations(*values: tuple[float, float], error: float = 0.05) -> Found:
    """(reward model's score, judge's score) of the versions 0, 10, 20, ..."""
    found: Found = {}
    for number, (score, judge) in enumerate(values):
        found[10 * number] = {
            "eval/score": score,
            "eval/reward_model": score,
            "eval/judge": judge,
            "eval/reward_model_error": error,
            "eval/judge_error": error,
        }
    return found


SOUND = evaluations((0.0, 0.0), (0.6, 0.5), (1.2, 0.9), (1.4, 1.0), (1.45, 0.98))
PARTED = evaluations((0.0, 0.0), (0.6, 0.5), (1.2, 0.6), (1.6, 0.5))


def test_a_rise_that_the_judge_does_not_follow_is_found() -> None:
    assert divergence(PARTED, 0.3) == Divergence(10, 30, pytest.approx(1.0), pytest.approx(0.0))


@pytest.mark.parametrize(
    "found",
    [
        {},
        evaluations((0.0, 0.0)),
        SOUND,
        # The same numbers with large errors.
        evaluations((0.6, 0.5), (1.6, 0.5), error=0.5),
        {
            version: {"eval/reward_model": row["eval/score"], "eval/reward_model_error": 0.05}
            for version, row in PARTED.items()
        },
    ],
)
def test_sound_and_unknown_evaluations_are_no_divergence(found: Found) -> None:
    assert divergence(found, 0.3) is None


def test_the_guard_warns_and_stops_where_it_is_set_to(caplog: pytest.LogCaptureFixture) -> None:
    metrics: dict[str, float] = {}
    with caplog.at_level(logging.WARNING):
        assert check_divergence(GuardsConfig(), PARTED, metrics) is None
    assert metrics == {"guards/overoptimization": 1.0}
    assert [record.guard for record in caplog.records] == ["overoptimization"]  # type: ignore[attr-defined]
    assert "risen by 1.00 since step 10" in caplog.text
    stopped = check_divergence(GuardsConfig(overoptimization="stop"), PARTED, metrics)
    assert stopped is not None and "raise ppo.kl.coef" in stopped
    assert check_divergence(GuardsConfig(), SOUND, metrics) is None
    assert metrics == {"guards/overoptimization": 0.0}
    assert check_divergence(GuardsConfig(overoptimization="off"), PARTED, off := {}) is None and off == {}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (PARTED, "From step 20 to step 30, the judge's score falls by 0.10 while the training score rises"),
        (evaluations((0.0, 0.0), (1.0, 0.5), (0.7, 0.4)), "falls by 0.10, and the training score by 0.30."),
        (evaluations((0.0, 0.0), (1.0, 0.5)), "The judge's score is highest in the last evaluation"),
        (evaluations((0.0, 0.0)), ""),
    ],
)  # fmt: skip
def test_the_report_says_what_followed_the_best_step(found: Found, text: str) -> None:
    sentence = in_words(found, "eval/judge", "The judge's score")
    assert text in sentence and bool(text) == bool(sentence)
