"""What decides the end of a reward model's training, and its loss.

- the lowest held-out loss is the best; one that is not finite never is, and counts as one without gain
- patience is counted from the best evaluation on; without `early_stop` it never ends
- a tie is half right, in training as in evaluation
- the margin is taken off the gap before the loss: none, one for all pairs, or each row's own; centring pulls
  the pair's sum to 0
- what is told of a step, and of the held-out pairs, counts those of all ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_core.config.training import RewardConfig
from rlhf_core.stages.reward import BestSoFar, evaluate_reward, pair_loss, train_step
from rlhf_core.types import PairExample

STOPPING = RewardConfig.model_validate({"early_stop": {"every": 1, "patience": 2}})


def test_the_training_ends_after_two_evaluations_in_a_row_without_gain() -> None:
    best = BestSoFar()
    ends = []
    for step, loss in enumerate([0.7, 0.6, 0.6, 0.5, 0.9, 0.8], start=1):
        best.add(step, loss)
        ends.append(best.is_final(STOPPING))
    # 0.6 again is no gain; 0.5 starts the count anew; 0.9 and 0.8 end it.
    assert ends == [False, False, False, False, False, True]
    assert (best.step, best.loss) == (4, 0.5)


def test_a_loss_that_is_not_finite_is_never_the_best_and_uses_up_patience() -> None:
    best = BestSoFar()
    assert [best.add(1, math.nan), best.add(2, 0.7), best.add(3, -math.inf), best.add(4, math.nan)] == [
        False, True, False, False,
    ]  # fmt: skip
    assert (best.step, best.loss, best.is_final(STOPPING)) == (2, 0.7, True)


def test_without_early_stop_no_evaluation_ends_the_training() -> None:
    assert not BestSoFar(1, 0.1, evaluations_since=99).is_final(RewardConfig())


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
def test_the_margin_is_taken_off_the_gap_and_the_sum_is_centred(
    margin: str, center: float, gaps: tuple[float, float]
) -> None:
    config = RewardConfig.model_validate({"margin": margin, "margin_value": 0.5, "center": center})
    pairs = [PairExample("", "", (1,), (2,), (3,), margin=m) for m in (3.0, 0.25)]
    chosen, rejected = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    # -log sigmoid(gap) = log(1 + exp(-gap)) and center * sum^2, whose sums are 4 and 2; mean over the pairs
    wanted = sum(math.log1p(math.exp(-gap)) for gap in gaps) / 2 + center * (16 + 4) / 2
    assert pair_loss(chosen, rejected, pairs, config).item() == pytest.approx(wanted, rel=1e-6)


ALONE = SimpleNamespace(rank=0, world_size=1, torch_device=torch.device("cpu"))


class _Scored:
    """An engine whose score of a response is its last token."""

    optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}])
    skipped_steps = 0
    module = torch.nn.Module()

    def __init__(self, rank: Any = ALONE) -> None:
        self.rank = rank

    def __call__(self, batch: Any, _at: str) -> torch.Tensor:
        return batch.input_ids_BL.flatten()[batch.last_S].float()

    def train_step(self, losses: Iterator[torch.Tensor], _total: int) -> float:
        list(losses)
        return 1.0


def test_a_tie_is_half_right_in_training_and_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    # Right, wrong, and two ties: (1 + 0 + 0.5 + 0.5) / 4
    pairs = [PairExample("", "", (1,), (c,), (r,)) for c, r in ((3, 2), (2, 3), (4, 4), (5, 5))]
    engine: Any = _Scored()
    assert train_step(engine, pairs, RewardConfig(), 1, 0)["train/accuracy"] == 0.5
    assert evaluate_reward(engine, pairs, RewardConfig(), 0)[0]["eval/accuracy"] == 0.5


def test_a_step_and_the_held_out_pairs_are_told_over_all_ranks(
    on_two_ranks: Callable[[Callable[[Any], Any]], Any],
) -> None:
    # Gaps 4, 1 and -2: two of three are right.
    pairs = [PairExample("", "", (1,) * n, (c,), (r,)) for n, c, r in ((1, 7, 3), (2, 3, 2), (9, 2, 4))]
    wanted = {
        "accuracy": 2 / 3,
        "margin": 1.0,
        "loss": sum(math.log1p(math.exp(-gap)) for gap in (4, 1, -2)) / 3,
    }
    step = on_two_ranks(lambda rank: train_step(_Scored(rank), pairs, RewardConfig(), 1, 0))  # type: ignore[arg-type]
    held_out, _ = on_two_ranks(lambda rank: evaluate_reward(_Scored(rank), pairs, RewardConfig(), 0))  # type: ignore[arg-type]
    for name, value in wanted.items():
        assert (step[f"train/{name}"], held_out[f"eval/{name}"]) == pytest.approx((value, value), rel=1e-6)
