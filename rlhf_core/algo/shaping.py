"""Terms added to a score before it becomes a reward.

Axes: B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.algo.masking import as_float


@torch.no_grad()
def overlong_penalty(lengths_B: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return the soft penalty for long responses (Yu et al. 2025, "DAPO", eq. 13), in the unit of the score.

        length <= max_length - buffer    0
        up to max_length                 falls linearly to -factor
        beyond                           -factor

    `lengths_B`, `max_length`, `buffer`: response tokens. A buffer of 0 is a step just above `max_length`.

    >>> overlong_penalty(torch.tensor([10, 18, 20]), max_length=20, buffer=4, factor=1.0)
    tensor([-0.0000, -0.5000, -1.0000])
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer must be between 0 and max_length ({max_length}) tokens; got {buffer}")
    excess = as_float(lengths_B) - (max_length - buffer)
    share = (excess / buffer).clamp(0.0, 1.0) if buffer > 0 else (excess > 0).to(excess.dtype)
    return -factor * share
