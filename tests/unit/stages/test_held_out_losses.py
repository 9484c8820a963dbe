"""Held-out losses in the loops of SFT and of the reward model.

- a held-out loss that is not finite is not logged
- with `early_stop` SFT ends in the weights of the lowest loss, of the earlier one of two equal ones, also
  after a kill; without a `patience` it trains to the end
- progress and failpoints of the judge have the name of its stage
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rlhf_core.config.training import RewardConfig, SFTConfig
from rlhf_core.models.batching import TokenBatch, TokenSequence
from rlhf_core.models.policy import TokenOutputs
from rlhf_core.stages import reward, sft
from rlhf_core.stages.training import Training, train_epochs
from rlhf_core.testing import FolderCheckpoints, RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.testing.trainer import ScriptedTrainer, single_rank
from rlhf_core.types import PairExample

SFT = SFTConfig.model_validate({"batch_size": 1, "eval_every": 2, "checkpoint_every": 1})
REWARD = RewardConfig.model_validate(
    {"batch_size": 1, "early_stop": {"every": 2, "patience": 9}, "checkpoint_every": 1}
)


class Trainer(ScriptedTrainer):
    """Its held-out loss follows from the number of steps, and its loss in training is log 2.

    Args:
        losses: Held-out loss by the number of steps.
        dies_after: Number of steps after which the next one is interrupted.
    """

    def __init__(self, losses: Mapping[int, float], dies_after: int | None = None) -> None:
        super().__init__(forward=self._outputs)
        self._losses, self._dies_after = losses, dies_after
        self._trains = False

    @override
    def train_step(self, micro_losses: Iterator[torch.Tensor], total_steps: int) -> float:
        if self.steps_done == self._dies_after:
            raise KeyboardInterrupt
        self._trains = True
        try:
            return super().train_step(micro_losses, total_steps)
        finally:
            self._trains = False

    def _outputs(self, batch: TokenBatch, part: str = "") -> Any:
        loss = math.log(2) if self._trains else self._losses[self.steps_done]
        if part != "last":
            return TokenOutputs(torch.full(batch.labels_N.shape, -loss, dtype=torch.float64), None)
        # Chosen responses first. -log(sigmoid(difference)) is the loss.
        scores = torch.zeros(len(batch.last_S), dtype=torch.float64)
        scores[: len(scores) // 2] = -math.log(math.expm1(loss))
        return scores


def test_progress_and_failpoints_of_the_judge_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_FAIL_TRACE", str(tmp_path))
    progress = RecordingProgress()
    context = stage_context(tmp_path, progress=progress)
    pairs = [PairExample("", "", (1,), (2,), (3,))] * 2
    with single_rank():
        training = Training("judge", 0, 0, context.scratch, context)
        train_epochs(Trainer({2: 0.5}), pairs, pairs, REWARD, training, reward.OBJECTIVE)
    passes = (tmp_path / "passes").read_text().splitlines()
    assert [line.split()[2] for line in passes] == ["judge.step", "checkpoint.written", "judge.step"]
    assert [report[:3] for report in progress.reports] == [("judge", 1, 2), ("judge", 2, 2)]


def test_a_held_out_loss_that_is_not_finite_is_not_logged(tmp_path: Path) -> None:
    trainer = Trainer({2: math.nan, 4: 0.4, 6: 0.6})
    metrics = RecordingMetrics()
    context = stage_context(tmp_path, metrics=metrics)
    rows = [TokenSequence((1, 2), (0, 1))] * 6
    with single_rank():
        sft.train_sft(trainer, rows, rows, SFT, Training("sft", 0, 0, context.scratch, context))
    assert metrics.column("eval/loss") == pytest.approx([0.4, 0.6])
    assert metrics.column("eval/perplexity") == pytest.approx([math.exp(0.4), math.exp(0.6)])


@pytest.mark.parametrize(("patience", "steps"), [(2, 4), (None, 6)])
@pytest.mark.parametrize("killed_after", [None, 3])
def test_sft_keeps_the_weights_of_the_lowest_loss(
    patience: int | None,
    steps: int,
    killed_after: int | None,
    tmp_path: Path,
) -> None:
    config = SFTConfig.model_validate(
        {"batch_size": 1, "early_stop": {"every": 1, "patience": patience}, "checkpoint_every": 1}
    )
    losses = {1: 0.9, 2: 0.4, 3: 0.4, 4: 0.6, 5: 0.5, 6: 0.7}
    checkpoints = FolderCheckpoints(tmp_path / "checkpoints")
    rows = [TokenSequence((1, 2), (0, 1))] * 6

    def train(dies_after: int | None) -> tuple[ScriptedTrainer, dict[str, float]]:
        trainer = Trainer(losses, dies_after)
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
