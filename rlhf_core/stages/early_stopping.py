"""The evaluation with the lowest held-out loss, for the stages that keep its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.config.training import EarlyStopConfig


@dataclass
class EarlyStopping:
    """The evaluation with the lowest held-out loss; the earliest of equal ones."""

    step: int = 0
    """Optimizer steps before it; 0 for none yet."""
    loss: float | None = None
    evaluations_since: int = 0
    """All of them without a lower loss."""

    def add(self, step: int, loss: float) -> bool:
        """Return True if this is the best so far; a loss that is not finite never is."""
        better = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if better:
            self.step, self.loss, self.evaluations_since = step, loss, 0
        else:
            self.evaluations_since += 1
        return better

    def is_final(self, config: EarlyStopConfig | None) -> bool:
        """Return whether early stopping ends the training: no better evaluation for `patience` times."""
        if config is None or config.patience is None:
            return False
        return self.evaluations_since >= config.patience
