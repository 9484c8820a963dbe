"""The arithmetic of `tests.benchmarks.alarm`.

- gain, share and fall of the true reward by hand
- the lower bound of the true reward has the mean and the standard error worked out by hand
- a fall of the mean by more than the error is found, whichever earlier version it is from; equal policies
  raise an alarm in less than the level of the runs
- the published version is from before the alarm; gain and falls are those of all evaluations and prompts
- the guard warns at the steps of the movement if its judge has lost all agreement, and the true reward can be
  the judge
- further overrides reach the runs
- the choice and the warnings of a run are those of `rlhf_core`, and the same after the curves were stored
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.config.ppo import PPOConfig
from tests.benchmarks.alarm import (
    LEVEL,
    Run,
    best_of,
    command,
    falls,
    gold_present,
    judge_rule,
    load,
    lower_bounds,
    moves,
    paired,
    present,
    published,
    save,
    table_of_movement,
    table_of_over,
)


def run(
    gold: list[float], judge: list[np.ndarray] | None = None, correlations: list[float] | None = None
) -> Run:
    """Return a run with the versions 0, 2, 4, ...; four prompts unless `judge` has others."""
    columns, metrics = {}, {}
    for number, value in enumerate(gold):
        scores = judge[number] if judge else value + np.array([-0.1, 0.1, -0.1, 0.1])
        columns[2 * number] = {
            "reward_model": np.zeros(len(scores)),
            "judge": scores,
            "gold": np.full(len(scores), value),
            "kl": np.full(len(scores), float(number**2)),
            "length": np.full(len(scores), 10.0),
        }
        metrics[2 * number] = {
            "eval/kl": float(number**2),
            "eval/objective": float(scores.mean()),
            "eval/judge_correlation": correlations[number] if correlations else 0.8,
            "eval/judge_correlation_error": 0.02,
        }
    return Run("over", 0, metrics, columns)


def test_gain_share_and_fall_by_hand() -> None:
    found = run([-1.0, 0.0, 1.0, 0.5])
    assert (found.gain, found.peak) == (2.0, 4)
    assert [found.share(version) for version in found.versions] == [0.0, 0.5, 1.0, 0.75]
    assert [found.fall(version) for version in found.versions] == [0.0, 0.0, 0.0, 0.25]
    assert found.until(4).versions == [0, 2, 4] and found.every(4).versions == [0, 4, 6]


def test_the_lower_bound_by_hand() -> None:
    found = run([0.0, 0.0])
    first, now = found.columns[0], found.columns[2]
    first["reward_model"], first["judge"] = np.array([1.0, -1.0, 1.0, -1.0]), np.array([0.0, 0.0, 0.0, 0.0])
    now["judge"], now["kl"] = np.array([3.0, 3.0, 5.0, 5.0]), np.array([1.0, 3.0, 1.0, 3.0])
    # Variance of the differences 4/3, of an error 2/3. K = 2, so the mean is 4 - sqrt(2/3) sqrt(4).
    values = lower_bounds(found, 2)
    assert values.mean() == pytest.approx(4 - 2 * math.sqrt(2 / 3))
    # d sqrt(2 K) / dK = 1 / sqrt(2 K) = 1/2.
    assert values[1] - values[0] == pytest.approx(-math.sqrt(2 / 3) / 2 * 2)


def test_a_fall_is_found_from_any_earlier_version() -> None:
    draws = np.random.default_rng(0)
    scores = [level + 0.5 * draws.normal(size=400) for level in (0.0, 0.6, 0.4, 0.41)]
    assert paired(run([0.0] * 4, scores))
    assert not paired(run([0.0] * 4, [scores[0], scores[2], scores[2] + 0.01, scores[3]]))


def test_equal_policies_raise_an_alarm_in_less_than_the_level_of_the_runs() -> None:
    draws = np.random.default_rng(1)
    alarms = 0
    for _ in range(200):
        found = run([0.0] * 8, [draws.normal(size=60) for _ in range(8)])
        alarms += any(
            falls(found.until(version), lambda run, version: run.columns[version]["judge"])
            for version in found.versions[1:]
        )
    assert alarms <= LEVEL * 200


def test_the_published_version_is_from_before_the_alarm() -> None:
    found = run([0.0, 0.5, 1.0, 1.5])
    assert [published(found, alarm) for alarm in (None, 6, 4, 2)] == [6, 4, 2, 2]


def test_gain_and_falls_are_those_of_all_evaluations_and_prompts() -> None:
    found = run([0.0, 1.0, 0.5, 0.8])
    few = found.every(4)
    assert (few.versions, few.gain, few.peak, few.fall(4)) == ([0, 4, 6], 1.0, 2, 0.5)
    found.columns[2]["gold"] = np.array([2.0, 2.0, 0.0, 0.0])
    first, second = found.parts(2)
    assert first.columns[2]["gold"].tolist() == [2.0, 2.0]
    assert first.share(2) == second.share(2) == 1.0
    assert first.metrics[2]["eval/kl"] == 1.0 and first.until(4).fall(4) == 0.5


def test_the_guard_warns_at_the_steps_of_the_movement_if_the_judge_has_lost_all_agreement() -> None:
    found = run([0.0, 0.5, 1.0, 0.8, 0.4])
    # The square root of the KL: 0, 1, 2, 3 and then 3.2.
    found.metrics[8]["eval/kl"] = 3.2**2
    assert judge_rule(found, present).alarms == []
    assert judge_rule(found, moves).alarms == [4, 6]
    assert "| over | 0 | 4, 6 | 6 |" in table_of_movement([found])


def test_the_true_reward_can_be_the_judge() -> None:
    found = run([0.0, 0.5, 1.0, 0.8, 0.4])
    draws = np.random.default_rng(2)
    for version, columns in found.columns.items():
        columns["reward_model"] = draws.normal(size=400)
        # The correlation is 1, 1, 1, and then about 0.
        columns["gold"] = columns["reward_model"] if version < 6 else draws.normal(size=400)
    assert judge_rule(found, present).alarms == []
    assert judge_rule(found, gold_present).alarms == [8]


def test_further_overrides_reach_the_run() -> None:
    line = command(Path("home"), "over", 3, ["reward.judge.epochs=6"])
    assert line[-3:] == ["reward.judge.epochs=6", "--until", "ppo"]
    assert {"run.seed=3", "run.home=home", "ppo.kl.coef=0"} <= set(line)


def test_choice_and_warnings_are_those_of_the_stage_also_from_stored_curves(tmp_path: Path) -> None:
    found = run([0.0, 0.5, 1.0, 0.8, 0.4], correlations=[0.8, 0.7, 0.6, 0.3, 0.1])
    save([found], tmp_path / "curves.gz")
    for each in (found, *load(tmp_path / "curves.gz")):
        result = judge_rule(each, present)
        assert (result.chosen, result.alarms, result.in_time) == (4, [8], False)
        assert best_of(each, each.versions, PPOConfig(publish="best")) == 4
        assert "| 0 | 1.00 | 4 | 0.40 | 4: 1.00 | 8: 0.40, 0.60 | no |" in table_of_over([result])
