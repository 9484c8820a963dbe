"""Combines reward sources into one score per response.

    score = sum over sources of weight * (raw value, or its batch-normalised form)

The raw values of the reward model are clipped first (`ppo.score_clip`). Other sources are not clipped,
because rules define their own limits. A source of weight 0 is only measured. It does not change scores, and
its failures do not remove scores.

Batch normalisation is (x - mean) / (std + 1e-8) over the batch with population std, and exactly 0 if all
values are equal. If a source cannot score a response and its `on_error` masks the failure, the value of the
source and the score are NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np

from rlhf_core.config.rewards import (
    AnyReward,
    ExternalReward,
    LanguageModelReward,
    ModelReward,
    PythonReward,
    RemoteReward,
)
from rlhf_core.rewards.failures import Outcome, check_smoke, resolve_failures
from rlhf_core.rewards.language_model import LanguageModelComparisons, LanguageModelGrades, asked_model
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.rewards.remote import RemoteService
from rlhf_core.rewards.rules import evaluate_rule
from rlhf_core.types import PromptExample, RewardInput, Rollout

EPS = 1e-8
External = PythonFunction | RemoteService | LanguageModelGrades | LanguageModelComparisons
"""A source that is asked: `Sequence[RewardInput] -> Outcome`."""
_SHARES = {"unusable": "requests", "inconsistent": "comparisons", "order_bias": "comparisons"}
"""Numbers of `RewardBatch.usage` whose metrics are shares of other numbers."""


def reward_input(
    prompt: PromptExample,
    response_ids: Sequence[int],
    finished: bool,
    text: str,
) -> RewardInput:
    """Return the input of the reward sources for one response.

    `text` is without special tokens and without the template's blank (`Decoder.response`).
    """
    return RewardInput(
        prompt_id=prompt.prompt_id,
        prompt=prompt.prompt,
        response=text,
        prompt_ids=prompt.input_ids,
        response_ids=response_ids,
        finished=finished,
        meta=prompt.meta,
    )


def reward_inputs(
    decode: Callable[[Sequence[int]], str], prompts: Sequence[PromptExample], rollouts: Sequence[Rollout]
) -> list[RewardInput]:
    """Return the input of the reward sources for each response, (n,); see `reward_input`."""
    samples = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = rollout.response_ids
        samples.append(reward_input(prompt, ids, rollout.finished, decode(ids)))
    return samples


@dataclass(frozen=True)
class RewardBatch:
    """Scores of one batch of `n` responses, in the order given."""

    total: list[float]
    """(n,) weighted sum, before penalties and KL. NaN if a source with nonzero weight has no value."""
    by_source: dict[str, list[float]]
    """(n,) raw values of each source by its name, before normalisation and weight; NaN where it masks a
    failure.
    """
    usage: dict[str, dict[str, float]] = field(default_factory=dict)
    """`requests`, `unusable` replies, `prompt_tokens` and `completion_tokens` of each language model, by the
    name of the source. Replies that were kept before count as well. With `compare` also `comparisons` (pairs
    of responses in both orders), those that are `inconsistent` (the preferred response changes with the
    order), and `order_bias`: half the preferences for the first response minus those for the second one.
    """
    ensemble_std: list[float] = field(default_factory=list)
    """(n,) standard deviation of the scores of an ensemble of reward models over its members; empty without
    one.
    """

    def metrics(self) -> dict[str, float]:
        """Return `{name}/{mean,std,min,max,failed}` of each source's raw values; population std, failures
        left out. With an ensemble of reward models, `ensemble_std` is the mean over the responses.
        `usage_metrics` are included.
        """
        metrics: dict[str, float] = {}
        for name, values in self.by_source.items():
            present = [value for value in values if not math.isnan(value)]
            metrics[f"{name}/failed"] = float(len(values) - len(present))
            if present:
                metrics[f"{name}/mean"] = statistics.fmean(present)
                metrics[f"{name}/std"] = statistics.pstdev(present)
                metrics[f"{name}/min"], metrics[f"{name}/max"] = min(present), max(present)
        known = [value for value in self.ensemble_std if not math.isnan(value)]
        if known:
            metrics["ensemble_std"] = statistics.fmean(known)
        return metrics | self.usage_metrics()

    def usage_metrics(self) -> dict[str, float]:
        """Return `{name}/{requests,prompt_tokens,completion_tokens,comparisons}` of each language model, the
        share `{name}/unusable` of its replies, the share `{name}/inconsistent` of its comparisons, and
        `{name}/order_bias` from -1 (it always prefers the second response) to 1 (the first one).
        """
        return prefixed_usage(self.usage)

    def take(self, rows: Sequence[int]) -> RewardBatch:
        """Return the scores of these responses, without the usage."""
        # The usage is that of the requests for all responses: no part of it belongs to some of them.
        return RewardBatch(
            [self.total[row] for row in rows],
            {name: [values[row] for row in rows] for name, values in self.by_source.items()},
            ensemble_std=[self.ensemble_std[row] for row in rows] if self.ensemble_std else [],
        )

    def add_usage(self, other: RewardBatch) -> None:
        """Add the usage of another batch."""
        for name, usage in other.usage.items():
            own = self.usage.setdefault(name, dict.fromkeys(usage, 0.0))
            for what, count in usage.items():
                own[what] += count


def prefixed_usage(usage: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of `RewardBatch.usage_metrics`."""
    metrics: dict[str, float] = {}
    for name, counts in usage.items():
        for what, count in counts.items():
            if what in _SHARES:
                count /= max(1.0, counts[_SHARES[what]])
            metrics[f"{name}/{what}"] = count
    return metrics


class RewardComposer:
    """Scores batches with the sources of `ppo.rewards`. Holds processes and connections: `close` it.

    Raises `ConfigError` at construction for a function or host that cannot be used, or that gives a response
    with a known value (`smoke`) another one.
    """

    def __init__(
        self,
        sources: tuple[AnyReward, ...],
        digests: Mapping[str, str] | None = None,
        *,
        score_clip: float | None = None,
        replies: Path | None = None,
    ) -> None:
        """Create the sources.

        `digests` has the sha256 of the Python files and rubrics of sources by their name (see
        `PythonFunction`). The reward model's scores are clipped to +- `score_clip`. `replies` is the folder
        of the replies of language models; None: they are not kept.
        """
        self._sources = sources
        self._score_clip = score_clip
        self._external: dict[str, External] = {}
        # If one source cannot be used, those before it may have started processes.
        with ExitStack() as started:
            for source in sources:
                name = source.used_name
                digest = (digests or {}).get(name)
                if isinstance(source, PythonReward):
                    self._external[name] = PythonFunction(source, digest)
                elif isinstance(source, RemoteReward):
                    self._external[name] = RemoteService(source)
                elif isinstance(source, LanguageModelReward):
                    self._external[name] = asked_model(source, digest, replies)
                else:
                    continue
                started.callback(self._external[name].close)
                check_smoke(name, source.smoke, self._external[name])
            started.pop_all()

    def score(
        self,
        batch: Sequence[RewardInput],
        model_scores: Sequence[float] | None,
        opponents: Sequence[RewardInput] = (),
    ) -> RewardBatch:
        """Return the scores of a batch.

        `model_scores` are the (n,) scores of the reward model, normalised by its stored statistics; None
        without one. A value of it or of a rule that is not finite, such as an overflow in half precision, is
        masked (NaN), with a warning. `opponents` are other responses to the same prompts, which a language
        model with `compare: pairs` or `ranking` sees together with the batch. Raises `RewardError` for
        failures that `on_error` does not mask.
        """
        usage: dict[str, dict[str, float]] = {}
        by_source = {}
        for source in self._sources:
            by_source[source.used_name] = self._raw(source, batch, model_scores, opponents, usage)
        return RewardBatch(self.total(by_source, len(batch)), by_source, usage)

    def total(self, by_source: Mapping[str, Sequence[float]], count: int) -> list[float]:
        """Return the (n,) weighted sum of raw values; sources with `normalize` over these `count`
        responses.
        """
        return weighted_sum(self._sources, by_source, count, self._score_clip)

    def close(self) -> None:
        """End processes and connections; a second call does nothing."""
        for external in self._external.values():
            external.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _raw(
        self,
        source: AnyReward,
        batch: Sequence[RewardInput],
        model_scores: Sequence[float] | None,
        opponents: Sequence[RewardInput],
        usage: dict[str, dict[str, float]],
    ) -> list[float]:
        """Return the (n,) raw values of a source, and write what they cost to `usage`."""
        name = source.used_name
        on_error: Literal["abort", "mask"] = "mask"
        if isinstance(source, ExternalReward):
            # Grades of a response alone are comparable with those of the opponents when they were alone.
            if isinstance(source, LanguageModelReward) and source.compare in ("pairs", "ranking"):
                outcome = self._external[name]([*batch, *opponents]).first(len(batch))
            else:
                outcome = self._external[name](batch)
            if outcome.usage:
                usage[name] = outcome.usage
            if source.weight:  # a source of weight 0 is only measured
                on_error = source.on_error
        elif isinstance(source, ModelReward):
            assert model_scores is not None and len(model_scores) == len(batch)
            outcome = Outcome.of(list(map(float, model_scores)))
        else:
            outcome = Outcome.of([evaluate_rule(source, sample) for sample in batch])
        return resolve_failures(name, on_error, outcome, batch)


def code_digests(sources: tuple[AnyReward, ...], digests: Mapping[str, str]) -> dict[str, str]:
    """Convert sha256 digests of Python files and rubrics from names by field (`StageContext.sources`) to
    names of sources.
    """
    fields = {f"ppo.rewards.{index}": source.used_name for index, source in enumerate(sources)}
    return {fields[field]: digest for field, digest in digests.items() if field in fields}


def weighted_sum(
    sources: Sequence[AnyReward],
    by_source: Mapping[str, Sequence[float]],
    count: int,
    score_clip: float | None,
    *,
    normalized: bool = True,
) -> list[float]:
    """Return the (n,) weighted sum of the values of `count` responses.

    Args:
        sources: Reward sources with their weights.
        by_source: (n,) values of each source, by its name.
        count: n.
        score_clip: See `RewardComposer`.
        normalized: False disables batch normalisation, which gives every batch the mean 0.
    """
    total = [0.0] * count
    for source in sources:
        if source.weight == 0.0:
            continue  # 0 * NaN is NaN
        values = list(by_source[source.used_name])
        if isinstance(source, ModelReward) and score_clip is not None:
            # NaN stays NaN, for which `min` and `max` would return a limit.
            values = np.clip(values, -score_clip, score_clip).tolist()
        if normalized and source.normalize == "batch":
            values = normalize(values)
        total = [sum_ + source.weight * value for sum_, value in zip(total, values, strict=True)]
    return total


def clipped_share(
    sources: Sequence[AnyReward], by_source: Mapping[str, Sequence[float]], score_clip: float | None
) -> float | None:
    """Return the share of the reward model's scores that `score_clip` changes, 0 to 1. None if there is
    nothing to clip.
    """
    if score_clip is None:
        return None
    scores: list[float] = []
    for source in sources:
        if isinstance(source, ModelReward) and source.weight != 0.0:
            values = by_source[source.used_name]
            scores += [value for value in values if not math.isnan(value)]
    if not scores:
        return None
    return sum(abs(value) > score_clip for value in scores) / len(scores)


def normalize(values: Sequence[float]) -> list[float]:
    """Return the (n,) values with mean 0 and population std 1; zeros if all are equal.

    NaN stays and is ignored.
    """
    present = [value for value in values if not math.isnan(value)]
    # Equality is tested on the values: a mean of equal floats can differ from them in the last bit.
    if not present or min(present) == max(present):
        return [value if math.isnan(value) else 0.0 for value in values]
    # `fsum` and `pstdev` round once, so that the bits do not depend on the order of the responses.
    mean = math.fsum(present) / len(present)
    std = statistics.pstdev(present)
    return [(value - mean) / (std + EPS) for value in values]
