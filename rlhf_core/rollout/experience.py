"""From rollouts and the four models' numbers to experience: KL, token rewards, advantages, returns. Pure torch.

Axes: `B` responses, `T` the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.algo.advantages import gae, token_rewards
from rlhf_core.algo.importance import importance_weights
from rlhf_core.algo.kl import kl_estimate
from rlhf_core.algo.masking import masked_mean, masked_sum, masked_var, masked_whiten
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.types import Rollout


@dataclass(frozen=True)
class Experience:
    """One rollout batch, ready for the update. All float32 but the mask."""

    mask_BT: torch.Tensor
    """True on response tokens, from lengths, never from pad ids."""
    old_logprobs_BT: torch.Tensor
    values_BT: torch.Tensor
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor
    weights_BT: torch.Tensor
    """Importance weights for the gap between engine and trainer."""
    kl_B: torch.Tensor
    """Token sum of k1 per response, in nats."""
    scores_B: torch.Tensor
    """As composed, before the clip and the KL, penalties included."""
    metrics: dict[str, float]


def padded(arrays: Sequence[Any]) -> torch.Tensor:
    """(T,) each -> (B, T), zeros beyond."""
    return pad_sequence([torch.from_numpy(np.array(array, dtype=np.float32)) for array in arrays], batch_first=True)


def make_experience(
    rollouts: Sequence[Rollout],
    *,
    old_logprobs: Sequence[Any],
    ref_logprobs: Sequence[Any],
    values: Sequence[Any],
    entropy: Sequence[Any],
    scores: Sequence[float],
    ppo: PPOConfig,
    kl_coef: float,
) -> Experience:
    """Per-sequence arrays (T,) in the order of `rollouts`; `scores` one number per response."""
    old_BT, ref_BT, values_BT = padded(old_logprobs), padded(ref_logprobs), padded(values)
    rollout_BT, entropy_BT = padded([r.rollout_logprobs for r in rollouts]), padded(entropy)
    lengths_B = torch.tensor([len(r.response_ids) for r in rollouts])
    mask_BT = torch.arange(old_BT.shape[1]) < lengths_B.unsqueeze(1)
    finished_B = torch.tensor([r.finished for r in rollouts])
    scores_B = torch.tensor(scores, dtype=torch.float32) - ppo.missing_eos_penalty * (~finished_B).float()

    k1_BT = kl_estimate(old_BT, ref_BT, "k1")
    penalty_BT = k1_BT if ppo.kl.estimator == "k1" else kl_estimate(old_BT, ref_BT, ppo.kl.estimator)
    rewards_BT = token_rewards(scores_B, penalty_BT, mask_BT, kl_coef, ppo.score_clip)
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, ppo.gamma, ppo.lam)
    kl_B = (k1_BT * mask_BT).sum(1)
    metrics = {
        "objective/kl": kl_B.mean().item(),
        "objective/scores": scores_B.mean().item(),
        "objective/scores_std": scores_B.std(unbiased=False).item(),
        "objective/rlhf_reward": rewards_BT.sum(1).mean().item(),
        "objective/entropy": (masked_sum(entropy_BT, mask_BT) / len(rollouts)).item(),
        "policy/entropy": masked_mean(entropy_BT, mask_BT).item(),
        "value/mean": masked_mean(values_BT, mask_BT).item(),
        "value/explained_variance": _explained(values_BT, returns_BT, mask_BT),
        "rollout/length": lengths_B.float().mean().item(),
        "rollout/eos_rate": finished_B.float().mean().item(),
        **_engine_gap(old_BT, rollout_BT, mask_BT),
    }
    if ppo.whiten_advantages:
        advantages_BT = masked_whiten(advantages_BT, mask_BT)
    weights_BT = importance_weights(old_BT, rollout_BT, mask_BT, ppo.importance)
    return Experience(mask_BT, old_BT, values_BT, advantages_BT, returns_BT, weights_BT, kl_B, scores_B, metrics)


def _engine_gap(old_BT: torch.Tensor, rollout_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's, for the same weights and tokens."""
    gap_BT = (old_BT - rollout_BT).abs() * mask_BT
    weights_BT = importance_weights(old_BT, rollout_BT, mask_BT, "truncate", 0.0, float("inf"))
    total = weights_BT.sum()
    return {
        "rollout/logprob_gap_mean": masked_mean(gap_BT, mask_BT).item(),
        "rollout/logprob_gap_max": gap_BT.max().item(),
        "rollout/logprob_gap_k3": masked_mean(kl_estimate(rollout_BT, old_BT, "k3"), mask_BT).item(),
        "rollout/effective_sample_size": (total.square() / weights_BT.square().sum() / mask_BT.sum()).item(),
    }


def _explained(values_BT: torch.Tensor, returns_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary."""
    variance = masked_var(returns_BT, mask_BT).item()
    return 1.0 - masked_var(returns_BT - values_BT, mask_BT).item() / variance if variance > 0 else 0.0
