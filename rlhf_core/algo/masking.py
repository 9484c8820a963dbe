"""Sums, means, variances and whitening over the valid tokens only.

Axes: B sequences, T response tokens. `mask` has the shape of `x`; true (1.0) marks a valid token.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8
"""Added to the variance before its root is taken."""


def as_float(x: Tensor) -> Tensor:
    """Return `x` itself if it is float32 or float64, else `x` in float32.

    >>> as_float(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def select(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` on the mask and 0 elsewhere, in float32 or float64.

    `torch.where` and not a product: 0 * NaN is NaN, in the value and in the gradient. Axes of size one in `x`
    broadcast; the mask never does, because it is also what is counted.

    >>> select(torch.tensor([1.0, torch.nan]), torch.tensor([1, 0]))
    tensor([1., 0.])
    """
    if x.dim() != mask.dim() or any(a not in (1, b) for a, b in zip(x.shape, mask.shape, strict=True)):
        raise ValueError(f"mask must have the shape of the values {tuple(x.shape)}; got {tuple(mask.shape)}")
    return torch.where(mask.bool(), as_float(x), 0.0)


def divide(total: Tensor, denominator: Tensor | float) -> Tensor:
    """Return `total / denominator` in the dtype of `total`, for every type of the denominator.

    >>> divide(torch.tensor(3.0), 2)
    tensor(1.5000)
    """
    # torch promotes tensors without axes to the wider type: a count in float64 would widen the loss.
    if isinstance(denominator, Tensor):
        denominator = denominator.to(total.dtype)
    return total / denominator


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `x` over the mask. Scalar, unit of `x`; 0.0 for an empty mask.

    >>> masked_sum(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([1, 1, 0]))
    tensor(3.)
    """
    return select(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor, denominator: Tensor | float | None = None) -> Tensor:
    """Return the mean of `x` over the mask: sum(m x) / sum(m). Scalar, unit of `x`; 0.0 for an empty mask.

    The count is exact. An epsilon in it would bias every mean, and short batches the most. `denominator`
    (positive) replaces the count: give it the tokens of the whole optimizer step, and the values of its
    micro-batches add up.

    >>> masked_mean(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([1, 1, 0]))
    tensor(1.5000)
    """
    if denominator is None:
        denominator = mask.bool().sum().clamp(min=1)
    return divide(masked_sum(x, mask), denominator)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance over the mask: sum m (x - mu)^2 / (n - 1), or / n if not `unbiased`.

    Scalar; 0.0 if n < 2.

    >>> masked_var(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([1, 1, 0]))
    tensor(2.)
    """
    # float64 inside: a float32 mean of equal values is not quite that value, and whitening divides by this.
    wide = select(x, mask).double()
    count = mask.bool().sum()
    squares = masked_sum((wide - masked_mean(wide, mask)).square(), mask)
    return (squares / (count - int(unbiased)).clamp(min=1)).to(as_float(x).dtype)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, eps: float = WHITEN_EPS) -> Tensor:
    """Return (x - mu) * rsqrt(var + eps) on the mask, and 0 elsewhere; plus mu if not `shift_mean`.

    Same shape as `x`, no unit. mu and the unbiased variance are those of all valid tokens given.

    PPO does not call this function: no process holds the advantages of the whole batch.
    `rlhf_core.ppo.training.experience.summarize` computes the same mean and variance from sums of each
    response, and a test compares the results.

    >>> masked_whiten(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([1, 1, 0]))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    wide = select(x, mask).double()
    mean = masked_mean(wide, mask)
    whitened = (wide - mean) * torch.rsqrt(masked_var(wide, mask) + eps)
    if not shift_mean:
        whitened = whitened + mean
    return select(whitened, mask).to(as_float(x).dtype)
