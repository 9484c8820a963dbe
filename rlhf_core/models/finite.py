"""Whether a tensor is finite, without a copy of it."""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has neither NaN nor infinity. Integers, 8-bit floats and `meta` count as
    finite.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta or tensor.element_size() == 1:
        return True
    low, high = torch.aminmax(tensor)  # aminmax propagates NaN and allocates no tensor of this size
    return math.isfinite(low.item()) and math.isfinite(high.item())
