"""The end of a reward model's training, and its loss.

- the best evaluation has the lowest finite held-out loss; one that is not finite is no improvement
- patience is counted from the best evaluation; without `early_stop` training is never ended early
- a tie counts half, in training and in evaluation
- the margin is subtracted from the difference of the scores: none, a constant, or that of each row; centring
  penalises the sum of a pair's scores
- metrics of a step and of the held-out pairs cover all ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_core.config.training import EarlyStopConfig, RewardConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.stages.reward import evaluate_reward, pair_loss, train_step
from rlhf_core.stages.training import EarlyStopping
from rlhf_core.testing.trainer import ScriptedTrainer, single_rank
from rlhf_core.types import PairExample

STOPPING = RewardConfig.model_validate({"early_stop": {"every": 1, "patience": 2}})


def test_training_ends_after_two_evaluations_without_improvement() -> None:
    best = EarlyStopping()
    ends = []
    for step, loss in enumerate([0.7, 0.6, 0.6, 0.5, 0.9, 0.8], start=1):
        best.add(step, loss)
        ends.append(best.is_final(STOPPING.early_stop))
    # 0.6 again is no gain; 0.5 starts the count again; 0.9 and 0.8 end it.
    assert ends == [False, False, False, False, False, True]
    assert (best.step, best.loss) == (4, 0.5)


def test_nonfinite_loss_is_no_improvement() -> None:
    best = EarlyStopping()
    assert [best.add(1, math.nan), best.add(2, 0.7), best.add(3, -math.inf), best.add(4, math.nan)] == [
        False, True, False, False,
    ]  # fmt: skip
    assert (best.step, best.loss, best.is_final(STOPPING.early_stop)) == (2, 0.7, True)


def test_training_is_not_ended_without_early_stop() -> None:
    assert not EarlyStopping(1, 0.1, evaluations_since=99).is_final(None)
    assert not EarlyStopping(1, 0.1, evaluations_since=99).is_final(EarlyStopConfig(patience=None))


@pytest.mark.parametrize(
    ("margin", "center", "gaps"),
    [
        ("none", 0.0, (2.0, 0.0)),
        ("constant", 0.0, (1.5, -0.5)),
        ("field", 0.0, (2.0 - 3.0, 0.0 - 0.25)),
        ("none", 0.25, (2.0, 0.0)),
        ("constant", 0.25, (1.5, -0.5)),
    ],
)
def test_margin_is_subtracted_and_the_sum_is_centred(
    margin: str, center: float, gaps: tuple[float, float]
) -> None:
    config = RewardConfig.model_validate({"margin": margin, "margin_value": 0.5, "center": center})
    pairs = [PairExample("", "", (1,), (2,), (3,), margin=m) for m in (3.0, 0.25)]
    chosen, rejected = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    # -log sigmoid(gap) = log(1 + exp(-gap)) and center * sum^2, whose sums are 4 and 2; mean over the pairs
    wanted = sum(math.log1p(math.exp(-gap)) for gap in gaps) / 2 + center * (16 + 4) / 2
    assert pair_loss(chosen, rejected, pairs, config).item() == pytest.approx(wanted, rel=1e-6)


def scored(rank: Rank | None = None) -> ScriptedTrainer:
    """A model whose score of a response is its last token."""

    def forward(batch: Any, _at: str) -> torch.Tensor:
        scores: torch.Tensor = batch.input_ids_BL.flatten()[batch.last_S].float()
        return scores

    return ScriptedTrainer(rank=rank, forward=forward)


def test_tie_counts_half_in_training_and_evaluation() -> None:
    # Right, wrong, and two ties: (1 + 0 + 0.5 + 0.5) / 4
    pairs = [PairExample("", "", (1,), (c,), (r,)) for c, r in ((3, 2), (2, 3), (4, 4), (5, 5))]
    with single_rank():
        assert train_step(scored(), pairs, RewardConfig(), 1, 0)["train/accuracy"] == 0.5
        assert evaluate_reward(scored(), pairs, RewardConfig(), 0)[0]["eval/accuracy"] == 0.5


def test_metrics_cover_all_ranks(
    on_two_ranks: Callable[[Callable[[Any], Any]], Any],
) -> None:
    # Gaps 4, 1 and -2: two of three are right.
    pairs = [PairExample("", "", (1,) * n, (c,), (r,)) for n, c, r in ((1, 7, 3), (2, 3, 2), (9, 2, 4))]
    wanted = {
        "accuracy": 2 / 3,
        "margin": 1.0,
        "loss": sum(math.log1p(math.exp(-gap)) for gap in (4, 1, -2)) / 3,
    }
    step = on_two_ranks(lambda rank: train_step(scored(rank), pairs, RewardConfig(), 1, 0))
    held_out, _ = on_two_ranks(lambda rank: evaluate_reward(scored(rank), pairs, RewardConfig(), 0))
    for name, value in wanted.items():
        assert (step[f"train/{name}"], held_out[f"eval/{name}"]) == pytest.approx((value, value), rel=1e-6)
