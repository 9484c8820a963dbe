"""Locks: where the score and the KL go, GAE against its definition (law 4), rows with gaps, group advantages
against their definitions, groups of equal scores (law 6), NaN scores.

Axes: B sequences, T response tokens.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.algo.advantages import GroupKind, gae, group_advantages, returns_to_go, token_rewards

LAW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
KINDS = ("grpo", "dr_grpo", "reinforce_baseline", "rloo")


def random_rows(seed: int, batch: int = 3, tokens: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values, and a mask with gaps; NaN under the mask."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, batch, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(batch, tokens, generator=generator) < 0.7
    return torch.where(mask, rewards, math.nan), torch.where(mask, values, math.nan), mask


def reference_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition: A_t = sum_k (gamma lam)^k delta_{t+k}, each sum from scratch."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, following, strict=True)]
    decay = gamma * lam
    return [math.fsum(decay**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


# --- token_rewards


def test_the_score_joins_the_kl_at_the_last_mask_token() -> None:
    # row 0 ends at t = 1: 7 - 0.5 * 2 = 6; row 1 has a gap and ends at t = 2; row 2 has no token
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    kl = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.nan, 8.0], [math.nan] * 3])
    rewards = token_rewards(torch.tensor([7.0, -1.0, math.nan]), kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 6.0, 0.0], [-2.0, 0.0, -5.0], [0.0, 0.0, 0.0]]


def test_the_score_is_clipped_before_the_kl_joins_it() -> None:
    # clipping the sum instead would give 5 and -5
    scores, kl, mask = torch.tensor([100.0, -100.0]), torch.full((2, 1), 3.0), torch.ones(2, 1)
    rewards = token_rewards(scores, kl, mask, kl_coef=1.0, score_clip=5.0)
    assert rewards.tolist() == [[2.0], [-8.0]]
    with pytest.raises(ValueError, match="score_clip must be above 0"):
        token_rewards(torch.zeros(1), torch.zeros(1, 1), torch.ones(1, 1), 1.0, score_clip=0.0)


@LAW
@given(seed=st.integers(0, 10_000))
def test_token_rewards_sum_to_score_minus_kl(seed: int) -> None:
    kl, scores, mask = random_rows(seed)
    rewards = token_rewards(scores[:, 0].nan_to_num(), kl, mask, kl_coef=0.1)
    for row, k, score, m in zip(rewards, kl, scores[:, 0].nan_to_num(), mask, strict=True):
        expected = score.item() - 0.1 * math.fsum(k[m].tolist()) if m.any() else 0.0
        assert row.sum().item() == pytest.approx(expected, abs=1e-12)


# --- gae and returns_to_go


def test_gae_matches_numbers_worked_out_by_hand() -> None:
    # gamma 0.9, lam 0.8, gamma lam 0.72
    # t = 2: delta = 1 - 0.3             = 0.7    A = 0.7
    # t = 1: delta = 0 + 0.9*0.3 - 0.4   = -0.13  A = -0.13 + 0.72*0.7   = 0.374
    # t = 0: delta = 0 + 0.9*0.4 - 0.5   = -0.14  A = -0.14 + 0.72*0.374 = 0.12928
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.4, 0.3]], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.ones(1, 3), 0.9, 0.8)
    assert advantages[0].tolist() == pytest.approx([0.12928, 0.374, 0.7], abs=1e-14)
    assert returns[0].tolist() == pytest.approx([0.62928, 0.774, 1.0], abs=1e-14)


@LAW
@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_a_gap_in_a_row_is_ignored(seed: int, gamma: float, lam: float) -> None:
    rewards, values, mask = random_rows(seed)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for b in range(len(mask)):
        m = mask[b]
        expected = reference_gae(rewards[b, m].tolist(), values[b, m].tolist(), gamma, lam)
        assert advantages[b, m].tolist() == pytest.approx(expected, abs=1e-12)
        alone = gae(rewards[b : b + 1, m], values[b : b + 1, m], torch.ones(1, int(m.sum())), gamma, lam)
        assert torch.equal(advantages[b, m], alone[0][0])
        assert torch.equal(returns[b, m], alone[1][0])
    assert torch.all(advantages[~mask] == 0.0)
    assert torch.all(returns[~mask] == 0.0)


@LAW
@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1))
def test_lambda_one_is_monte_carlo_and_zero_is_td(seed: int, gamma: float) -> None:
    rewards, values, mask = random_rows(seed)
    monte_carlo = gae(rewards, values, mask, gamma, 1.0)[1]
    errors = gae(rewards, values, mask, gamma, 0.0)[0]
    to_go = returns_to_go(rewards, mask, gamma)
    for b in range(len(mask)):
        r, v = rewards[b, mask[b]].tolist(), values[b, mask[b]].tolist()
        sums = [math.fsum(gamma**k * x for k, x in enumerate(r[t:])) for t in range(len(r))]
        assert monte_carlo[b, mask[b]].tolist() == pytest.approx(sums, abs=1e-12)
        assert to_go[b, mask[b]].tolist() == pytest.approx(sums, abs=1e-12)
        one_step = [r[t] + gamma * ([*v, 0.0][t + 1]) - v[t] for t in range(len(r))]
        assert errors[b, mask[b]].tolist() == pytest.approx(one_step, abs=1e-12)


def test_returns_to_go_match_hand_computed_numbers() -> None:
    # 4; 2 + 0.5*4 = 4; 1 + 0.5*4 = 3: the gap at t = 1 is not discounted
    rewards = torch.tensor([[1.0, 99.0, 2.0, 4.0, 99.0]])
    returns = returns_to_go(rewards, torch.tensor([[1, 0, 1, 1, 0]]), 0.5)
    assert returns.tolist() == [[3.0, 0.0, 4.0, 4.0, 0.0]]


def test_gae_does_not_whiten() -> None:
    rewards, values, mask = random_rows(11)
    once, tenfold = gae(rewards, values, mask, 0.9, 0.9), gae(10 * rewards, 10 * values, mask, 0.9, 0.9)
    assert torch.allclose(10 * once[0], tenfold[0], atol=1e-12)


def test_targets_carry_no_gradient_and_empty_batches_stay_empty() -> None:
    rewards, values, mask = random_rows(12)
    assert not any(x.requires_grad for x in gae(rewards, values.requires_grad_(), mask, 1.0, 0.95))
    for shape in ((0, 4), (2, 0)):
        empty = torch.zeros(shape)
        assert gae(empty, empty, empty, 1.0, 1.0)[0].shape == shape
        assert token_rewards(torch.zeros(shape[0]), empty, empty, 0.1).shape == shape


# --- group_advantages


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("rloo", [-3.0, -1.5, 4.5]),  # 1 - (2+6)/2, 2 - (1+6)/2, 6 - (1+2)/2
        ("dr_grpo", [-2.0, -1.0, 3.0]),  # mean 3
        ("reinforce_baseline", [-2.0, -1.0, 3.0]),
        ("grpo", [a / (math.sqrt(7.0) + 1e-6) for a in (-2.0, -1.0, 3.0)]),  # variance (4+1+9)/2 = 7
    ],
)
def test_each_kind_matches_numbers_worked_out_by_hand(kind: GroupKind, expected: list[float]) -> None:
    # two groups, mingled; the second holds three times the scores of the first, 100 higher
    scores = torch.tensor([1.0, 106.0, 2.0, 103.0, 6.0, 118.0], dtype=torch.float64)
    groups = torch.tensor([7, -2, 7, -2, 7, -2])
    advantages = group_advantages(scores, groups, kind)
    assert advantages[groups == 7].tolist() == pytest.approx(expected, rel=1e-14)
    order = [1, 0, 2]  # the second group's scores come as 106, 103, 118
    scale = 1.0 if kind == "grpo" else 3.0
    assert advantages[groups == -2].tolist() == pytest.approx([scale * expected[i] for i in order], rel=1e-5)


@LAW
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS))
def test_each_kind_matches_its_definition_with_nan_scores(seed: int, kind: GroupKind) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(20, generator=generator, dtype=torch.float64)
    scores[torch.rand(20, generator=generator) < 0.2] = math.nan
    groups = torch.randint(5, (20,), generator=generator)
    advantages = group_advantages(scores, groups, kind)
    for i in range(20):
        members = [j for j in range(20) if groups[j] == groups[i] and not math.isnan(scores[j].item())]
        seen = [scores[j].item() for j in members]
        if i not in members or len(members) < 2:
            assert advantages[i].item() == 0.0
            continue
        s = scores[i].item()
        expected = {
            "grpo": (s - statistics.fmean(seen)) / (statistics.stdev(seen) + 1e-6),
            "rloo": s - statistics.fmean(scores[j].item() for j in members if j != i),
        }.get(kind, s - statistics.fmean(seen))
        assert advantages[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.7, 0.1, -1e30, 3.0, 16777217.1])
def test_equal_scores_give_exactly_zero(kind: GroupKind, value: float) -> None:
    for dtype in (torch.float32, torch.float64):
        for size in range(1, 40):
            scores = torch.full((size,), value, dtype=dtype)
            assert torch.all(group_advantages(scores, torch.zeros(size, dtype=torch.long), kind) == 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_score_gets_zero_advantage(kind: GroupKind) -> None:
    one_group = torch.zeros(4, dtype=torch.long)
    with_nan = group_advantages(torch.tensor([1.0, math.nan, 4.0, 2.0]), one_group, kind)
    without = group_advantages(torch.tensor([1.0, 4.0, 2.0]), one_group[:3], kind)
    assert with_nan.tolist() == [without[0].item(), 0.0, without[1].item(), without[2].item()]
    lonely = group_advantages(torch.tensor([5.0, math.nan]), one_group[:2], kind)
    assert lonely.tolist() == [0.0, 0.0]


@LAW
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), shift=st.floats(-100, 100))
def test_group_advantages_ignore_order_ids_and_shift(
    seed: int,
    kind: GroupKind,
    shift: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(12, generator=generator, dtype=torch.float64)
    groups = torch.randint(3, (12,), generator=generator)
    order = torch.randperm(12, generator=generator)
    advantages = group_advantages(scores, groups, kind)
    moved = group_advantages(scores[order] + shift, groups[order] * 17, kind)
    assert torch.allclose(moved, advantages[order], atol=1e-9)
    for g in range(3):
        assert advantages[groups == g].sum().item() == pytest.approx(0.0, abs=1e-9)


def test_small_differences_on_a_large_offset_survive_in_float32() -> None:
    # 4096 and 4096.5 are floats: mean 4096.25, advantages -0.25 and 0.25, which a float32 variance would lose
    scores = torch.tensor([4096.0, 4096.5], dtype=torch.float32)
    std = math.sqrt(0.125)
    expected = [-0.25 / (std + 1e-6), 0.25 / (std + 1e-6)]
    advantages = group_advantages(scores, torch.zeros(2, dtype=torch.long), "grpo")
    assert advantages.tolist() == pytest.approx(expected, rel=1e-7)


def test_wrong_kinds_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'ppo'"):
        group_advantages(torch.zeros(2), torch.zeros(2), "ppo")  # type: ignore[arg-type]  # unknown on purpose
    with pytest.raises(ValueError, match="of one shape"):
        group_advantages(torch.zeros(2), torch.zeros(3), "grpo")
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), "grpo").shape == (0,)
