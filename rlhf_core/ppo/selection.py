"""Which version of the policy is the best, by its evaluations during training, and when training ends early.

    candidates   versions 1, 2, ... with a KL of at most `ppo.publish_max_kl`
    objective    mean score of the judge if there is one, otherwise of the training reward with its penalties,
                 minus `ppo.kl.coef` x KL
    best         the candidate with the highest objective; of equal ones the earliest

Version 0, the SFT model, is evaluated for comparison and is no candidate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.ppo import PPOConfig

OBJECTIVE, KL = "eval/objective", "eval/kl"


class Selection:
    """The evaluations so far. They are part of the checkpoint."""

    def __init__(self, ppo: PPOConfig) -> None:
        self._ppo = ppo
        self.evaluations: dict[int, dict[str, float]] = {}
        """Metrics of each evaluation by policy version, in order."""
        self.best: int | None = None
        """The best version; None if there is no candidate yet."""
        self._without_gain = 0

    def state_dict(self) -> dict[str, Any]:
        evaluations = {str(version): metrics for version, metrics in self.evaluations.items()}
        return {"evaluations": evaluations, "best": self.best, "without_gain": self._without_gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = {int(version): dict(found) for version, found in state["evaluations"].items()}
        self.best, self._without_gain = state["best"], int(state["without_gain"])

    def is_due(self, version: int) -> bool:
        """Return whether `version` must be evaluated now."""
        every = self._ppo.evaluation_interval
        if every is None or version in self.evaluations:
            return False
        return version % every == 0 or version == self._ppo.steps

    def add(self, version: int, metrics: Mapping[str, float]) -> bool:
        """Add the evaluation of a version, and return whether it is the best so far."""
        self.evaluations[version] = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if version == 0:
            return False
        better = self._is_better(metrics)
        if better:
            self.best, self._without_gain = version, 0
        else:
            self._without_gain += 1
        return better

    def _is_better(self, metrics: Mapping[str, float]) -> bool:
        objective, kl = metrics[OBJECTIVE], metrics.get(KL, math.nan)
        limit = self._ppo.publish_kl_limit
        if not math.isfinite(objective) or not kl <= limit:
            return False
        return self.best is None or objective > self.evaluations[self.best][OBJECTIVE]

    @property
    def is_finished(self) -> bool:
        """Whether the last `ppo.stop_patience` evaluations brought no gain."""
        patience = self._ppo.stop_patience
        return patience is not None and self._without_gain >= patience

    def scores(self) -> dict[int, float]:
        """Return the objective of each evaluated version, for the choice of checkpoints."""
        return {
            version: found[OBJECTIVE] for version, found in self.evaluations.items() if OBJECTIVE in found
        }

    def write(self, path: Path) -> None:
        """Write one line for each evaluation."""
        rows = [
            {"version": version, "best": version == self.best, **found}
            for version, found in self.evaluations.items()
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
