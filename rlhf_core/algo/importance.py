"""Weights that correct for the engine's sampling distribution differing from the training engine's.

Axes: B sequences, T response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_core.algo.kl import LOG_RATIO_LIMIT
from rlhf_core.algo.masking import select

ImportanceKind = Literal["none", "truncate", "mask", "sequence-mask"]


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    kind: ImportanceKind,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Return importance weights from w = exp(old - rollout), with the log-ratio clamped to [-20, 20].

        none           1: no correction
        truncate       clamp(w, low, high)                                       TIS, Yao et al. 2025
        mask           w where low <= w <= high, else 0                          IcePop, Ling team 2025
        sequence-mask  w in rows whose geometric mean of w is within [low, high], else 0 for the whole row

    >>> old, rollout = torch.tensor([[0.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    >>> importance_weights(old, rollout, torch.ones(1, 2), "truncate")  # exp(1) is cut to 2
    tensor([[2., 1.]])

    Args:
        old_logprobs: [B, T] log-probabilities of the trainer before the update.
        rollout_logprobs: [B, T] log-probabilities of the engine that sampled.
        mask: [B, T] valid tokens.
        kind: One of the above.
        low: Lower bound.
        high: Upper bound.

    Returns:
        [B, T], without unit or gradient, 0 outside the mask. A NaN log-probability of a valid token stays NaN
        for every kind except `none`: a bound must not turn it into 0.
    """
    valid = mask.bool()
    log_w = select(old_logprobs, valid) - select(rollout_logprobs, valid)
    log_w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w = log_w.exp()
    if kind == "none":
        weights = torch.ones_like(w)
    elif kind == "truncate":
        weights = w.clamp(low, high)
    elif kind == "mask":
        # Both comparisons are false for NaN, so it stays NaN. `low <= w <= high` would make it 0.
        weights = torch.where((w < low) | (w > high), 0.0, w)
    elif kind == "sequence-mask":
        tokens = valid.sum(dim=1, keepdim=True).clamp(min=1)
        # From logarithms: the product of the weights of a long row leaves the range of float32.
        geometric_mean = (log_w.sum(dim=1, keepdim=True) / tokens).exp()
        weights = torch.where((geometric_mean < low) | (geometric_mean > high), 0.0, w)
    else:
        raise ValueError(f"kind must be one of none, truncate, mask, sequence-mask; got {kind!r}")
    return select(weights, valid)
