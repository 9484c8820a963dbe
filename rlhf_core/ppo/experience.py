"""Compute the experience of a step from its rollouts and the outputs of the models: KL, token rewards,
advantages, returns.

Axes: `B` responses, `T` the longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.algo.advantages import (
    GroupKind,
    gae,
    group_advantages,
    overlong_penalty,
    returns_to_go,
    token_rewards,
)
from rlhf_core.algo.importance import importance_weights
from rlhf_core.algo.kl import kl_estimate
from rlhf_core.algo.masking import masked_mean, masked_sum, masked_var, masked_whiten, select
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.types import Rollout

_LOOP_TOKENS = 16
"""Shortest response and shortest loop that count as repetition, in tokens."""


@dataclass(frozen=True)
class Experience:
    """One rollout batch, ready for the update. All tensors but the mask are float32."""

    mask_BT: torch.Tensor
    """True on response tokens. It follows from lengths, because a response may contain the padding token. A
    response without a score is False on its whole row.
    """
    old_logprobs_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor
    values_BT: torch.Tensor
    """Zeros without a critic."""
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor
    weights_BT: torch.Tensor
    """Importance weights for the gap between engine and trainer."""
    kl_B: torch.Tensor
    """Token sum of k1 per response, in nats."""
    scores_B: torch.Tensor
    """Composed scores with penalties, before the KL. NaN if a response has no score."""
    metrics: dict[str, float]


def padded(arrays: Sequence[Any]) -> torch.Tensor:
    """Stack arrays of shape (T,) to (B, T), padded with zeros."""
    return pad_sequence(
        [torch.from_numpy(np.array(array, dtype=np.float32)) for array in arrays], batch_first=True
    )


def shaped_scores(rollouts: Sequence[Rollout], scores: Sequence[float], ppo: PPOConfig) -> torch.Tensor:
    """Return scores (B,) minus the penalties for responses that were cut by the length limit or came close to
    it.
    """
    scores_B = torch.tensor(scores, dtype=torch.float32)
    finished_B = torch.tensor([r.finished for r in rollouts])
    scores_B = scores_B - ppo.eos_penalty * (~finished_B).float()
    if ppo.overlong is not None:
        lengths_B = torch.tensor([len(r.response_ids) for r in rollouts])
        scores_B = scores_B + overlong_penalty(
            lengths_B, ppo.max_new_tokens, ppo.overlong.buffer, ppo.overlong.factor
        )
    return scores_B


def uniform_groups(scores_B: torch.Tensor, ppo: PPOConfig) -> list[int]:
    """Return the groups (consecutive samples of one prompt) with equal scores, from which nothing is learned.

    NaN scores are ignored.
    """
    groups = scores_B.reshape(-1, ppo.samples_per_prompt)
    low = torch.where(groups.isnan(), torch.inf, groups).amin(1)
    high = torch.where(groups.isnan(), -torch.inf, groups).amax(1)
    uniform: list[int] = torch.nonzero(low >= high).flatten().tolist()
    return uniform


def make_experience(
    rollouts: Sequence[Rollout],
    *,
    old_logprobs: Sequence[Any],
    ref_logprobs: Sequence[Any],
    values: Sequence[Any] | None,
    entropy: Sequence[Any],
    scores: Sequence[float],
    ppo: PPOConfig,
    kl_coef: float,
) -> Experience:
    """Return the experience of one step. The samples of a prompt must be consecutive.

    Args:
        rollouts: Of the step.
        old_logprobs: Of the policy before the update, (T,) for each rollout.
        ref_logprobs: Of the reference, (T,) for each rollout.
        values: Of the critic, (T,) for each rollout; None without a critic.
        entropy: Of the policy, (T,) for each rollout.
        scores: One per rollout. A response with the score NaN is masked.
        ppo: Section `ppo`.
        kl_coef: Coefficient of the KL penalty, used with `kl.place: reward`.
    """
    old_BT, ref_BT = padded(old_logprobs), padded(ref_logprobs)
    values_BT = torch.zeros_like(old_BT) if values is None else padded(values)
    rollout_BT, entropy_BT = padded([r.rollout_logprobs for r in rollouts]), padded(entropy)
    lengths_B = torch.tensor([len(r.response_ids) for r in rollouts])
    finished_B = torch.tensor([r.finished for r in rollouts])
    scores_B = shaped_scores(rollouts, scores, ppo)
    scored_B = ~scores_B.isnan()
    mask_BT = (torch.arange(old_BT.shape[1]) < lengths_B.unsqueeze(1)) & scored_B.unsqueeze(1)

    k1_BT = select(kl_estimate(old_BT, ref_BT, "k1"), mask_BT)
    in_reward = kl_coef if ppo.kl.place == "reward" else 0.0
    penalty_BT = kl_estimate(old_BT, ref_BT, ppo.kl.used_estimator) if in_reward else k1_BT
    rewards_BT = token_rewards(scores_B, penalty_BT, mask_BT, in_reward)
    if ppo.by_group:
        kl_only_BT = token_rewards(torch.zeros_like(scores_B), penalty_BT, mask_BT, in_reward)
        advantages_BT = returns_BT = _group_advantages(scores_B, kl_only_BT, mask_BT, ppo)
    elif ppo.uses_critic:
        advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, ppo.gamma, ppo.lam)
    else:
        advantages_BT = returns_BT = returns_to_go(rewards_BT, mask_BT, ppo.gamma)
    kl_B, known_scores_B = k1_BT.sum(1)[scored_B], scores_B[scored_B]
    metrics = {
        "objective/kl": _mean(kl_B),
        "objective/scores": _mean(known_scores_B),
        "objective/scores_std": _std(known_scores_B),
        "objective/rlhf_reward": _mean(rewards_BT.sum(1)[scored_B]),
        "objective/entropy": (masked_sum(entropy_BT, mask_BT) / scored_B.sum().clamp(min=1)).item(),
        "policy/entropy": masked_mean(entropy_BT, mask_BT).item(),
        **_response_metrics(lengths_B, finished_B, scored_B),
        "rollout/repeating_rate": fmean(repeats(rollout.response_ids) for rollout in rollouts),
        "rollout/score_length_correlation": _score_length(known_scores_B, lengths_B[scored_B]),
        **_engine_gap(old_BT, rollout_BT, mask_BT),
    }
    if ppo.uses_critic:
        metrics["value/mean"] = masked_mean(values_BT, mask_BT).item()
        explained = _explained_variance(values_BT, returns_BT, mask_BT)
        if explained is not None:
            metrics["value/explained_variance"] = explained
    if ppo.samples_per_prompt > 1:
        uniform = uniform_groups(scores_B, ppo)
        metrics["rollout/zero_variance_groups"] = len(uniform) * ppo.samples_per_prompt / len(rollouts)
    if ppo.whitens:
        advantages_BT = masked_whiten(advantages_BT, mask_BT)
    weights_BT = importance_weights(old_BT, rollout_BT, mask_BT, ppo.used_importance, *ppo.importance_bounds)
    return Experience(
        mask_BT,
        old_BT,
        ref_BT,
        values_BT,
        advantages_BT,
        returns_BT,
        weights_BT,
        k1_BT.sum(1),
        scores_B,
        metrics,
    )


def _response_metrics(
    lengths_B: torch.Tensor, finished_B: torch.Tensor, scored_B: torch.Tensor
) -> dict[str, float]:
    return {
        "rollout/length": lengths_B.float().mean().item(),
        "rollout/eos_rate": finished_B.float().mean().item(),
        "rollout/empty_rate": (finished_B & (lengths_B <= 1)).float().mean().item(),
        "rollout/unscored": float((~scored_B).sum()),
    }


def repeats(response_ids: Sequence[int]) -> bool:
    """Return whether a response of 16 tokens or more has at most two different tokens or contains a loop.

    A loop is a piece of any length that occurs three or more times in a row and covers at least 16 tokens and
    a quarter of the response.
    """
    length = len(response_ids)
    if length < _LOOP_TOKENS:
        return False
    if len(set(response_ids)) <= 2:
        return True
    ids_T = np.asarray(response_ids)
    shortest = max(_LOOP_TOKENS, math.ceil(length / 4))
    for period in _periods(ids_T, shortest // 5):
        needed = max(3 * period, shortest) - period
        # In a loop of this period, each token is equal to the token one period before.
        differs = np.flatnonzero(ids_T[period:] != ids_T[:-period])
        edges = np.concatenate(([-1], differs, [length - period]))
        if np.diff(edges).max() - 1 >= needed:
            return True
    return False


def _periods(ids_T: np.ndarray, window: int) -> Iterator[int]:
    """Yield the periods that a loop of at least `5 * window` tokens can have, each once.

    All periods up to a third of the length would take quadratic time. Only those are tried at which one of
    about twenty windows of the response recurs. One of the windows begins among the first `window` tokens of
    the loop. One period later, still within the loop, the same tokens follow.

    A window that repeats a few tokens (spaces, dashes) recurs at nearly every position of a long series of
    them. If the series is longer than the loop's period, the whole loop has the period of the series. If it
    is shorter, the window is extended to the end of the series before the search. Windows that overlap their
    recurrence by more than half are of this kind, so the number of periods is small in all cases.
    """
    length, size, text = len(ids_T), ids_T.itemsize, ids_T.tobytes()
    seen = set()
    for start in range(0, length - window, window):
        end = start + window
        small = _small_period(text[start * size : end * size], size)
        if small:
            if small not in seen:
                seen.add(small)
                yield small
            breaks = np.flatnonzero(ids_T[start + small :] != ids_T[start:-small])
            if not len(breaks):
                continue
            end = start + small + int(breaks[0]) + 1
        piece = text[start * size : end * size]
        for position in _occurrences(text, piece, start + 1, end + length // 3, size):
            period = position - start
            if period not in seen:
                seen.add(period)
                yield period


def _small_period(piece: bytes, size: int) -> int:
    """Return the smallest period of `piece` that is at most half of its tokens, or 0. A token has `size`
    bytes.
    """
    half = len(piece) // size // 2
    for period in _occurrences(piece, piece[: half * size], 1, 2 * half, size):
        if piece[period * size :] == piece[: -period * size]:
            return period
    return 0


def _occurrences(text: bytes, piece: bytes, first: int, end: int, size: int) -> Iterator[int]:
    """Yield the positions of the tokens of `piece` in `text`, between the tokens `first` and `end`."""
    offset = text.find(piece, first * size, end * size)
    while offset >= 0:
        if offset % size == 0:
            yield offset // size
        # `find` compares bytes, so it can stop within a token. Continue at the next one.
        offset = text.find(piece, offset + size - offset % size, end * size)


def _score_length(scores_B: torch.Tensor, lengths_B: torch.Tensor) -> float:
    """Return Pearson's correlation, or 0 if scores or lengths are constant."""
    scores_B, lengths_B = scores_B.double(), lengths_B.double()
    scores_B, lengths_B = scores_B - scores_B.mean(), lengths_B - lengths_B.mean()
    scale = scores_B.norm() * lengths_B.norm()
    return ((scores_B * lengths_B).sum() / scale).item() if scale > 0 else 0.0


def _group_advantages(
    scores_B: torch.Tensor, kl_only_BT: torch.Tensor, mask_BT: torch.Tensor, ppo: PPOConfig
) -> torch.Tensor:
    """Return (B, T): the advantage of a response in its group on each of its tokens, minus the future KL
    penalty.
    """
    groups_B = torch.arange(len(scores_B)) // ppo.samples_per_prompt
    advantages_B = group_advantages(scores_B, groups_B, cast(GroupKind, ppo.algorithm))
    return select(advantages_B.unsqueeze(1) + returns_to_go(kl_only_BT, mask_BT, ppo.gamma), mask_BT)


def _mean(values_B: torch.Tensor) -> float:
    return values_B.mean().item() if values_B.numel() else 0.0


def _std(values_B: torch.Tensor) -> float:
    """Return the standard deviation, which is exactly 0 for equal values."""
    # In float64, because the float32 mean of equal values may differ from them, and guards compare with 0.
    return values_B.double().std(unbiased=False).item() if values_B.numel() else 0.0


def _engine_gap(old_BT: torch.Tensor, rollout_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """Return the differences between engine and trainer for the same weights and tokens."""
    gap_BT = select((old_BT - rollout_BT).abs(), mask_BT)
    weights_BT = importance_weights(old_BT, rollout_BT, mask_BT, "truncate", 0.0, float("inf"))
    total = weights_BT.sum()
    return {
        "rollout/logprob_gap_mean": masked_mean(gap_BT, mask_BT).item(),
        "rollout/logprob_gap_max": gap_BT.max().item(),
        "rollout/logprob_gap_k3": masked_mean(kl_estimate(rollout_BT, old_BT, "k3"), mask_BT).item(),
        "rollout/effective_sample_size": (
            (total.square() / (weights_BT.square().sum() * mask_BT.sum()).clamp(min=1e-30)).item()
        ),
    }


def _explained_variance(
    values_BT: torch.Tensor, returns_BT: torch.Tensor, mask_BT: torch.Tensor
) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns), or None if the returns do not vary: then no critic is
    better or worse than another one.
    """
    variance = masked_var(returns_BT, mask_BT).item()
    if variance == 0:
        return None
    return 1.0 - masked_var(returns_BT - values_BT, mask_BT).item() / variance
