"""Locks: the four aggregations, the clipped policy and value losses with their metrics, dual clip, importance
weights, the losses of SFT, reward model and DPO; what receives a gradient; what is refused.

Axes: B sequences, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.algo.losses import (
    aggregate,
    clipped_weight_loss,
    dpo_loss,
    entropy_bonus,
    ipo_loss,
    kl_loss,
    policy_loss,
    reward_model_loss,
    robust_dpo_loss,
    sequence_policy_loss,
    sft_loss,
    step_denominator,
    value_loss,
)
from rlhf_core.config.base import Aggregation

LAW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
MODES: tuple[Aggregation, ...] = get_args(Aggregation)
MASK_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
GARBAGE = [math.nan] * 4
X_BT = torch.tensor([[1.0, 2.0, 6.0, math.nan], [5.0, math.inf, 9.0, 9.0], GARBAGE], dtype=torch.float64)


def one_row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def log_ratios(*ratios: float) -> Tensor:
    return one_row(*ratios).log()


def reference_policy(
    d: float,
    a: float,
    low: float,
    high: float,
    dual: float | None,
    weight: float,
) -> tuple[float, bool]:
    """Loss of one token, and whether the clip holds it."""
    ratio = math.exp(max(-20.0, min(20.0, d)))
    clipped = max(1 - low, min(1 + high, ratio))
    objective = min(ratio * a, clipped * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective * weight, clipped * a < ratio * a


# --- aggregate


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 14 / 4),  # (1+2+6+5) / 4
        ("seq-mean-token-mean", (9 / 3 + 5) / 2),  # the empty row is no sequence
        ("seq-mean-token-sum", (9 + 5) / 2),
        ("token-sum", 14.0),
    ],
)
def test_each_aggregation_matches_numbers_worked_out_by_hand(mode: Aggregation, expected: float) -> None:
    assert aggregate(X_BT, MASK_BT, mode).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 1.4), ("seq-mean-token-mean", 0.8), ("seq-mean-token-sum", 1.4), ("token-sum", 1.4)],
)
def test_a_denominator_replaces_the_count_in_every_mode(mode: Aggregation, expected: float) -> None:
    # 14/10, (3+5)/10, 14/10, 14/10
    for denominator in (10, 10.0, torch.tensor(10)):
        assert aggregate(X_BT, MASK_BT, mode, denominator).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_the_default_denominator_is_the_own_count(mode: Aggregation) -> None:
    denominator = step_denominator(mode, tokens=4, sequences=2)
    assert aggregate(X_BT, MASK_BT, mode, denominator).item() == aggregate(X_BT, MASK_BT, mode).item()


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_has_loss_zero_and_gradient_zero(mode: Aggregation) -> None:
    x = X_BT.clone().requires_grad_()
    loss = aggregate(x, torch.zeros_like(MASK_BT), mode)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert torch.all(x.grad == 0.0)


def test_sequence_modes_need_rows_and_unknown_modes_are_refused() -> None:
    packed = X_BT[MASK_BT]
    assert aggregate(packed, torch.ones_like(packed), "token-mean").item() == 3.5
    with pytest.raises(ValueError, match="one row per sequence"):
        aggregate(packed, torch.ones_like(packed), "seq-mean-token-mean")
    with pytest.raises(ValueError, match="got 'mean'"):
        aggregate(X_BT, MASK_BT, "mean")  # type: ignore[arg-type]  # unknown on purpose


# --- policy_loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected", "clipped"),
    [
        (1.5, 2.0, None, -2.4, 1.0),  # -min(3, 1.2*2)
        (1.5, -2.0, None, 3.0, 0.0),  # -min(-3, -2.4)
        (0.5, 2.0, None, -1.0, 0.0),  # -min(1, 0.8*2)
        (0.5, -2.0, None, 1.6, 1.0),  # -min(-1, -1.6)
        (9.0, -2.0, 3.0, 6.0, 0.0),  # min(18, 3*2)
        (1.5, -2.0, 3.0, 3.0, 0.0),  # min(3, 6): within the bound
        (9.0, 2.0, 3.0, -2.4, 1.0),  # the dual clip is for negative advantages only
    ],
)
def test_the_clip_matches_numbers_worked_out_by_hand(
    ratio: float, advantage: float, dual_clip: float | None, expected: float, clipped: float
) -> None:
    new, old, advantages, mask = log_ratios(ratio), one_row(0.0), one_row(advantage), one_row(1.0)
    result = policy_loss(new, old, advantages, mask, dual_clip=dual_clip)
    assert result.loss.item() == pytest.approx(expected, abs=1e-14)
    assert result.clip_fraction.item() == clipped
    assert result.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-14)


@LAW
@given(
    seed=st.integers(0, 10_000),
    low=st.floats(0.05, 0.5),
    high=st.floats(0.05, 0.5),
    dual=st.one_of(st.none(), st.floats(1.1, 5.0)),
    weighted=st.booleans(),
)
def test_loss_and_metrics_match_a_reference_in_plain_python(
    seed: int, low: float, high: float, dual: float | None, weighted: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages, weights = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    mask[0, 0] = True
    valid = [(b, t) for b in range(3) for t in range(5) if mask[b, t]]
    tokens = []
    for b, t in valid:
        d, weight = (new - old)[b, t].item(), weights[b, t].item() if weighted else 1.0
        tokens.append(reference_policy(d, advantages[b, t].item(), low, high, dual, weight))
    new_BT, old_BT, advantages_BT, weights_BT = (
        torch.where(mask, x, math.nan) for x in (new, old, advantages, weights)
    )
    result = policy_loss(
        new_BT,
        old_BT,
        advantages_BT,
        mask,
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
        weights=weights_BT if weighted else None,
    )
    n = len(valid)
    assert result.loss.item() == pytest.approx(math.fsum(x for x, _ in tokens) / n, rel=1e-12, abs=1e-12)
    assert result.clip_fraction.item() == pytest.approx(sum(held for _, held in tokens) / n, abs=1e-15)
    k3 = [math.exp(d) - 1 - d for d in (new - old)[mask].tolist()]
    assert result.approx_kl.item() == pytest.approx(math.fsum(k3) / n, rel=1e-12)


def test_the_policy_gradient_matches_its_formula() -> None:
    # d/dlogp of -r A is -r A; 4 tokens in the mean. Held: 1.5 with A > 0, 0.5 with A < 0, and 9 with A < 0 by
    # the dual clip.
    new = log_ratios(1.1, 1.5, 0.5, 9.0).requires_grad_()
    advantages = one_row(2.0, 2.0, -2.0, -2.0)
    policy_loss(new, torch.zeros(1, 4), advantages, torch.ones(1, 4), dual_clip=3.0).loss.backward()
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([-1.1 * 2.0 / 4, 0.0, 0.0, 0.0], abs=1e-15)


def test_the_log_ratio_is_clamped() -> None:
    new = torch.tensor([[1e4, -1e4]], dtype=torch.float32, requires_grad=True)
    result = policy_loss(new, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2))
    # (e^20 - e^-20) / 2
    assert result.loss.item() == pytest.approx(math.exp(20) / 2, rel=1e-6)
    result.loss.backward()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


def test_old_values_get_no_gradient() -> None:
    # An attached `old` would cancel the gradient to nothing.
    new = one_row(-1.0, -2.0).requires_grad_()
    advantages = one_row(3.0, -1.0).requires_grad_()
    weights = one_row(1.0, 0.5).requires_grad_()
    result = policy_loss(new, new, advantages, torch.ones(1, 2), weights=weights)
    result.loss.backward()
    assert new.grad is not None
    assert new.grad[0].tolist() == [-1.5, 0.25]  # -A w / 2
    assert advantages.grad is None
    assert weights.grad is None
    assert not result.clip_fraction.requires_grad
    assert not result.approx_kl.requires_grad


def test_advantages_of_one_per_sequence_broadcast_over_its_tokens() -> None:
    new, mask = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3)
    assert policy_loss(new, new, torch.tensor([[1.0], [3.0]]), mask).loss.item() == -2.0


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, math.nan])
def test_a_dual_clip_within_the_clip_is_refused(dual_clip: float) -> None:
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        policy_loss(X_BT, X_BT, X_BT, MASK_BT, dual_clip=dual_clip)


# --- value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "clipped"),
    [
        (1.0, 0.0, 1.0, 0.2, 0.32, 1.0),  # max(0, (0.2 - 1)^2) / 2
        (1.0, 0.0, -1.0, 0.2, 2.0, 0.0),  # max(4, (0.2 + 1)^2) / 2
        (0.1, 0.0, 1.0, 0.2, 0.405, 0.0),  # 0.9^2 / 2 either way
        (1.0, 0.0, 3.0, None, 2.0, 0.0),  # (1 - 3)^2 / 2
    ],
)
def test_the_value_loss_matches_numbers_worked_out_by_hand(
    value: float, old: float, target: float, clip: float | None, expected: float, clipped: float
) -> None:
    result = value_loss(one_row(value), one_row(old), one_row(target), one_row(1.0), clip=clip)
    assert result.loss.item() == pytest.approx(expected, abs=1e-15)
    assert result.clip_fraction.item() == clipped


@LAW
@given(seed=st.integers(0, 10_000), clip=st.one_of(st.none(), st.floats(0.05, 1.0)))
def test_the_value_loss_matches_a_reference_in_plain_python(seed: int, clip: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 2, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 6, generator=generator) < 0.7
    mask[0, 0] = True
    per_token = []
    for v, o, r in zip(values[mask].tolist(), old[mask].tolist(), returns[mask].tolist(), strict=True):
        plain = (v - r) ** 2
        held = plain if clip is None else (o + max(-clip, min(clip, v - o)) - r) ** 2
        per_token.append((max(plain, held) / 2, held > plain))
    values_BT, old_BT, returns_BT = (torch.where(mask, x, math.nan) for x in (values, old, returns))
    result = value_loss(values_BT, old_BT, returns_BT, mask, clip=clip)
    n = len(per_token)
    assert result.loss.item() == pytest.approx(math.fsum(x for x, _ in per_token) / n, rel=1e-12)
    assert result.clip_fraction.item() == pytest.approx(sum(held for _, held in per_token) / n, abs=1e-15)


def test_the_value_gradient_matches_its_formula() -> None:
    values = one_row(0.1, 1.0).requires_grad_()
    returns = one_row(1.0, 1.0).requires_grad_()
    value_loss(values, torch.zeros(1, 2), returns, torch.ones(1, 2)).loss.backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([(0.1 - 1.0) / 2, 0.0], abs=1e-15)
    assert returns.grad is None


# --- entropy, KL, SFT


def test_entropy_bonus_and_kl_loss_use_the_denominator() -> None:
    entropy = entropy_bonus(X_BT, MASK_BT, aggregation="seq-mean-token-sum", denominator=4)
    assert entropy.item() == 14 / 4
    # k2 by default: (1 + 4 + 36 + 25) / 2 / 4 tokens = 8.25, over a denominator of 11 tokens: 3
    assert kl_loss(X_BT, torch.zeros_like(X_BT), MASK_BT).item() == 8.25
    assert kl_loss(X_BT, torch.zeros_like(X_BT), MASK_BT, denominator=11.0).item() == 3.0
    assert kl_loss(X_BT, torch.zeros_like(X_BT), MASK_BT, "k1", aggregation="token-sum").item() == 14.0


def test_the_kl_loss_trains_only_the_policy() -> None:
    new, ref = one_row(1.0, 3.0).requires_grad_(), one_row(0.0, 1.0).requires_grad_()
    kl_loss(new, ref, torch.ones(1, 2)).backward()
    assert new.grad is not None
    assert new.grad[0].tolist() == [0.5, 1.0]  # d / 2 tokens
    assert ref.grad is None


def test_the_sft_loss_is_the_mean_negative_log_likelihood() -> None:
    logps = one_row(math.log(0.5), math.log(0.25), math.nan)
    mask = torch.tensor([[True, True, False]])
    assert sft_loss(logps, mask).item() == pytest.approx(1.5 * math.log(2), abs=1e-15)
    assert sft_loss(logps, mask, denominator=6).item() == pytest.approx(0.5 * math.log(2), abs=1e-15)


# --- pairs


def test_the_reward_model_loss_matches_hand_computed_numbers() -> None:
    # gaps ln 3 and -ln 3: -ln(3/4) and -ln(1/4), mean (2 ln 4 - ln 3) / 2
    chosen = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64)
    rejected = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64)
    plain = math.log(4) - math.log(3) / 2
    assert reward_model_loss(chosen, rejected).item() == pytest.approx(plain, abs=1e-15)
    # a margin of ln 3 leaves gaps 0 and -2 ln 3: ln 2 and ln 10
    margin = torch.full((2,), math.log(3.0), dtype=torch.float64)
    assert reward_model_loss(chosen, rejected, margin).item() == pytest.approx(math.log(20) / 2, abs=1e-15)
    # the sum of each pair is ln 3
    centred = reward_model_loss(chosen, rejected, center=0.01).item()
    assert centred == pytest.approx(plain + 0.01 * math.log(3) ** 2, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reward_model_loss_is_finite_for_large_gaps(dtype: torch.dtype) -> None:
    chosen = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    loss = reward_model_loss(chosen, -chosen.detach(), center=0.01)
    loss.backward()
    # gaps 2e4, -2e4 and 0: 0 + 20000 + ln 2
    assert loss.item() == pytest.approx((2e4 + math.log(2)) / 3, rel=1e-6)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([0.0, -1 / 3, -1 / 6], abs=1e-6)


def test_the_dpo_loss_matches_numbers_worked_out_by_hand() -> None:
    # h = 0.5 * ((-1 - -5) - (-2 - -4)) = 0.5 * (4 - 2) = 1
    values = torch.tensor([[-1.0], [-5.0], [-2.0], [-4.0]], dtype=torch.float64)
    loss = partial(dpo_loss, values[0], values[1], values[2], values[3], beta=0.5)
    lost, won = math.log(1 + math.e), math.log(1 + math.exp(-1))  # -log sigmoid(-1), -log sigmoid(1)
    assert loss().item() == pytest.approx(won, abs=1e-15)
    smoothed = loss(label_smoothing=0.1).item()
    assert smoothed == pytest.approx(0.9 * won + 0.1 * lost, abs=1e-15)
    assert loss(denominator=2).item() == pytest.approx(won / 2, abs=1e-15)


def test_dpo_starts_at_ln_two_and_widens_the_gap() -> None:
    chosen, rejected = (torch.tensor([-3.0, -9.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    ref = torch.tensor([-3.0, -9.0], dtype=torch.float64, requires_grad=True)
    loss = dpo_loss(chosen, rejected, ref, ref, beta=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-15)
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.05, -0.05])  # -beta sigmoid(0) / 2 pairs
    assert rejected.grad.tolist() == pytest.approx([0.05, 0.05])
    assert ref.grad is None


def of_rows(loss: Callable[..., Tensor], values: Tensor, **settings: float) -> Tensor:
    """Return a loss of pairs: policy and reference of chosen and rejected responses are the rows (4, P)."""
    return loss(values[0], values[1], values[2], values[3], **settings)


def test_the_loss_of_ipo_matches_numbers_worked_out_by_hand() -> None:
    # gaps (-1 + 5) - (-2 + 4) = 2 and (-2 + 2) - (-1 + 1) = 0; the target is 1 / (2 x 0.25) = 2
    values = torch.tensor([[-1.0, -2.0], [-5.0, -2.0], [-2.0, -1.0], [-4.0, -1.0]], dtype=torch.float64)
    assert of_rows(ipo_loss, values, beta=0.25).item() == (0.0 + 4.0) / 2
    assert of_rows(ipo_loss, values, beta=0.25, denominator=4).item() == 1.0
    chosen = values[0].clone().requires_grad_()
    ipo_loss(chosen, values[1], values[2], values[3], beta=0.25).backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [0.0, 2 * -2.0 / 2], "at the target there is no gradient"


def test_the_robust_dpo_loss_matches_numbers_worked_out_by_hand() -> None:
    # h = 0.5 x 2 = 1
    values = torch.tensor([[-1.0], [-5.0], [-2.0], [-4.0]], dtype=torch.float64)
    lost, won = math.log(1 + math.e), math.log(1 + math.exp(-1))  # -log sigmoid(-1), -log sigmoid(1)
    found = of_rows(robust_dpo_loss, values, beta=0.5, label_smoothing=0.2).item()
    assert found == pytest.approx((0.8 * won - 0.2 * lost) / 0.6, abs=1e-15)
    exact = of_rows(robust_dpo_loss, values, beta=0.5, label_smoothing=0.0)
    assert exact.item() == pytest.approx(of_rows(dpo_loss, values, beta=0.5).item(), abs=1e-15)


def test_over_flipped_labels_the_mean_of_the_robust_loss_is_the_dpo_loss_of_the_true_ones() -> None:
    chosen, rejected, ref_c, ref_r = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    flipped = 0.3

    def loss(function: Any, **settings: Any) -> float:
        right = function(chosen, rejected, ref_c, ref_r, beta=0.7, **settings)
        wrong = function(rejected, chosen, ref_r, ref_c, beta=0.7, **settings)
        return float((1 - flipped) * right + flipped * wrong)

    true = dpo_loss(chosen, rejected, ref_c, ref_r, beta=0.7).item()
    assert loss(robust_dpo_loss, label_smoothing=flipped) == pytest.approx(true, abs=1e-12)
    assert loss(dpo_loss, label_smoothing=flipped) != pytest.approx(true, abs=1e-3)


def test_the_losses_of_pairs_agree_with_plain_expressions_of_torch() -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).double()
    ratios = (values[0] - values[2]) - (values[1] - values[3])
    log_sigmoid = torch.nn.functional.logsigmoid
    ipo = ((ratios - 1 / (2 * 0.3)) ** 2).mean()
    robust = (-log_sigmoid(0.3 * ratios) * 0.9 + log_sigmoid(-0.3 * ratios) * 0.1).div(0.8).mean()
    torch.testing.assert_close(of_rows(ipo_loss, values, beta=0.3), ipo)
    torch.testing.assert_close(of_rows(robust_dpo_loss, values, beta=0.3, label_smoothing=0.1), robust)


def test_no_pairs_have_loss_zero() -> None:
    none = torch.zeros(0)
    assert reward_model_loss(none, none).item() == 0.0
    assert dpo_loss(none, none, none, none, beta=0.1).item() == 0.0
    assert ipo_loss(none, none, none, none, beta=0.1).item() == 0.0


def test_the_loss_of_gspo_matches_numbers_worked_out_by_hand() -> None:
    old = torch.full((2, 2), -1.0, dtype=torch.float64)
    # Mean log-ratios: (0.2 - 0.1) / 2 = 0.05, and -0.3 for the one token of the second response.
    new = torch.tensor([[-0.8, -1.1], [-1.3, 0.0]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages = torch.tensor([[2.0, 2.0], [-1.0, -1.0]], dtype=torch.float64)
    result = sequence_policy_loss(new, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    # s = exp(0.05) = 1.051271 is inside: -2.102542. s = exp(-0.3) = 0.740818 with A < 0 is held at 0.8: +0.8.
    # The mean of both responses: -0.651271. Held: one of three tokens.
    assert result.loss.item() == pytest.approx(-0.6512711, abs=1e-7)
    assert result.clip_fraction.item() == pytest.approx(1 / 3)
    result.loss.backward()
    # -s A / 2 responses / 2 tokens for each token of the first response, none for the one that is held.
    assert new.grad is not None
    assert new.grad.flatten().tolist() == pytest.approx([-0.5256355, -0.5256355, 0.0, 0.0], abs=1e-7)


def test_the_loss_of_gspo_is_that_of_ppo_for_responses_of_one_token() -> None:
    generator = torch.Generator().manual_seed(5)
    new, old, advantages = torch.randn(3, 6, 1, generator=generator, dtype=torch.float64)
    mask = torch.ones(6, 1)
    one = sequence_policy_loss(new, old, advantages, mask, clip_low=0.2, clip_high=0.3)
    other = policy_loss(new, old, advantages, mask, clip_low=0.2, clip_high=0.3)
    assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-14)
    assert one.clip_fraction == other.clip_fraction


def test_the_loss_of_cispo_matches_numbers_worked_out_by_hand() -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64)
    new = torch.tensor([[-0.5, -1.1, -2.0]], dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([[2.0, -1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1]])
    result = clipped_weight_loss(new, old, advantages, mask, clip_low=0.5, clip_high=0.2)
    # r = 1.648721 -> 1.2, 0.904837, 0.367879 -> 0.5. L = -r A logprobs:
    # -1.2 * 2 * -0.5 = 1.2; 0.904837 * -1.1 = -0.995321; -0.5 * -2 = 1. The mean: 0.401560.
    assert result.loss.item() == pytest.approx(0.4015597, abs=1e-7)
    assert result.clip_fraction.item() == pytest.approx(2 / 3)
    result.loss.backward()
    # -r A / 3: the clipped tokens are trained as well.
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([-0.8, 0.3016125, -0.1666667], abs=1e-7)
