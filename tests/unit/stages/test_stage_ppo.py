"""What the stage `ppo` leaves, with a worker whose model is scripted (the integration tests use real ones).

- the critic starts from the reward model only where that gives the rewards
- `policy` has the weights of the last step and `policy_ema` their average if there is one, or `policy` has
  the average with `publish: average`; both with the tokenizer
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import LoraConfig
from rlhf_core.ppo.controller import PPOController
from rlhf_core.stages import ppo
from rlhf_core.system.overriding import override
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.fleet import ScriptedFleet, ScriptedRank
from rlhf_core.testing.trainer import ScriptedTrainer


class SavedBySelf(torch.nn.Module):
    """A model with the method that saves it."""

    save = None


class Model(ScriptedTrainer):
    """A training engine that saves the name of its weights."""

    name = "last"
    dtype: torch.dtype | None = None
    """Precision of the saved weights, if it is another one."""

    @override
    def restore_average(self) -> None:
        self.name = "average"

    @override
    def save_model(self, folder: Path, save: Any, *, dtype: Any = None) -> None:
        self.dtype = dtype
        folder.mkdir()
        (folder / "model.safetensors").write_text(self.name)


class Controller(PPOController):
    """Trains nothing."""

    def __init__(self, config: PipelineConfig, fleet: Any, *given: Any, **more: Any) -> None:
        # Rewards that read text must get it as the reward model was trained on it.
        assert given[1]([7, 8]) == '!"'
        self._fleet, self._context, self._out = fleet, given[3], given[3].output
        self.completed_steps = config.ppo.steps

    def run(self) -> None:
        (self._out / "metrics.jsonl").write_text('{"step": 1, "objective/kl": 2.5}\n')


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the stage with this section `ppo`; returns what it leaves."""
    monkeypatch.setattr("rlhf_core.ppo.controller.PPOController", Controller)
    ranks: Any = {"policy": [ScriptedRank({"policy": Model(SavedBySelf())})]}
    monkeypatch.setattr(
        "rlhf_core.ppo.fleet.Fleet", lambda config, *_given: ScriptedFleet(config, ranks=ranks)
    )
    inputs = {name: tmp_path / name for name in ("data", "sft", "reward")}
    write_data_artifact(inputs["data"])
    context = stage_context(tmp_path, inputs=inputs)

    def run(**section: Any) -> Path:
        config = PipelineConfig.model_validate({"run": {"device": "cpu"}, "ppo": section})
        assert ppo.run(config, context).metrics == {"kl": 2.5, "steps": float(config.ppo.steps)}
        return context.output

    return run


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {"policy": "last"}),
        ({"ema_decay": 0.9}, {"policy": "last", "policy_ema": "average"}),
        ({"ema_decay": 0.9, "publish": "average"}, {"policy": "average"}),
    ],
)
def test_average_of_weights_is_saved_next_to_the_policy_or_published(
    run: Callable[..., Path], section: dict[str, Any], expected: dict[str, str]
) -> None:
    out = run(**section)
    assert {file.parent.name: file.read_text() for file in out.rglob("model.safetensors")} == expected
    assert {file.parent.name for file in out.rglob("tokenizer.json")} == set(expected)


@pytest.mark.parametrize(("lora", "dtype"), [(None, None), (LoraConfig(), torch.float32)])
def test_a_policy_with_an_adapter_is_saved_in_float32(
    lora: LoraConfig | None, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """A merge that is rounded to bfloat16 would be another policy."""
    model = Model(SavedBySelf())
    model.lora = lora
    ScriptedRank({"policy": model}).save_model("policy", str(tmp_path / "policy"))
    assert model.dtype == dtype


@pytest.mark.parametrize(
    ("rewards", "critic"),
    [
        ([{"type": "model"}], "reward"),
        ([{"type": "format", "pattern": "a"}], "sft"),
        ([{"type": "model"}, {"type": "format", "pattern": "a"}], "reward"),
        ([{"type": "model", "weight": 0.0}, {"type": "format", "pattern": "a"}], "sft"),
    ],
)
def test_critic_starts_from_reward_model_only_if_it_scores(
    rewards: list[dict[str, Any]], critic: str, tmp_path: Path
) -> None:
    config = config_from_tree({"ppo": {"rewards": rewards}}, "test")
    inputs = {name: Path(name) for name in ("data", "sft", "reward")}
    context = stage_context(tmp_path, inputs=inputs)
    assert ppo._folders(config, context)["critic"] == Path(critic) / "model"
