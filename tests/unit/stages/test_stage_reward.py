"""What the stage `reward` says of a model with an adapter, with an engine that is scripted (the models are
real).

- accuracy, margin and score statistics are those of the merged model that later stages load, not of the one
  in training
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from rlhf_core.config import PipelineConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import ScoreStatistics, load_score_model
from rlhf_core.models.scoring import sequence_scores, single_process_batches
from rlhf_core.stages import reward
from rlhf_core.stages.training import Folders
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.trainer import ScriptedTrainer, scripted_trainers, single_rank
from rlhf_core.types import PairExample
from tests.support.tiny_llama import save_tiny_llama

PAIRS = [PairExample(f"p{i}", "", (1, 2, 3), (5 + i, 7), (9, 11 + i)) for i in range(12)]


def raw_scores(model: Any) -> torch.Tensor:
    """(P, 2)"""
    sequences = [(pair.prompt_ids, ids) for pair in PAIRS for ids in (pair.chosen_ids, pair.rejected_ids)]
    scores = sequence_scores(
        model.eval(), ScoreStatistics(), single_process_batches(model, sequences, 4096, 0)
    )
    return torch.tensor(scores, dtype=torch.float64).view(-1, 2)


class SmallUpdate(ScriptedTrainer):
    """Its step is small: most of it is lost where it is rounded to the grid of bfloat16."""

    scores: torch.Tensor
    """(P, 2) raw scores after the step."""

    @override
    def train_step(self, micro_losses: Iterator[torch.Tensor], total_steps: int) -> float:
        assert total_steps == 1
        norm = super().train_step(micro_losses, total_steps)
        for name, parameter in self.module.lm.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=3e-4)
        self.scores = raw_scores(self.module)
        return norm


def test_metrics_of_merged_reward_model_match_saved_weights(tmp_path: Path) -> None:
    start = save_tiny_llama(tmp_path / "start", hidden_size=128)
    load_policy(start, dtype="bfloat16", attention="sdpa", device="cpu").save(tmp_path / "sft" / "model")
    data = write_data_artifact(tmp_path / "data", pairs=PAIRS, eval_pairs=PAIRS)
    section = {"lora": {}, "deepspeed": {"dtype": "bfloat16"}, "batch_size": len(PAIRS)}
    tree = {"run": {"device": "cpu"}, "reward": section}
    config = PipelineConfig.model_validate_json(json.dumps(tree))
    logged = RecordingMetrics()
    context = stage_context(tmp_path, inputs={"sft": tmp_path / "sft"}, metrics=logged)
    with single_rank(), scripted_trainers(SmallUpdate) as trainers:
        folders = Folders({"data": data, "sft": tmp_path / "sft"}, tmp_path, tmp_path / "out")
        metrics = reward._train(Rank(), config, folders, "reward", context)

    loaded = load_score_model(tmp_path / "out" / "model", dtype="bfloat16", attention="sdpa", device="cpu")
    scores = raw_scores(loaded)
    [trainer] = trainers
    assert isinstance(trainer, SmallUpdate)
    assert not torch.equal(scores, trainer.scores) and logged.last["eval/merge_gap"] > 0
    assert loaded.statistics == ScoreStatistics.of(scores)
    assert (metrics["score_mean"], metrics["score_std"]) == (loaded.statistics.mean, loaded.statistics.std)
    assert metrics["accuracy"] == ((scores[:, 0] > scores[:, 1]).double().mean().item())
    assert metrics["margin"] == (scores[:, 0] - scores[:, 1]).mean().item()
