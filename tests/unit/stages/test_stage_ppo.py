"""What the stage `ppo` leaves, with a worker whose model is scripted (the integration tests use real ones).

- the agreement of language models that grade, for runs that reuse the policy
- the critic starts from the reward model only where that gives the rewards
- rewards that read responses have the threads of the stage
- a reward that gives a known response another value ends the stage before the fleet starts
- `policy` has the weights of the last step and `policy_ema` their average if there is one, or `policy` has
  the average with `publish: average`; both with the tokenizer
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import LoraConfig
from rlhf_core.data.tokenizer import load_decoder, train_tokenizer
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.controller import PPOController
from rlhf_core.stages import ppo
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.trainer import ScriptedTrainer
from rlhf_core.types import PairExample, StageContext
from tests.support.chat_server import ChatServer
from tests.support.scripted_fleet import ScriptedFleet, ScriptedRank


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


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    inputs = {name: tmp_path / name for name in ("data", "sft", "reward")}
    write_data_artifact(inputs["data"])
    return stage_context(tmp_path, inputs=inputs)


def configured(**section: Any) -> PipelineConfig:
    """Return a configuration of CPUs without evaluations, because there are no held-out prompts."""
    ppo_section = {"evaluate_every": 0, **section}
    return PipelineConfig.model_validate({"run": {"device": "cpu"}, "ppo": ppo_section})


def trained(config: PipelineConfig, context: StageContext) -> ScriptedFleet:
    """Return a fleet whose last checkpoint is that of the last step."""
    models: Any = {"policy": Model(SavedBySelf()), "critic": ScriptedTrainer()}
    fleet = ScriptedFleet(config, ranks={role: [ScriptedRank(models)] for role in models})
    no_rewards: Any = None
    controller = PPOController(fleet, [], str, no_rewards, context)
    controller.completed_steps = config.ppo.steps
    (context.output / "metrics.jsonl").write_text('{"step": 1, "objective/kl": 2.5}\n')
    controller._checkpoint()
    return fleet


def test_rewards_read_text_as_the_reward_model_was_trained_on_it(context: StageContext) -> None:
    config, decoder = configured(), load_decoder(context.inputs["data"])
    with ppo._started(config, context, decoder, ScriptedFleet(config)) as controller:
        assert controller._decode([7, 8]) == '!"'


def test_rewards_that_read_responses_have_the_threads_of_the_stage(context: StageContext) -> None:
    rewards = [{"type": "format", "pattern": "a"}]
    config = config_from_tree(
        {"run": {"device": "cpu", "threads": 3}, "ppo": {"evaluate_every": 0, "rewards": rewards}}, "test"
    )
    fleet = ScriptedFleet(config)
    with ppo._started(config, context, load_decoder(context.inputs["data"]), fleet):
        assert [actor._settings.threads for actor in fleet.rewards] == [3]


def test_a_reward_with_another_value_than_known_ends_the_stage_before_the_fleet(
    context: StageContext, tmp_path: Path
) -> None:
    class Unwanted(ScriptedFleet):
        @override
        def __enter__(self) -> ScriptedFleet:
            pytest.fail("the fleet was started")

    (tmp_path / "r.py").write_text("def f(samples):\n    return [1.0 for _ in samples]\n")
    smoke = [{"prompt": "p", "response": "a", "score": 2}]
    source = {"type": "python", "function": "r:f", "file": str(tmp_path / "r.py"), "smoke": smoke}
    config = config_from_tree(
        {"run": {"device": "cpu"}, "ppo": {"evaluate_every": 0, "rewards": [source]}}, "test"
    )
    opened = ppo._started(config, context, load_decoder(context.inputs["data"]), Unwanted(config))
    with pytest.raises(ConfigError, match="must get score 2; got 1"), opened:
        pass


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {"policy": "last"}),
        ({"ema_decay": 0.9}, {"policy": "last", "policy_ema": "average"}),
        ({"ema_decay": 0.9, "publish": "average"}, {"policy": "average"}),
    ],
)
def test_average_of_weights_is_saved_next_to_the_policy_or_published(
    context: StageContext, section: dict[str, Any], expected: dict[str, str]
) -> None:
    config = configured(**section)
    fleet = trained(config, context)
    found = ppo.run(config, context, lambda *_given: fleet)
    assert found.metrics == {"kl": 2.5, "steps": float(config.ppo.steps)}
    out = context.output
    assert {file.parent.name: file.read_text() for file in out.rglob("model.safetensors")} == expected
    assert {file.parent.name for file in out.rglob("tokenizer.json")} == set(expected)


def test_the_agreement_of_a_grader_is_in_the_result(context: StageContext, tmp_path: Path) -> None:
    """A run that reuses the policy compares it with its own limit."""
    decoder = train_tokenizer([], 0)
    chosen, rejected = (tuple(decoder.encode(text)) for text in ("a long answer", "no"))
    pairs = [PairExample(f"p{i}", "Tell me", (1,), chosen, rejected, "people") for i in range(10)]
    data = write_data_artifact(tmp_path / "pairs", eval_pairs=pairs, tokenizer=decoder)
    context = replace(context, inputs={**context.inputs, "data": data})
    with ChatServer(lambda question: "9" if "long answer" in question else "2") as server:
        grader = {"type": "language_model", "model": "m", "url": server.url}
        tree = {
            "run": {"device": "cpu", "home": str(tmp_path / "home")},
            "ppo": {"evaluate_every": 0, "rewards": [{"type": "model"}, grader]},
        }
        config = config_from_tree(tree, "test")
        fleet = trained(config, context)
        found = ppo.run(config, context, lambda *_given: fleet)
    assert found.metrics["reward_agreement/language_model/mean"] == 1.0


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


@pytest.mark.parametrize(("path", "folder"), [("org/teacher", "org/teacher"), ("./t", Path("./t"))])
def test_the_reference_is_the_teacher_if_there_is_one(path: str, folder: Any, tmp_path: Path) -> None:
    inputs = {name: Path(name) for name in ("data", "sft")}
    context = stage_context(tmp_path, inputs=inputs)
    tree = {"reward": {"enabled": False}, "ppo": {"rewards": [], "teacher": {"path": path}}}
    folders = ppo._folders(config_from_tree(tree, "test"), context)
    assert (folders["reference"], folders["policy"]) == (folder, Path("sft/model"))
