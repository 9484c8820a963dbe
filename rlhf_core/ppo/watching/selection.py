"""Which version of the policy is the best, by its evaluations during training, and when training ends early.

    candidates   versions 1, 2, ... with a KL of at most `ppo.publish_max_kl`, before the evaluation that
                 raises the guard `overoptimization` (`ppo.publish_min_agreement`,
                 `rlhf_core.ppo.watching.guards`)
    objective    mean score of the judge if there is one, otherwise of the training reward with its penalties,
                 minus `ppo.kl.coef` x KL
    best         a candidate replaces the best one so far if its objective is higher by more than the standard
                 error of the difference, over the same prompts. Related prompts count once (groups)

The standard error counts because the highest of many noisy means is too late: under over-optimisation the
objective hardly changes for many steps, and of equal policies the earlier one has the lower KL.
After a policy has moved to responses on which reward model and judge do not agree, a higher score of the
judge is no evidence of a better policy. They may agree again later, on responses that both score too high.
Version 0, the SFT model, is evaluated for comparison and is no candidate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.algo.groups import effective_count
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.watching.guards import KL, divergence
from rlhf_core.system.files import write_jsonl
from rlhf_core.types import finite, finite_or_none

OBJECTIVE = "eval/objective"
INDEPENDENT = ("gold", "judge")
"""Measures that the policy was not trained with, as far as they are known."""
Column = Sequence[float]
"""(prompts,) one value for each held-out prompt; NaN if it is not known."""


@dataclass(frozen=True)
class HeldOutResult:
    """The evaluation of one version."""

    metrics: Mapping[str, float]
    """`eval/...`, means over the prompts."""
    objectives: Column
    """The objective of each prompt, whose mean is `eval/objective`."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """The measures of each prompt by name, whose means are `eval/<name>`."""
    groups: Sequence[str] | None = None
    """(prompts,) group of each prompt; None: each is its own."""


def paired_change(before: Column, after: Column, groups: Sequence[str] | None = None) -> tuple[float, float]:
    """Return the mean difference `after - before` over the prompts that have both values, and its standard
    error over their groups (None: each prompt is its own); NaN with fewer than two such prompts.
    """
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    known = np.isfinite(difference)
    difference = difference[known]
    if len(difference) < 2:
        return math.nan, math.nan
    of_known = None if groups is None else np.asarray(groups)[known].tolist()
    count = effective_count(difference.tolist(), of_known)
    return float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(count))


class Selection:
    """The evaluations so far. They are part of the checkpoint."""

    def __init__(self, ppo: PPOConfig) -> None:
        self._ppo = ppo
        self.evaluations: dict[int, dict[str, float]] = {}
        """Metrics of each evaluation by policy version, in order."""
        self.best: int | None = None
        """The best version; None if there is no candidate yet."""
        self._best_objectives: list[float] = []
        """(prompts,) of the best version."""
        self._highest: dict[str, list[float]] = {}
        """(prompts,) of each independent measure, of the version with its highest mean."""
        self._columns: dict[int, dict[str, list[float | None]]] = {}
        """(prompts,) of each measure by version; None if it is not known."""
        self._has_diverged = False
        """Whether some version over-optimised the reward model."""
        self._without_gain = 0

    def state_dict(self) -> dict[str, Any]:
        # With text as keys, as they are after a checkpoint, whose state is JSON.
        return {
            "evaluations": {str(version): metrics for version, metrics in self.evaluations.items()},
            "best": self.best,
            "best_objectives": self._best_objectives,
            "highest": self._highest,
            "columns": {str(version): columns for version, columns in self._columns.items()},
            "has_diverged": self._has_diverged,
            "without_gain": self._without_gain,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = {int(version): dict(found) for version, found in state["evaluations"].items()}
        self.best, self._without_gain = state["best"], int(state["without_gain"])
        self._best_objectives = list(map(float, state["best_objectives"]))
        self._highest = {name: list(map(float, values)) for name, values in state["highest"].items()}
        self._columns = {int(version): columns for version, columns in state["columns"].items()}
        self._has_diverged = bool(state["has_diverged"])

    def is_due(self, version: int) -> bool:
        """Return whether `version` must be evaluated now."""
        every = self._ppo.evaluation_interval
        # An attempt that continues from the checkpoint of a version has its evaluation.
        if every is None or version in self.evaluations:
            return False
        return version % every == 0 or version == self._ppo.steps

    def add(self, version: int, found: HeldOutResult) -> bool:
        """Add the evaluation of a version, and return whether it is the best so far."""
        self.evaluations[version] = finite(found.metrics)
        columns = self._columns[version] = {}
        for name, values in found.columns.items():
            # None, because JSON has no NaN, and `write_columns` writes them for other tools, too.
            columns[name] = list(map(finite_or_none, values))
        self._compare_with_highest(version, found)
        self._has_diverged |= divergence(self.evaluations, self._ppo.publish_min_agreement) is not None
        # After the comparisons above, which need version 0 as their base.
        if version == 0:
            return False
        better = self._is_better(found)
        if better:
            self.best, self._without_gain = version, 0
            self._best_objectives = list(found.objectives)
        else:
            self._without_gain += 1
        return better

    def _compare_with_highest(self, version: int, found: HeldOutResult) -> None:
        """Add the standard error of the change of each independent measure since the version where it was
        highest.
        """
        columns = found.columns
        for name, values in ((f"eval/{name}", columns[name]) for name in INDEPENDENT if name in columns):
            change, error = paired_change(self._highest.get(name, values), values, found.groups)
            if math.isfinite(error):
                self.evaluations[version][f"{name}_change_error"] = error
            if name not in self._highest or change > 0:
                self._highest[name] = list(values)

    def _is_better(self, found: HeldOutResult) -> bool:
        objective, kl = found.metrics[OBJECTIVE], found.metrics.get(KL, math.nan)
        # `not <=` is also true for a KL that is NaN.
        if not math.isfinite(objective) or not kl <= self._ppo.publish_kl_limit:
            return False
        if self.best is None:  # the earliest one is the best also if it over-optimises
            return True
        if self._has_diverged:
            return False
        # Without the error, the highest of many noisy means would decide, which is often a late one.
        gain, error = paired_change(self._best_objectives, found.objectives, found.groups)
        return gain > error

    @property
    def is_finished(self) -> bool:
        """Whether the last `ppo.stop_patience` evaluations brought no gain."""
        patience = self._ppo.stop_patience
        return patience is not None and self._without_gain >= patience

    def write(self, path: Path) -> None:
        """Write one line for each evaluation."""
        rows = []
        for version, found in self.evaluations.items():
            rows.append({"version": version, "best": version == self.best, **found})
        write_jsonl(path, rows)

    def write_columns(self, path: Path) -> None:
        """Write one line for each evaluation: the version, and each measure as a list over the prompts."""
        write_jsonl(path, [{"version": version, **columns} for version, columns in self._columns.items()])


def read_evaluations(path: Path) -> tuple[dict[int, dict[str, float]], int | None]:
    """Return the metrics by version in a file of `Selection.write`, and the best version. A file that is
    missing has none.
    """
    found, best = dict[int, dict[str, float]](), None
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for row in map(json.loads, lines):
        version = int(row.pop("version"))
        found[version] = row
        if row.pop("best"):
            best = version
    return found, best
