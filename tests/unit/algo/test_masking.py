"""Locks: exact counts (no epsilon), 0.0 for an empty mask, garbage under the mask, variance of few tokens,
whitening of equal values, the shape rule of masks.

Axes: B sequences, T response tokens.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rlhf_core.algo.masking import masked_mean, masked_sum, masked_var, masked_whiten, select

X_BT = torch.tensor([[1.0, 2.0, math.nan], [5.0, math.inf, -math.inf]], dtype=torch.float64)
MASK_BT = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Values with NaN under the mask, the mask, and the valid values as floats."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 7, generator=generator) < 0.6
    x = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    return torch.where(mask, x, math.nan), mask, x[mask].tolist()


def test_masked_statistics_match_hand_computed_numbers() -> None:
    # valid 1, 2, 5: sum 8, mean 8/3, squares (25 + 4 + 49)/9 = 78/9, over n - 1 = 2: 39/9, over n = 3: 26/9
    assert masked_sum(X_BT, MASK_BT).item() == 8.0
    assert masked_mean(X_BT, MASK_BT).item() == pytest.approx(8 / 3, abs=1e-15)
    assert masked_var(X_BT, MASK_BT).item() == pytest.approx(39 / 9, abs=1e-15)
    assert masked_var(X_BT, MASK_BT, unbiased=False).item() == pytest.approx(26 / 9, abs=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_the_statistics_are_those_of_the_valid_tokens_alone(seed: int) -> None:
    x, mask, valid = random_case(seed)
    assert masked_sum(x, mask).item() == pytest.approx(math.fsum(valid), rel=1e-12)
    assert masked_mean(x, mask).item() == pytest.approx(statistics.fmean(valid), rel=1e-12)
    assert masked_var(x, mask).item() == pytest.approx(statistics.variance(valid), rel=1e-12)
    assert masked_var(x, mask, unbiased=False).item() == pytest.approx(statistics.pvariance(valid), rel=1e-12)


def test_the_count_has_no_epsilon() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[1e-7, math.nan]], dtype=dtype)
        assert masked_mean(x, torch.tensor([[True, False]])).item() == x[0, 0].item()


def test_an_empty_mask_gives_zero_everywhere() -> None:
    empty = torch.zeros_like(MASK_BT)
    for result in (masked_sum(X_BT, empty), masked_mean(X_BT, empty), masked_var(X_BT, empty)):
        assert result.item() == 0.0
    assert torch.equal(masked_whiten(X_BT, empty), torch.zeros_like(X_BT))
    assert masked_mean(torch.zeros(0, 4), torch.zeros(0, 4)).item() == 0.0


def test_a_denominator_replaces_the_count_and_keeps_the_dtype() -> None:
    # 8 / 16 = 0.5, whether the 16 is an int, a float or a tensor of another dtype
    for denominator in (16, 16.0, torch.tensor(16), torch.tensor(16.0, dtype=torch.float64)):
        result = masked_mean(X_BT.float(), MASK_BT, denominator)
        assert result.item() == 0.5
        assert result.dtype == torch.float32


def test_the_variance_of_fewer_than_two_tokens_is_zero() -> None:
    one = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert masked_var(X_BT, one).item() == 0.0
    assert masked_whiten(X_BT, one).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("seed", range(3))
def test_whitened_tokens_have_mean_zero_and_unbiased_deviation_one(seed: int) -> None:
    x, mask, valid = random_case(seed)
    whitened = masked_whiten(x, mask)
    assert masked_mean(whitened, mask).item() == pytest.approx(0.0, abs=1e-12)
    assert masked_var(whitened, mask).item() == pytest.approx(1.0, abs=1e-6)
    expected = [(v - statistics.fmean(valid)) / math.sqrt(statistics.variance(valid) + 1e-8) for v in valid]
    assert whitened[mask].tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.all(whitened[~mask] == 0.0)


def test_whitening_without_shifting_the_mean_adds_the_mean_back_on_the_mask_only() -> None:
    x, mask, valid = random_case(7)
    difference = masked_whiten(x, mask, shift_mean=False) - masked_whiten(x, mask)
    assert difference[mask].tolist() == pytest.approx([statistics.fmean(valid)] * len(valid), rel=1e-12)
    assert torch.all(difference[~mask] == 0.0)


@pytest.mark.parametrize("value", [0.7, 0.1, 1000.1, -3.3e5])
@pytest.mark.parametrize("count", [3, 7, 1001])
def test_equal_float32_values_whiten_to_exactly_zero(value: float, count: int) -> None:
    # In float32 the mean of 1001 times 0.7 misses 0.7, and rsqrt(1e-8) = 1e4 would magnify the miss.
    x = torch.full((1, count), value, dtype=torch.float32)
    assert torch.all(masked_whiten(x, torch.ones_like(x)) == 0.0)


def test_masked_values_do_not_change_value_or_gradient() -> None:
    x = X_BT.clone().requires_grad_()
    (masked_mean(x, MASK_BT) + masked_var(x, MASK_BT) + masked_whiten(x, MASK_BT).square().sum()).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert torch.all(x.grad[MASK_BT == 0] == 0.0)


def test_the_mask_is_never_broadcast() -> None:
    assert select(torch.ones(2, 1), MASK_BT).tolist() == MASK_BT.tolist()
    for wrong in (torch.ones(3), torch.ones(2, 3, 1), torch.ones(2, 4)):
        with pytest.raises(ValueError, match="mask must have the shape"):
            masked_mean(wrong, MASK_BT)
    with pytest.raises(ValueError, match="mask must have the shape"):
        masked_mean(X_BT, MASK_BT[:, :1])
