"""Locks: the four kinds of importance weights, their bounds (inclusive), the clamp of the log-ratio, the
mask, no gradient.

Axes: B sequences, T response tokens.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algo.importance import ImportanceKind, importance_weights

MASK_BT = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
ROLLOUT_BT = torch.full((3, 4), -2.0, dtype=torch.float64)
# w: 1/4, 1, 4 (geometric mean 1); 3, 3 (geometric mean 3); nothing
W_BT = torch.tensor([[0.25, 1.0, 4.0, 1.0], [3.0, 3.0, 1.0, 1.0], [1.0] * 4], dtype=torch.float64)
OLD_BT = torch.where(MASK_BT, ROLLOUT_BT + W_BT.log(), math.nan)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("none", [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]),
        ("truncate", [[0.5, 1, 2, 0], [2, 2, 0, 0], [0] * 4]),
        ("mask", [[0, 1, 0, 0], [0, 0, 0, 0], [0] * 4]),
        ("sequence-mask", [[0.25, 1, 4, 0], [0, 0, 0, 0], [0] * 4]),
    ],
)
def test_each_kind_matches_its_definition(kind: ImportanceKind, rows: list[list[float]]) -> None:
    weights = importance_weights(OLD_BT, ROLLOUT_BT, MASK_BT, kind, low=0.5, high=2.0)
    assert torch.allclose(weights, torch.tensor(rows, dtype=torch.float64), atol=1e-12)


def test_the_default_bounds_truncate_at_two() -> None:
    weights = importance_weights(OLD_BT, ROLLOUT_BT, MASK_BT, "truncate")
    assert weights[0].tolist() == pytest.approx([0.25, 1.0, 2.0, 0.0])


def test_bounds_belong_to_the_interval() -> None:
    same = torch.zeros(1, 3, dtype=torch.float64)
    for kind in ("mask", "sequence-mask"):
        assert importance_weights(same, same, same == 0, kind, low=1.0, high=1.0).tolist() == [[1.0] * 3]


def test_the_log_ratio_is_clamped_to_twenty_nats() -> None:
    old = torch.tensor([[500.0, -500.0]], dtype=torch.float64)
    weights = importance_weights(old, torch.zeros_like(old), torch.ones_like(old), "mask", high=math.inf)
    assert weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-14)


@pytest.mark.parametrize("kind", ["none", "truncate", "mask", "sequence-mask"])
def test_engines_that_agree_have_weights_of_one_on_the_mask(kind: ImportanceKind) -> None:
    garbage = torch.where(MASK_BT, ROLLOUT_BT, math.inf)
    weights = importance_weights(ROLLOUT_BT, garbage, MASK_BT, kind)
    assert torch.equal(weights, MASK_BT.double())


def test_weights_carry_no_gradient() -> None:
    old = ROLLOUT_BT.clone().requires_grad_()
    assert not importance_weights(old, ROLLOUT_BT, MASK_BT, "truncate").requires_grad


@pytest.mark.parametrize("kind", ["truncate", "mask", "sequence-mask"])
def test_a_nan_of_a_valid_token_is_not_hidden(kind: ImportanceKind) -> None:
    rollout = ROLLOUT_BT.clone()
    rollout[0, 1] = math.nan
    assert importance_weights(ROLLOUT_BT, rollout, MASK_BT, kind)[0, 1].isnan()


def test_importance_weights_correct_the_expectation() -> None:
    # sum_x rollout(x) w(x) f(x) = sum_x old(x) f(x): what the correction is for
    generator = torch.Generator().manual_seed(1)
    old, rollout = torch.log_softmax(torch.randn(2, 1, 9, generator=generator, dtype=torch.float64), dim=-1)
    f = torch.randn(1, 9, generator=generator, dtype=torch.float64)
    w = importance_weights(old, rollout, torch.ones(1, 9), "truncate", high=math.inf)
    assert (rollout.exp() * w * f).sum().item() == pytest.approx((old.exp() * f).sum().item(), rel=1e-12)


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="got 'tis'"):
        importance_weights(OLD_BT, ROLLOUT_BT, MASK_BT, "tis")  # type: ignore[arg-type]  # unknown on purpose
