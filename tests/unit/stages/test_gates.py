"""A gate is asked when a stage has made its result, and holds for what was made earlier, too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import GateFailed
from rlhf_core.executors.child import NextStage
from rlhf_core.run.stage_runner import RetryPolicy, get_or_run_stage
from rlhf_core.stages import reward
from rlhf_core.stages.gates import check_gate
from rlhf_core.stages.training import accuracy_interval
from rlhf_core.testing import stage_context
from rlhf_core.types import ArtifactRef, PairExample


def accuracy(value: float, low: float = 0.51, prefix: str = "") -> dict[str, float]:
    return {f"{prefix}accuracy": value, f"{prefix}accuracy_low": low, f"{prefix}accuracy_high": 0.99}


def test_gate_names_accuracy_and_limit() -> None:
    config = config_from_tree({"reward": {"min_accuracy": 0.9}}, "test")
    good = accuracy(0.9)
    check_gate(config, "reward", good)
    check_gate(config, "sft", {})
    text = r"accuracy 0.899 \[0.510, 0.990\] is below reward.min_accuracy=0.9; train longer"
    with pytest.raises(GateFailed, match=text):
        check_gate(config, "reward", accuracy(0.899))
    members = accuracy(0.9, prefix="member_1/") | accuracy(0.899, prefix="member_2/")
    with pytest.raises(GateFailed, match=r"reward: held-out accuracy of member 2 0.899 \[.*\] is below"):
        check_gate(config, "reward", good | members)
    check_gate(config, "reward", good | {"ensemble/accuracy": 0.1, "member_1/margin": 0.1})


def test_an_accuracy_that_chance_can_have_fails() -> None:
    """A reward model that flips a coin passes the limit 0.55 with 20 held-out pairs in 41 % of the cases."""
    config = config_from_tree({"reward": {"min_accuracy": 0.55}}, "test")
    for right, passes in ((14, False), (15, True)):
        gap_P = torch.tensor([1.0] * right + [-1.0] * (20 - right))
        pairs = [PairExample(f"p{index}", "", (1,), (2,), (3,)) for index in range(20)]
        metrics = {"accuracy": right / 20} | accuracy_interval(gap_P, pairs)
        if passes:
            check_gate(config, "reward", metrics)
            continue
        text = r"0.700 \[0.481, 0.855\] is not significantly above chance \(0.5\); hold out more pairs"
        with pytest.raises(GateFailed, match=text):
            check_gate(config, "reward", metrics)
        check_gate(config_from_tree({"reward": {"min_accuracy": 0.0}}, "test"), "reward", metrics)
    with pytest.raises(GateFailed, match=r"no pair is held out to measure accuracy; raise data\.eval"):
        check_gate(config, "reward", {"accuracy": math.nan} | accuracy_interval(gap_P[:0], []))


def test_pairs_of_one_prompt_are_one_measurement_of_accuracy() -> None:
    gap_P = torch.tensor([1.0, 1.0, -1.0] * 20)
    apart = [PairExample(f"p{index}", "", (1,), (2,), (3,)) for index in range(60)]
    by_prompt = [PairExample(f"p{index // 30}", "", (1,), (2,), (3,)) for index in range(60)]
    by_group = [replace(pair, group=f"g{index // 30}") for index, pair in enumerate(apart)]
    assert accuracy_interval(gap_P, apart)["accuracy_low"] > 0.5
    assert accuracy_interval(gap_P, by_prompt)["accuracy_low"] < 0.5
    assert accuracy_interval(gap_P, by_prompt) == accuracy_interval(gap_P, by_group)


def test_a_reward_model_below_the_limit_fails_its_stage(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    config = config_from_tree({"run": {"device": "cpu"}, "reward": {"min_accuracy": 0.6}}, "test")
    context = stage_context(tmp_path, inputs={"data": tmp_path, "sft": tmp_path})
    assert reward.finish(config, context, "reward", accuracy(0.6)).metrics == accuracy(0.6)
    with pytest.raises(GateFailed, match=r"accuracy 0\.590 \[.*\] is below"):
        reward.finish(config, context, "reward", accuracy(0.59))


@pytest.mark.parametrize(("exchanged", "doubted"), [(0.74, False), (0.75, True), (0.83, True)])
def test_an_accuracy_that_exchanged_prompts_leave_as_it_is_is_a_warning(
    exchanged: float, doubted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer").mkdir()
    config = config_from_tree({"run": {"device": "cpu"}}, "test")
    context = stage_context(tmp_path, inputs={"data": tmp_path, "sft": tmp_path})
    reward.finish(config, context, "reward", accuracy(0.8, low=0.75) | {"accuracy_exchanged": exchanged})
    text = "the pairs do not show that the model reads the prompt"
    assert [text in message for message in caplog.messages] == [True] * doubted


def reused(config: PipelineConfig, made: ArtifactRef) -> None:
    """Reuse an artifact in a run with this configuration."""
    run: Any = SimpleNamespace(
        config=config,
        first_started={},
        ensure_parent=lambda: None,
        spec=lambda *_: None,
        find=lambda _spec: made,
        next_stage=NextStage(),
    )
    get_or_run_stage(run, made.kind, {}, RetryPolicy(0))


def test_reused_reward_model_below_the_limit_fails() -> None:
    config = config_from_tree({"reward": {"min_accuracy": 0.6}}, "test")
    with pytest.raises(GateFailed, match=r"accuracy 0\.590 \[.*\] is below"):
        reused(config, ArtifactRef("reward", "a" * 16, "digest", "/store/reward", accuracy(0.59)))


def test_a_reused_policy_whose_grader_agrees_too_little_fails() -> None:
    """Its agreement was measured when the policy was made, under another limit."""
    numbers = {"mean": 0.7, "low": 0.6, "high": 0.8, "pairs": 90.0}
    metrics = {f"reward_agreement/grader/{part}": value for part, value in numbers.items()}
    made = ArtifactRef("ppo", "a" * 16, "digest", "/store/ppo", metrics)
    grader = {"type": "language_model", "url": "http://one/v1", "model": "m"}

    def config_of(**settings: Any) -> PipelineConfig:
        rewards = [{"type": "model"}, grader | {"name": "grader"} | settings]
        return config_from_tree({"ppo": {"rewards": rewards}}, "test")

    text = r"reward grader \(m\) agrees with 0\.700 \[0\.600, 0\.800\] of 90 .* below min_agreement=0\.75"
    with pytest.raises(GateFailed, match=text):
        reused(config_of(min_agreement=0.75), made)
    by_chance = {**metrics, "reward_agreement/grader/low": 0.5}
    with pytest.raises(GateFailed, match="not significantly more often than by chance"):
        check_gate(config_of(), "ppo", by_chance)
    check_gate(config_of(), "ppo", metrics)
    check_gate(config_of(min_agreement=None), "ppo", by_chance)
    check_gate(config_of(min_agreement=0.75), "ppo", {"kl": 1.0})
