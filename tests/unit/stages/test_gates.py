"""A gate is asked when a stage has made its result, and holds for what was made earlier, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import GateFailed
from rlhf_core.run.next_stage import NextStage
from rlhf_core.run.retries import RetryPolicy
from rlhf_core.run.stage_runner import get_or_run_stage
from rlhf_core.stages import reward
from rlhf_core.stages.gates import check_gate
from rlhf_core.testing import stage_context
from rlhf_core.types import ArtifactRef


def test_gate_names_accuracy_and_limit() -> None:
    config = config_from_tree({"reward": {"min_accuracy": 0.9}}, "test")
    check_gate(config, "reward", {"accuracy": 0.9})
    check_gate(config, "sft", {})
    with pytest.raises(GateFailed, match=r"accuracy 0.899 is below reward.min_accuracy=0.9; train longer"):
        check_gate(config, "reward", {"accuracy": 0.899})
    with pytest.raises(GateFailed, match=r"reward: held-out accuracy of member 2 0.899 is below"):
        check_gate(config, "reward", {"accuracy": 0.9, "member_1/accuracy": 0.9, "member_2/accuracy": 0.899})
    check_gate(config, "reward", {"accuracy": 0.9, "ensemble/accuracy": 0.1, "member_1/margin": 0.1})


def test_a_reward_model_below_the_limit_fails_its_stage(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    config = config_from_tree({"run": {"device": "cpu"}, "reward": {"min_accuracy": 0.6}}, "test")
    context = stage_context(tmp_path, inputs={"data": tmp_path, "sft": tmp_path})
    assert reward.finish(config, context, "reward", {"accuracy": 0.6}).metrics == {"accuracy": 0.6}
    with pytest.raises(GateFailed, match=r"accuracy 0\.590 is below"):
        reward.finish(config, context, "reward", {"accuracy": 0.59})


def test_reused_reward_model_below_the_limit_fails(tmp_path: Path) -> None:
    config = config_from_tree({"reward": {"min_accuracy": 0.6}}, "test")
    made = ArtifactRef("reward", "a" * 16, "digest", "/store/reward", {"accuracy": 0.59})
    run: Any = SimpleNamespace(
        config=config,
        first_started={},
        ensure_parent=lambda: None,
        spec=lambda *_: None,
        find=lambda _spec: made,
        next_stage=NextStage(),
    )
    with pytest.raises(GateFailed, match=r"accuracy 0\.590 is below"):
        get_or_run_stage(run, "reward", {}, RetryPolicy(0))
