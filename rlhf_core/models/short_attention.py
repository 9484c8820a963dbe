"""Causal attention in bfloat16 on CPUs, for short sequences.

torch's kernel for this type gains nothing from `avx512_bf16`, and its backward pass is slow with and without
AMX (decision 5). Here attention is a batch of matrix products. The precision is that of flash attention:
scores and softmax are float32, and probabilities are rounded to bfloat16 for the products with values and
gradients. For long sequences torch's kernel is faster, so the length is limited.

Axes: N sequences times heads, L tokens, D dimensions of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_SCORES_PER_THREAD = 1 << 19


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    kernel: bool = False,
    most_scores: int | None = None,
) -> Tensor:
    """Return causal attention, (sequences, L, heads, D).

    Args:
        query: (sequences, heads, L, D)
        key: (sequences, key heads, L, D). Each head of keys serves a group of heads of queries.
        value: (sequences, key heads, L, D)
        scaling: Factor of the scores; None for 1 / sqrt(D).
        kernel: Whether torch's kernel computes the forward pass, which is faster with AMX.
        most_scores: Scores that are computed at once; None for 2 MB in float32 for each thread, which fits
            into the cache of its core. One sequence of one head is always computed whole.
    """
    sequences, heads = query.shape[:2]
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    q, k, v = (x.reshape(sequences * heads, *x.shape[2:]) for x in (query, key, value))
    factor = q.shape[-1] ** -0.5 if scaling is None else scaling
    most = _SCORES_PER_THREAD * torch.get_num_threads() if most_scores is None else most_scores
    at_once = max(1, most // q.shape[1] ** 2)
    function = _KernelForward if kernel else _Attention
    # torch declares Function.apply without types
    parts: list[Tensor] = []
    for part in zip(q.split(at_once), k.split(at_once), v.split(at_once), strict=True):
        parts.append(function.apply(*part, factor))  # type: ignore[no-untyped-call]
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.view(sequences, heads, *output.shape[1:]).transpose(1, 2)


class _Attention(torch.autograd.Function):
    """O = P V with P = softmax(scaling Q K' + mask);  dV = P' dO,  dP = dO V',
    dS = scaling P (dP - sum of P dP),  dQ = dS K,  dK = dS' Q.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        p = _probabilities(q, k, scaling).to(q.dtype)
        ctx.save_for_backward(q, k, v, p)
        ctx.scaling = scaling
        return p @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        return *_gradients(q, k, v, p.float(), p, ctx.scaling, d_output), None


class _KernelForward(torch.autograd.Function):
    """As `_Attention`, but torch's kernel computes O, and the backward pass computes P again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scaling = scaling
        query, key, value = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        p = _probabilities(q, k, ctx.scaling)
        return *_gradients(q, k, v, p, p.to(q.dtype), ctx.scaling, d_output), None


def _probabilities(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """Return P in float32, (N, L, L)."""
    length = q.shape[1]
    mask = torch.full((length, length), -torch.inf).triu_(1)
    scores = _float32_product(q, k.transpose(1, 2)).mul_(scaling).add_(mask)
    return torch.softmax(scores, dim=-1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, rounded: Tensor, scaling: float, d_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV from P in float32 and rounded to bfloat16."""
    d_p = _float32_product(d_output, v.transpose(1, 2))
    d_scores = torch._softmax_backward_data(d_p, p, -1, torch.float32)
    d_scores = d_scores.mul_(scaling).to(q.dtype)
    return d_scores @ k, d_scores.transpose(1, 2) @ q, rounded.transpose(1, 2) @ d_output


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for bfloat16 matrices, with sums and result in float32."""
    # oneDNN may round the inputs to bfloat16, which changes nothing because they are, and is then as fast.
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set when torch is imported
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        return torch.bmm(a.float(), b.float())
    finally:
        settings.fp32_precision = before
