"""What the configuration means for an evaluation, without a model.

- intervals have the configured level; that of a difference is paired
- an evaluation without a scored prompt is a failure of the rewards
- a judge that is in the policy's reward is detected
- another temperature than in training is warned of
- an adapter of DPO that its engine would round is served apart from its base
"""

import math
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.evaluation import scoring
from rlhf_core.evaluation.policy_files import PolicyFiles, dpo_files
from rlhf_core.evaluation.summary import Intervals, Measured, without_masked
from tests.support.evaluation_config import RULES, config_of


def test_interval_of_the_difference_is_paired() -> None:
    interval = Intervals(config_of(evaluate={"bootstrap": 500}))
    sft = [float(i) for i in range(40)]
    found = interval.by_model("gold", {"sft": sft, "ppo": [value + 1.0 for value in sft]})
    assert found["difference"]["ppo"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert found["ppo"]["low"] < found["sft"]["high"]


@pytest.mark.parametrize(
    ("measure", "rewards", "trained"),
    [
        ("reward_model", [{"type": "model"}], True),
        ("reward_model", [{"type": "model", "weight": 0.0}, *RULES], False),
        ("rules", [{"type": "model"}], False),
        ("rules", RULES, True),
        ("gold", [{"type": "model"}, {"type": "gold", "weight": 0.0}], False),
        ("gold", [{"type": "gold"}], True),
    ],
)
def test_judge_in_the_policys_reward_is_detected(measure: str, rewards: Any, trained: bool) -> None:
    assert scoring.trained_on(config_of(rewards), measure) is trained


@pytest.mark.parametrize(
    ("model", "weight", "trained"), [("m", 1.0, True), ("m", 0.0, False), ("other", 1.0, False)]
)
def test_a_language_model_that_rewards_is_no_independent_judge(
    model: str, weight: float, trained: bool
) -> None:
    service = {"url": "http://one/v1"}
    reward = service | {"type": "language_model", "model": model, "weight": weight}
    config = config_of([reward], evaluate={"language_model": service | {"model": "m"}})
    assert scoring.trained_on(config, "language_model") is trained


def test_an_outage_of_a_masked_source_is_not_a_mistake_in_the_data() -> None:
    values = {"sft": [1.0, 2.0], "ppo": [2.0, 3.0]}
    masked = {"sft": [math.nan, 1.0], "ppo": [1.0, math.nan]}
    measured = Measured({"gold": values, "rules": masked}, {}, {"ppo": [0.0, 0.0]}, ["a", "a"])
    with pytest.raises(RewardError, match=r"none of 2 held-out prompts .* masked \(on_error\) for rules;"):
        without_masked({"sft": [], "ppo": []}, measured)


@pytest.mark.parametrize(("confidence", "deviations"), [(0.5, 0.674), (0.95, 1.960)])
def test_intervals_have_the_configured_level(confidence: float, deviations: float) -> None:
    interval = Intervals(config_of(evaluate={"bootstrap": 1000, "confidence": confidence}))
    # Of 400 values, half of them 1 and half -1, the mean's standard deviation is 1/20; quantiles of the
    # normal distribution.
    found = interval.mean("kl", [1.0, -1.0] * 200)
    assert found.high - found.low == pytest.approx(2 * deviations / 20, rel=0.1)
    assert interval.confidence == confidence


def test_another_temperature_than_in_training_is_warned_of() -> None:
    from rlhf_core.config.consistency import unusual_settings

    same = config_of(ppo={"rewards": RULES, "temperature": 0.7}, evaluate={"prompts": 6})
    assert same.evaluation_temperature == 0.7
    assert not any("evaluate.temperature" in found for found in unusual_settings(same))
    other = config_of(ppo={"rewards": RULES, "temperature": 0.7}, evaluate={"temperature": 1.0})
    [warning] = [found for found in unusual_settings(other) if "evaluate.temperature" in found]
    assert "evaluate.temperature is 1, but the policy is trained at ppo.temperature=0.7" in warning


@pytest.mark.parametrize(
    ("dpo", "engine", "separate"),
    [
        ({}, "float32", False),
        ({"lora": {}}, "float32", False),
        ({"lora": {}}, "bfloat16", True),
        ({"lora": {}, "deepspeed": {"dtype": "bfloat16"}}, "float32", True),
        ({"lora": {"quantize": "nf4"}, "deepspeed": {"dtype": "bfloat16"}}, "float32", False),
        ({"lora": {"r": 1024}, "deepspeed": {"dtype": "bfloat16"}}, "float32", False),
    ],
)
def test_an_adapter_of_dpo_is_not_rounded(dpo: dict[str, Any], engine: str, separate: bool) -> None:
    config = config_of(dpo=dpo, ppo={"engine": {"dtype": engine}})
    files = dpo_files(config.dpo, config.ppo, Path("dpo"), lambda: Path("sft"))
    if separate:
        assert files == PolicyFiles(Path("sft/model"), Path("dpo/adapter"))
    else:
        assert files == PolicyFiles(Path("dpo/policy"))
