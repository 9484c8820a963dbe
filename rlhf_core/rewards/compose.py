"""Reward sources composed into one score per response.

    score = sum over sources of weight * (raw value, or its batch-normalised form)

Batch normalisation: (x - mean) / (std + 1e-8) over the batch, population std; exactly 0 where all values are equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rlhf_core.config.rewards import AnyReward, FormatReward, ModelReward, PythonReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.rewards.rules import check_pattern, evaluate_rule
from rlhf_core.types import RewardInput

EPS = 1e-8


@dataclass(frozen=True)
class RewardBatch:
    """Scores of one batch of `n` responses, in the order given."""

    total: list[float]
    """(n,) weighted sum, before clipping, penalties and KL."""
    by_source: dict[str, list[float]]
    """(n,) raw values of each source by its name, before normalisation and weight."""


class RewardComposer:
    """Scores batches with the sources of `ppo.rewards`. Holds processes for Python functions: `close` it.

    Raises `ConfigError` at construction for a function or pattern that cannot be used.
    """

    def __init__(self, sources: tuple[AnyReward, ...]) -> None:
        self._sources = sources
        self._functions: dict[str, PythonFunction] = {}
        try:
            for source in sources:
                if isinstance(source, FormatReward):
                    check_pattern(source)
                if isinstance(source, PythonReward):
                    self._functions[source_name(source)] = PythonFunction(source)
        except BaseException:
            self.close()
            raise

    def score(self, batch: Sequence[RewardInput], model_scores: Sequence[float] | None) -> RewardBatch:
        """`model_scores`: (n,) reward-model scores, already normalised by its stored statistics; None without one.

        Raises `RewardError` for missing model scores, a failed function, or a value that is not finite.
        """
        total = [0.0] * len(batch)
        by_source: dict[str, list[float]] = {}
        for source in self._sources:
            raw = self._raw(source, batch, model_scores)
            _check(source_name(source), raw, batch)
            by_source[source_name(source)] = raw
            values = normalize(raw) if source.normalize == "batch" else raw
            total = [sum_ + source.weight * value for sum_, value in zip(total, values, strict=True)]
        return RewardBatch(total, by_source)

    def close(self) -> None:
        """Ends the processes of Python functions; a second call does nothing."""
        for function in self._functions.values():
            function.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _raw(
        self, source: AnyReward, batch: Sequence[RewardInput], model_scores: Sequence[float] | None
    ) -> list[float]:
        if isinstance(source, ModelReward):
            if model_scores is None:
                raise RewardError(
                    f"reward {source_name(source)}: no reward-model scores were given for {len(batch)} responses"
                )
            return [float(value) for value in model_scores]
        if isinstance(source, PythonReward):
            return self._functions[source_name(source)](batch)
        return [evaluate_rule(source, sample) for sample in batch]


def source_name(source: AnyReward) -> str:
    """The name of a source in metrics and tables."""
    return source.name or source.type


def normalize(values: Sequence[float]) -> list[float]:
    """(n,) values with mean 0 and population std 1; zeros if all are equal."""
    # Equality is tested on the values: a mean of equal floats can differ from them in the last bit.
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = statistics.pstdev(values)
    return [(value - mean) / (std + EPS) for value in values]


def _check(name: str, values: Sequence[float], batch: Sequence[RewardInput]) -> None:
    if len(values) != len(batch):
        raise RewardError(f"reward {name}: {len(values)} values came back for {len(batch)} responses")
    for value, sample in zip(values, batch, strict=True):
        if not math.isfinite(value):
            raise RewardError(
                f"reward {name}: the value for prompt {sample.prompt_id} is {value}, but it must be finite"
            )
