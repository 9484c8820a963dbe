"""Scores of the reward model, or of an ensemble of them, from the ranks to the controller.

Axis: `B` responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_core.ppo.training.batch import RankShare


@dataclass(frozen=True)
class ModelScores:
    """Scores of some responses, of one rank or of the whole batch."""

    values: list[float]
    """(B,) normalised scores; with an ensemble the combined ones."""
    deviations: list[float] = field(default_factory=list)
    """(B,) standard deviation over the members of an ensemble; empty without one."""


def in_batch_order(shares: Sequence[RankShare], of_ranks: Sequence[ModelScores]) -> ModelScores:
    """Return the scores of all ranks in the order of the batch."""
    count = sum(len(share.indices) for share in shares)
    values_B, deviations_B, is_ensemble = np.zeros(count), np.zeros(count), False
    for share, scores in zip(shares, of_ranks, strict=True):
        values_B[share.indices] = scores.values
        # A rank without responses has no deviations, also with an ensemble.
        if scores.deviations:
            is_ensemble = True
            deviations_B[share.indices] = scores.deviations
    return ModelScores(values_B.tolist(), deviations_B.tolist() if is_ensemble else [])
