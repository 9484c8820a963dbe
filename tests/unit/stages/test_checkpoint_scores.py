"""Held-out losses in the loops of SFT and of the reward model.

- the score of a checkpoint is the negative held-out loss, if measured and finite
- with `early_stop` SFT ends in the weights of the lowest loss, of the earlier one of two equal ones, also
  after a kill; without a `patience` it trains to the end
- progress and failpoints of the judge have the name of its stage
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlhf_core.config.training import RewardConfig, SFTConfig
from rlhf_core.models.batching import TokenSequence
from rlhf_core.stages import epochs, reward, sft
from rlhf_core.stages.epochs import Training
from rlhf_core.testing import FolderCheckpoints, RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.testing.trainer import ScriptedTrainer, single_rank
from rlhf_core.types import PairExample

LOSSES = (0.9, 0.4, 0.6)
SFT = SFTConfig.model_validate({"batch_size": 1, "eval_every": 2, "checkpoint_every": 1})
REWARD = RewardConfig.model_validate(
    {"batch_size": 1, "early_stop": {"every": 2, "patience": 9}, "checkpoint_every": 1}
)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_score_is_the_negative_held_out_loss(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter(LOSSES)
    for module in (sft, reward):
        monkeypatch.setattr(module, "train_step", lambda *_: {})
    monkeypatch.setattr(sft, "evaluate_sft", lambda *_: {"eval/loss": next(losses), "eval/perplexity": 1.0})
    monkeypatch.setattr(
        reward, "evaluate_reward", lambda *_: ({"eval/loss": next(losses)}, torch.zeros(0, 2))
    )
    checkpoints = FolderCheckpoints(tmp_path / "checkpoints")
    context = stage_context(tmp_path, checkpoints=checkpoints)
    trainer = ScriptedTrainer()
    with single_rank():
        if stage == "sft":
            rows = [TokenSequence((1, 2), (0, 1))] * 6
            sft.train_sft(trainer, rows, rows, SFT, Training("sft", 0, 0, context.scratch, context))
        else:
            pairs = [PairExample("", "", (1,), (2,), (3,))] * 6
            training = Training("reward", 0, 0, context.scratch, context)
            reward.train_reward(trainer, pairs, pairs, REWARD, training)
    # Six steps with an evaluation after every second one. The last step has no checkpoint.
    assert checkpoints.scores == {1: None, 2: -0.9, 3: None, 4: -0.4, 5: None}


def test_progress_and_failpoints_of_the_judge_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward, "train_step", lambda *_: {})
    monkeypatch.setattr(reward, "evaluate_reward", lambda *_: ({"eval/loss": 0.5}, torch.zeros(0, 2)))
    failpoints: list[str] = []
    monkeypatch.setattr(epochs, "failpoint", failpoints.append)
    progress = RecordingProgress()
    context = stage_context(tmp_path, progress=progress)
    pairs = [PairExample("", "", (1,), (2,), (3,))] * 2
    with single_rank():
        training = Training("judge", 0, 0, context.scratch, context)
        reward.train_reward(ScriptedTrainer(), pairs, pairs, REWARD, training)
    assert failpoints == ["judge.step"] * 2
    assert [report[:3] for report in progress.reports] == [("judge", 1, 2), ("judge", 2, 2)]


def test_a_held_out_loss_that_is_not_finite_is_no_score_and_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([math.nan, 0.4, 0.6])
    monkeypatch.setattr(sft, "train_step", lambda *_: {})
    monkeypatch.setattr(sft, "evaluate_sft", lambda *_: {"eval/loss": next(losses), "eval/perplexity": 1.0})
    metrics = RecordingMetrics()
    checkpoints = FolderCheckpoints(tmp_path / "checkpoints")
    context = stage_context(tmp_path, metrics=metrics, checkpoints=checkpoints)
    rows = [TokenSequence((1, 2), (0, 1))] * 6
    with single_rank():
        sft.train_sft(ScriptedTrainer(), rows, rows, SFT, Training("sft", 0, 0, context.scratch, context))
    assert checkpoints.scores == {1: None, 2: None, 3: None, 4: -0.4, 5: None}
    assert metrics.column("eval/loss") == [0.4, 0.6]
    assert metrics.column("eval/perplexity") == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("patience", "steps"), [(2, 4), (None, 6)])
@pytest.mark.parametrize("killed_after", [None, 3])
def test_sft_keeps_the_weights_of_the_lowest_loss(
    patience: int | None,
    steps: int,
    killed_after: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SFTConfig.model_validate(
        {"batch_size": 1, "early_stop": {"every": 1, "patience": patience}, "checkpoint_every": 1}
    )
    losses = [0.0, 0.9, 0.4, 0.4, 0.6, 0.5, 0.7]
    """By the number of steps."""
    checkpoints = FolderCheckpoints(tmp_path / "checkpoints")
    rows = [TokenSequence((1, 2), (0, 1))] * 6

    def train(dies_after: int | None) -> tuple[ScriptedTrainer, dict[str, float]]:
        trainer = ScriptedTrainer()

        def step(*_: object) -> dict[str, float]:
            if trainer.steps_done == dies_after:
                raise KeyboardInterrupt
            trainer.steps_done += 1
            return {}

        monkeypatch.setattr(sft, "train_step", step)
        monkeypatch.setattr(
            sft,
            "evaluate_sft",
            lambda *_: {"eval/loss": losses[trainer.steps_done], "eval/perplexity": 1.0},
        )
        context = stage_context(tmp_path, checkpoints=checkpoints)
        with single_rank():
            found = sft.train_sft(
                trainer, rows, rows, config, Training("sft", 0, 0, context.scratch, context)
            )
        return trainer, found

    if killed_after is not None:
        with pytest.raises(KeyboardInterrupt):
            train(killed_after)
    trainer, found = train(None)
    assert (found["best_step"], trainer.steps_done, trainer.restored_best) == (2, steps, True)
    # Continued after the best evaluation, it takes no snapshot of its own: the weights are in the checkpoint.
    assert trainer.best_step == (2 if killed_after is None else None)
