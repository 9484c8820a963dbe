"""The conditions under which PPO skips a step, warns, or stops.

- log-probabilities of engines that differ by more than float32 rounding are a WeightSyncError; half of that
  limit is an alarm; without the canary there is only the alarm
- a KL above its limit for three steps in a row, or 90 % of empty responses, end the stage; one step, or 20 %,
  do not
- a step with numbers that are not finite is skipped; the third in a row ends the stage
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import GateFailed, NonFiniteError, WeightSyncError
from rlhf_core.ppo.watching.step_checks import StepChecks

GOOD = {
    "objective/kl": 1.0,
    "objective/rlhf_reward": 0.5,
    "policy/entropy": 1.0,
    "rollout/logprob_gap_mean": 1e-6,
    "rollout/empty_rate": 0.0,
    "rollout/repeating_rate": 0.0,
    "rollout/eos_rate": 0.9,
    "rollout/length": 100.0,
    "rollout/score_length_correlation": 0.3,
    "value/explained_variance": 0.5,
    "objective/score_clipfrac": 0.0,
    "objective/scores": 0.5,
    "objective/scores_std": 1.0,
    "rollout/unscored": 0.0,
}


def metrics(**changed: float) -> dict[str, float]:
    return GOOD | {name.replace("__", "/"): value for name, value in changed.items()}


def checks_of(**ppo: Any) -> StepChecks:
    return StepChecks(config_from_tree({"ppo": {"max_kl": 20.0, **ppo}}, "test").ppo)


@pytest.fixture
def checks() -> StepChecks:
    return checks_of()


def test_engines_with_other_weights_stop_the_run(checks: StepChecks) -> None:
    checks.verify(metrics(), 1)
    with pytest.raises(WeightSyncError, match=r"ppo step 2: engines and trainer differ by 0\.3"):
        checks.verify(metrics(rollout__logprob_gap_mean=0.3), 2)


@pytest.mark.parametrize(
    ("dtype", "limit", "quiet", "loud"),
    [("float32", 1e-3, 4e-4, 6e-4), ("bfloat16", 1e-3, 0.024, 0.026), ("bfloat16", 0.08, 0.039, 0.041)],
)
def test_an_engine_gap_warns_before_it_stops_the_run(
    caplog: pytest.LogCaptureFixture, dtype: str, limit: float, quiet: float, loud: float
) -> None:
    sync = {"canary_tolerance": limit}
    checks = checks_of(policy_deepspeed={"dtype": dtype}, engine={"dtype": dtype}, weight_sync=sync)
    for step, (gap, alarm) in enumerate(((quiet, 0.0), (loud, 1.0)), start=1):
        found = metrics(rollout__logprob_gap_mean=gap)
        checks.verify(found, step)
        assert found["rollout/logprob_gap_alarm"] == alarm
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"step 2: engine and trainer log-probabilities differ by {loud:.3g} on average"]


def test_without_the_canary_a_gap_only_warns() -> None:
    found = metrics(rollout__logprob_gap_mean=0.3)
    checks_of(weight_sync={"canary": False}).verify(found, 1)
    assert found["rollout/logprob_gap_alarm"] == 1.0


def test_rollouts_of_an_older_policy_are_not_compared(checks: StepChecks) -> None:
    checks.verify(metrics(rollout__logprob_gap_mean=0.3, rollout__staleness=1.0), 2)
    with pytest.raises(WeightSyncError):
        checks.verify(metrics(rollout__logprob_gap_mean=0.3, rollout__staleness=0.0), 1)


def test_a_high_kl_stops_the_run_after_three_steps() -> None:
    checks = checks_of()
    for step, kl in enumerate((21.0, 30.0, 19.0, 21.0, 21.0), start=1):
        checks.verify(metrics(objective__kl=kl), step)
    with pytest.raises(
        GateFailed,
        match=r"ppo step 6: KL 25\.0 has been above ppo\.max_kl=20 for three steps; .* continue from the last"
        " checkpoint$",
    ):
        checks.verify(metrics(objective__kl=25.0), 6)


def test_many_empty_responses_warn_and_then_stop_the_run(
    checks: StepChecks, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        checks.verify(metrics(rollout__empty_rate=0.19), 1)
        assert not caplog.records
        checks.verify(metrics(rollout__empty_rate=0.2), 2)
    assert "step 2: 20 % of the responses are empty" in caplog.text
    with pytest.raises(
        GateFailed, match="ppo step 3: 90% of the responses are empty; the policy has collapsed"
    ):
        checks.verify(metrics(rollout__empty_rate=0.9), 3)


def test_equal_scores_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    checks = checks_of(algorithm="grpo", samples_per_prompt=4)
    same = {"rollout__zero_variance_groups": 0.9}
    for step, changed in enumerate(({}, same, same, {}, {"objective__scores_std": 0.0})):
        checks.verify(metrics(**changed), step)
    messages = [record.getMessage().split(";")[0] for record in caplog.records]
    assert messages == [
        (
            "step 1: nearly all scores that are compared with each other are equal, so nothing is learned"
            " from them"
        ),
        (
            "step 4: nearly all scores that are compared with each other are equal, so nothing is learned"
            " from them"
        ),
    ]


def test_equal_scores_are_expected_if_a_teacher_alone_trains_the_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for rewards in ([], [{"type": "repetition", "weight": 0}]):
        checks = checks_of(teacher={"path": "./teacher"}, rewards=rewards)
        checks.verify(metrics(objective__scores=0.0, objective__scores_std=0.0), 1)
    assert not caplog.records


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp"])
def test_equal_scores_of_a_prompt_are_no_reason_to_warn_if_prompts_are_compared(
    algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    checks = checks_of(algorithm=algorithm, samples_per_prompt=4)
    found = metrics(rollout__zero_variance_groups=1.0)
    checks.verify(found, 1)
    assert found["warnings/uniform_scores"] == 0.0
    assert not caplog.records
    checks.verify(metrics(objective__scores_std=0.0), 2)
    assert "scores that are compared with each other are equal" in caplog.text


def test_scores_that_are_all_0_name_prompts_and_model(
    checks: StepChecks, caplog: pytest.LogCaptureFixture
) -> None:
    checks.verify(metrics(objective__scores=0.0, objective__scores_std=0.0), 1)
    assert "step 1: all scores are 0, so nothing is learned from them; use easier prompts" in caplog.text


BECOME_NAN = [
    "objective__kl",
    "objective__rlhf_reward",
    "policy__entropy",
    "value__mean",
    "rollout__logprob_gap_mean",
]


@pytest.mark.parametrize("name", BECOME_NAN)
def test_three_nonfinite_steps_in_a_row_end_the_stage(checks: StepChecks, name: str) -> None:
    bad = metrics(**{name: float("nan")})
    assert checks.is_finite(metrics(), 4, 1)
    assert not checks.is_finite(bad, 4, 2) and not checks.is_finite(bad, 4, 3)
    assert checks.is_finite(metrics(), 4, 4)
    assert not checks.is_finite(bad, 4, 5) and not checks.is_finite(bad, 4, 6)
    with pytest.raises(NonFiniteError, match=r"ppo steps 5 to 7 had to be skipped: .* not finite"):
        checks.is_finite(bad, 4, 7)


def test_a_step_without_any_score_is_skipped(checks: StepChecks) -> None:
    assert not checks.is_finite(metrics(rollout__unscored=4.0), 4, 1)
    assert checks.is_finite(metrics(rollout__unscored=3.0), 4, 2)
