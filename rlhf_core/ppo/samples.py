"""What an update is given: plain records with numpy arrays, so that Ray can share them.

Axes: `T` response tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class TrainSample:
    """One response with all the update needs."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    old_logprobs: FloatArray
    """(T,) by the policy before the update."""
    advantages: FloatArray
    """(T,) whitened if configured."""
    ref_logprobs: FloatArray
    """(T,) by the reference."""
    returns: FloatArray
    """(T,) from unwhitened advantages."""
    old_values: FloatArray
    """(T,) by the critic before the update."""
    weights: FloatArray
    """(T,) importance weights for the gap between engine and trainer; ones if none."""


@dataclass(frozen=True)
class OptimizerStep:
    """What one rank does in one optimizer step."""

    micro_batches: list[list[int]]
    """Indices into the rank's samples; the same count on every rank, so some may be empty."""
    denominator: float
    """Tokens or sequences of the WHOLE step, over all ranks (see `losses.step_denominator`)."""
    ptx_micro_batches: list[list[int]] = field(default_factory=list)
    """Indices into the rank's demonstrations, cut the same way; empty without a pretraining loss."""
    ptx_targets: int = 0
    """Target tokens among the demonstrations of the whole step."""
