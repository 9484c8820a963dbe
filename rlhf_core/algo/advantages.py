"""Rewards per token, and the advantages made of them.

Axes: B sequences, T response tokens. Results are targets: they carry no gradient. Nothing here whitens: PPO
does it with the statistics of the whole batch, see `rlhf_core.ppo.training.experience.Whitening`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algo.masking import as_float, select
from rlhf_core.config.base import GroupKind as GroupKind


@dataclass(frozen=True)
class AdvantageInputs:
    """What a user's advantages are made of: the responses of a step, the samples of a prompt together."""

    scores_B: Tensor
    """Composed scores with penalties, before the KL; NaN if a response has no score."""
    groups_B: Tensor
    """Number of the prompt."""
    lengths_B: Tensor
    """Tokens of each response."""
    finished_B: Tensor
    """Whether the policy ended the response with EOS."""


@torch.no_grad()
def token_rewards(
    scores_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, kl_coef: float, score_clip: float | None = None
) -> Tensor:
    """Return the reward of each token: the KL penalty, plus the score at the last token (Ziegler et al. 2019;
    Ouyang et al. 2022, eq. 2).

    >>> token_rewards(torch.tensor([2.0]), torch.tensor([[0.5, 1.0]]), torch.ones(1, 2), kl_coef=0.1)
    tensor([[-0.0500,  1.9000]])

    Args:
        scores_B: [B] scores of the sequences.
        kl_BT: [B, T] KL estimate of each token, in nats.
        mask_BT: [B, T] response tokens.
        kl_coef: Coefficient of the KL penalty.
        score_clip: Limit of the score's absolute value, or None. It applies before the KL is subtracted, so
            that it cannot hide the KL.

    Returns:
        [B, T], in the unit of the score, 0 outside the mask. A sequence without a mask token gets zeros.
    """
    mask = mask_BT.bool()
    scores = as_float(scores_B)
    if score_clip is not None:
        if not score_clip > 0:
            raise ValueError(f"score_clip must be above 0, or None; got {score_clip}")
        scores = scores.clamp(-score_clip, score_clip)
    # Not the last column: rows are padded, and a mask can have gaps.
    tokens_from_here = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (tokens_from_here == 1)
    # Not a product with `is_last`: a response without a score has NaN, and all its tokens would get NaN * 0.
    return torch.where(is_last, scores.unsqueeze(1), 0.0) - kl_coef * select(kl_BT, mask)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates and returns (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        returns = A + V

    t + 1 is the next VALID token: a masked token inside a row (the output of a tool) is skipped. After the
    last valid token V is 0.

    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.ones(1, 2), gamma=1.0, lam=1.0)
    (tensor([[0.5000, 0.5000]]), tensor([[1., 1.]]))

    Args:
        rewards: [B, T] reward of each token.
        values: [B, T] value before each token, in the unit of the reward.
        mask: [B, T] valid tokens.
        gamma: Discount factor.
        lam: Decay of the advantage (lambda).

    Returns:
        (advantages, returns), [B, T] each, in the unit of the reward, 0 outside the mask.
    """
    valid = mask.bool()
    rewards, values = select(rewards, valid), select(values, valid)
    # In the wider data type of the two.
    advantages = torch.zeros_like(rewards + values)
    next_value = advantages.new_zeros(valid.shape[0])
    next_advantage = next_value
    for t in reversed(range(valid.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        next_advantage = torch.where(valid[:, t], advantage, next_advantage)
        advantages[:, t] = next_advantage
    return select(advantages, valid), select(advantages + values, valid)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return R_t = r_t + gamma R_{t+1} over the valid tokens. [B, T], unit of the reward, 0 under the mask.

    Used by REINFORCE++ (Hu 2025) and for the per-token KL of the group estimators. GAE without a critic and
    with lam = 1 is this sum, so it follows the same rule for gaps.

    >>> returns_to_go(torch.tensor([[1.0, 0.0, 2.0]]), torch.ones(1, 3), gamma=0.5)
    tensor([[1.5000, 1.0000, 2.0000]])
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


@torch.no_grad()
def group_advantages(scores_B: Tensor, groups_B: Tensor, kind: GroupKind, eps: float = 1e-6) -> Tensor:
    """Return the advantage of each sequence within its group, usually the samples of one prompt. [B] -> [B].

        grpo                         (s - mean) / (std_unbiased + eps)   Shao et al. 2024, "DeepSeekMath"
        dr_grpo, reinforce_baseline  s - mean                            Liu et al. 2025; Hu et al. 2025
        rloo                         s - mean of the others              Kool 2019; Ahmadian et al. 2024

    `groups_B` holds any integer ids, in any order. A NaN score is left out of its group and gets 0. A group
    of one and a group of equal scores get exactly 0: s - mean of equal float32 scores is rounding noise, and
    eps cannot hide it.

    Calculated in float64 and on the CPU: sums over B numbers, in one order, give the same bits on every
    device.

    >>> scores, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    >>> group_advantages(scores, groups, "rloo")
    tensor([-2.,  2.,  0.,  0.])
    """
    if scores_B.dim() != 1 or groups_B.shape != scores_B.shape:
        shapes = f"{tuple(scores_B.shape)} and {tuple(groups_B.shape)}"
        raise ValueError(f"scores and groups must be of one shape [B]; got {shapes}")
    scores = scores_B.to("cpu", torch.float64)
    valid = ~scores.isnan()
    ids, group = torch.unique(groups_B.cpu(), return_inverse=True)

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(ids)).index_add_(0, group, torch.where(valid, x, 0.0))[group]

    def group_extreme(reduce: str, absent: float) -> Tensor:
        # Not the scores themselves: amin and amax would pass a NaN on to its whole group.
        seen = torch.where(valid, scores, absent)
        return scores.new_full((len(ids),), absent).scatter_reduce_(0, group, seen, reduce)[group]

    count = group_sum(torch.ones_like(scores))
    others = (count - 1).clamp(min=1)
    centred = scores - group_sum(scores) / count.clamp(min=1)
    if kind == "grpo":
        advantages = centred / ((group_sum(centred.square()) / others).sqrt() + eps)
    elif kind in ("dr_grpo", "reinforce_baseline"):
        advantages = centred
    elif kind == "rloo":
        # s - (sum - s) / (n - 1) = (s - mean) * n / (n - 1)
        advantages = centred * count / others
    else:
        raise ValueError(f"kind must be one of grpo, dr_grpo, reinforce_baseline, rloo; got {kind!r}")
    # By the extremes, which are exact, as the mean is not.
    equal = group_extreme("amin", torch.inf) == group_extreme("amax", -torch.inf)
    zero = equal | ~valid | (count < 2)
    return torch.where(zero, 0.0, advantages).to(scores_B.device, as_float(scores_B).dtype)
