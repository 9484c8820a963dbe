"""The scripted engines in real loops.

- supervised fine-tuning runs with a scripted trainer, saves checkpoints and resumes
- the weights of a scripted trainer are those of its model
- a scripted engine checks adapters, cuts responses and keeps its requests
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import SFTConfig
from rlhf_core.evaluation.generate import sample_responses
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.models.batching import TokenBatch, TokenSequence
from rlhf_core.models.policy import TokenOutputs
from rlhf_core.models.saving import WeightStream
from rlhf_core.stages.sft import train_sft
from rlhf_core.stages.training import Training
from rlhf_core.testing import FolderCheckpoints, RecordingMetrics, stage_context
from rlhf_core.testing.engines import Reply, ScriptedEngine, scripted_engines
from rlhf_core.testing.trainer import ScriptedTrainer, single_rank
from rlhf_core.types import PromptExample

CONFIG = SFTConfig.model_validate({"batch_size": 2, "checkpoint_every": 2, "eval_every": 2})
ROWS = [TokenSequence.of((1, 1), (token,)) for token in (8, 2, 4, 6, 9, 7)]


def tenths(batch: TokenBatch) -> TokenOutputs:
    """The loss of a token is a tenth of its id."""
    return TokenOutputs(batch.labels_N / -10.0, None)


def train(folder: Path, metrics: RecordingMetrics) -> tuple[ScriptedTrainer, dict[str, float]]:
    trainer = ScriptedTrainer(forward=tenths)
    context = stage_context(folder, metrics=metrics)
    with single_rank():
        result = train_sft(trainer, ROWS, ROWS, CONFIG, Training("sft", 0, 0, context.scratch, context))
    return trainer, result


def test_training_loop_runs_with_a_scripted_trainer_and_resumes(tmp_path: Path) -> None:
    metrics = RecordingMetrics()
    trainer, result = train(tmp_path, metrics)
    assert (trainer.steps_done, len(trainer.losses)) == (3, 3)
    # (8 + 2 + 4 + 6 + 9 + 7) / 6 = 6 tenths
    assert result["eval_loss"] == pytest.approx(0.6)
    assert len(metrics.column("train/loss")) == 3 and metrics.flushes > 0
    checkpoints = FolderCheckpoints(tmp_path / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None and latest[0] == 2

    resumed, _ = train(tmp_path, RecordingMetrics())
    assert (resumed.steps_done, len(resumed.losses)) == (3, 1)


def test_nonfinite_losses_are_skipped_steps() -> None:
    trainer = ScriptedTrainer()
    norm = trainer.train_step(iter([torch.tensor(1.0), torch.tensor(float("nan"))]), 1)
    assert norm != norm and trainer.grad_nonfinite and trainer.skipped_steps == 1
    assert trainer.train_step(iter([torch.tensor(1.0)]), 1) == 1.0
    assert not trainer.grad_nonfinite


def test_saved_weights_are_those_of_the_model(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.lm = torch.nn.Linear(2, 3)
    saved: dict[str, torch.Tensor] = {}

    def save(_folder: Path, weights: WeightStream) -> None:
        for group in weights.groups:
            saved.update(group)

    ScriptedTrainer(module).save_model(tmp_path / "model", save)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"weight": (3, 2), "bias": (3,)}


def test_responses_come_from_the_script() -> None:
    config = PipelineConfig.model_validate({"ppo": {"max_new_tokens": 3}})
    prompts = [PromptExample("a", "a", (1, 2)), PromptExample("b", "b", (1, 3))]
    with scripted_engines(lambda request: Reply(request.prompt.input_ids * 2)) as engines:
        rollouts = sample_responses(
            config, PolicyFiles(Path("model")), prompts, device="cpu", done=lambda count: None
        )
    assert [rollout.response_ids for rollout in rollouts] == [(1, 2, 1), (1, 3, 1)]
    assert not any(rollout.finished for rollout in rollouts), "they are cut at the limit"
    assert engines[0].is_shut_down and len(engines[0].requests) == 2


def test_unloaded_adapters_are_refused() -> None:
    engine = ScriptedEngine(lambda request: Reply((5,)))
    prompt = PromptExample("a", "a", (1,))

    def generate() -> int:
        rollouts = engine.generate(
            [prompt], n=2, max_new_tokens=4, temperature=1.0, seeds=[0], policy_version=0, adapter=1
        )
        return len(rollouts)

    with pytest.raises(ValueError, match="adapter 1 is not loaded"):
        generate()
    engine.load_adapter(1, Path("adapter"))
    assert generate() == 2
