"""Numbers of the evaluation from its scores: `evaluation.json`, metrics and sample rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rlhf_core.config import PipelineConfig
from rlhf_core.evaluation.length_control import length_controlled
from rlhf_core.evaluation.statistics import (
    Answer,
    Comparison,
    Interval,
    bootstrap_mean,
    distinct_n,
    win_rate,
)
from rlhf_core.seeds import derive_seed
from rlhf_core.types import RewardInput

T = TypeVar("T")

ByModel = dict[str, list[float]]
"""(n,) values of each model (`sft`, `ppo`), in the order of the prompts."""


@dataclass(frozen=True)
class Measured:
    """All values of both models' responses to n prompts, always in the same order."""

    measures: Mapping[str, ByModel]
    """`gold`, `judge_model`, `reward_model`, `rules` (the weighted sum), as far as the run has them."""
    rules: Mapping[str, ByModel]
    """Raw values of each rule source. NaN if a failure is masked."""
    kl: list[float]
    """(n,) nats per response of the policy."""
    sources: list[str]
    """(n,) data source of each prompt."""

    def select(self, indices: Sequence[int]) -> Measured:
        """Return the values of the prompts with these indices."""
        return Measured(
            {name: _select(pair, indices) for name, pair in self.measures.items()},
            {name: _select(pair, indices) for name, pair in self.rules.items()},
            [self.kl[i] for i in indices],
            [self.sources[i] for i in indices],
        )


def without_masked(
    responses: Mapping[str, list[RewardInput]], measured: Measured
) -> tuple[dict[str, list[RewardInput]], Measured]:
    """Return the prompts for which every measure has a value for both models.

    If a source with nonzero weight masks a failure, the weighted sum is NaN. A source of weight 0 is only
    measured, and its failures exclude no prompt.
    """
    masked: set[int] = set()
    for pair in measured.measures.values():
        for values in pair.values():
            masked.update(i for i, value in enumerate(values) if math.isnan(value))
    indices = [i for i in range(len(measured.kl)) if i not in masked]
    return _select(responses, indices), measured.select(indices)


def _select(by_model: Mapping[str, list[T]], indices: Sequence[int]) -> dict[str, list[T]]:
    return {model: [values[i] for i in indices] for model, values in by_model.items()}


def answers(
    responses: Mapping[str, list[RewardInput]], measured: Measured
) -> tuple[list[Answer], list[Answer]]:
    """Return the answers of the SFT model and of the policy, with all their scores that are not masked."""
    columns = dict(measured.measures) | {f"rule/{name}": pair for name, pair in measured.rules.items()}
    by_model: dict[str, list[Answer]] = {}
    for model in ("sft", "ppo"):
        by_model[model] = []
        for i, sample in enumerate(responses[model]):
            values = {name: pair[model][i] for name, pair in columns.items()}
            scores = {name: value for name, value in values.items() if not math.isnan(value)}
            by_model[model].append(Answer(sample, scores))
    return by_model["sft"], by_model["ppo"]


class Intervals:
    """Bootstrap intervals with the configured level.

    Each quantity has its own seed, the same for both models.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config

    def settings(self, name: str) -> dict[str, Any]:
        """Return the arguments of `bootstrap_mean`, `win_rate` and `compare` for the quantity `name`."""
        config = self._config
        seed = derive_seed(config.run.seed, "evaluate", "bootstrap", name)
        return {
            "resamples": config.evaluate.bootstrap,
            "confidence": config.evaluate.confidence,
            "seed": seed,
        }

    @property
    def confidence(self) -> float:
        return self._config.evaluate.confidence

    def mean(self, name: str, values: Sequence[float]) -> Interval:
        return bootstrap_mean(values, **self.settings(name))

    def pair(self, name: str, pair: ByModel) -> dict[str, dict[str, float]]:
        """Return the mean of each model and of `difference`, policy minus SFT model by prompt."""
        difference = [ppo - sft for sft, ppo in zip(pair["sft"], pair["ppo"], strict=True)]
        columns = pair | {"difference": difference}
        return {model: self.mean(name, values).to_json() for model, values in columns.items()}


def evaluation_json(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    comparison: Comparison,
    judge: str,
    interval: Intervals,
) -> dict[str, Any]:
    """Return the content of `evaluation.json`. Intervals are `{mean, low, high}`.

    Args:
        responses: (n,) responses of each model.
        measured: Their values.
        comparison: Policy against SFT model.
        judge: Name of the measure that decided the comparison.
        interval: Computes the confidence intervals.
    """
    return {
        **_numbers(responses, measured, comparison.preferences, interval),
        "verdicts": asdict(comparison.verdicts),
        "judge": judge,
        # Share of verdicts that depend on the order of the two answers. A comparison of scores has none.
        "inconsistent": 0.0,
        "distinct": _distinct(responses),
        "by_source": _by_source(responses, measured, comparison.preferences, interval),
        "confidence": interval.confidence,
    }


def _numbers(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    preferences: Sequence[float],
    interval: Intervals,
) -> dict[str, Any]:
    """Return the measures of some prompts."""
    lengths: ByModel = {}
    ended: ByModel = {}
    eos_rate = {}
    for model, samples in responses.items():
        lengths[model] = [float(len(sample.response_ids)) for sample in samples]
        ended[model] = [float(sample.finished) for sample in samples]
        eos_rate[model] = sum(sample.finished for sample in samples) / len(samples)
    kl = interval.mean("kl", measured.kl)
    measures = {name: interval.pair(name, pair) for name, pair in measured.measures.items()}
    rules = {}
    for name, pair in measured.rules.items():
        unmasked = _without_nan(pair)
        if unmasked["sft"]:
            rules[name] = interval.pair(f"rule/{name}", unmasked)
    return {
        "win_rate": win_rate(preferences, **interval.settings("win_rate")).to_json(),
        "win_rate_length_controlled": length_controlled(
            preferences,
            [ppo - sft for sft, ppo in zip(lengths["sft"], lengths["ppo"], strict=True)],
            interval.confidence,
        ).to_json(),
        "gold_reward": measures.get("gold"),
        "reward_model": measures.get("reward_model"),
        **({"judge_model": measures["judge_model"]} if "judge_model" in measures else {}),
        "rules": rules,
        "kl": kl.mean,
        "kl_interval": kl.to_json(),
        "lengths": interval.pair("length", lengths),
        "eos_rate": eos_rate,
        "eos_rate_difference": interval.pair("eos_rate", ended)["difference"],
        "prompts": len(responses["sft"]),
    }


def _without_nan(pair: ByModel) -> ByModel:
    """Return the values of the prompts for which both models have one."""
    indices = [
        i
        for i, (sft, ppo) in enumerate(zip(pair["sft"], pair["ppo"], strict=True))
        if not math.isnan(sft + ppo)
    ]
    return _select(pair, indices)


def _by_source(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    preferences: Sequence[float],
    interval: Intervals,
) -> dict[str, dict[str, Any]]:
    """Return `_numbers` for the prompts of each data source. Empty if there is only one source."""
    names = sorted(set(measured.sources))
    if len(names) < 2:
        return {}
    by_source = {}
    for name in names:
        indices = [i for i, source in enumerate(measured.sources) if source == name]
        by_source[name] = _numbers(
            _select(responses, indices),
            measured.select(indices),
            [preferences[i] for i in indices],
            interval,
        )
    return by_source


def _distinct(responses: Mapping[str, list[RewardInput]]) -> dict[str, dict[str, float]]:
    """Return the share of distinct n-grams by model and n."""
    texts = {model: [sample.response for sample in samples] for model, samples in responses.items()}
    distinct: dict[str, dict[str, float]] = {model: {} for model in texts}
    for n in (1, 2, 3):
        for model, share in distinct_n(texts, n).items():
            distinct[model][str(n)] = share
    return distinct


def flat_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the evaluation as metrics. Metrics of a data source are named `by_source/{name}/...`."""
    flat = _flat(evaluation) | {name: evaluation[name] for name in ("inconsistent", "unscored")}
    for model in ("sft", "ppo"):
        flat |= {f"distinct_{n}/{model}": value for n, value in evaluation["distinct"][model].items()}
    for source, numbers in evaluation["by_source"].items():
        of_source = _flat(numbers) | {"prompts": float(numbers["prompts"])}
        flat |= {f"by_source/{source}/{name}": value for name, value in of_source.items()}
    return flat


def _flat(evaluation: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {"kl": evaluation["kl"]}
    names = ("gold_reward", "gold_reward_exchanged", "judge_model", "reward_model")
    pairs = {name: evaluation[name] for name in names if evaluation.get(name)}
    pairs |= {f"rules/{name}": pair for name, pair in evaluation["rules"].items()}
    for name, pair in pairs.items():
        for model, interval in pair.items():
            flat |= {f"{name}/{model}/{part}": value for part, value in interval.items()}
    for name in ("win_rate", "win_rate_length_controlled"):
        flat |= {f"{name}/{part}": value for part, value in evaluation[name].items()}
    for model in ("sft", "ppo"):
        flat[f"eos_rate/{model}"] = evaluation["eos_rate"][model]
        flat[f"length/{model}"] = evaluation["lengths"][model]["mean"]
    return flat


def sample_rows(
    sft: Sequence[Answer], ppo: Sequence[Answer], comparison: Comparison, count: int
) -> list[dict[str, Any]]:
    """Return the first `count` pairs of answers. They are not selected, so that they are representative."""
    winners = {1.0: "ppo", 0.5: "tie", 0.0: "sft"}
    rows = []
    for before, after, preference in list(zip(sft, ppo, comparison.preferences, strict=True))[:count]:
        rows.append(
            {
                "prompt_id": before.sample.prompt_id,
                "prompt": before.sample.prompt,
                "sft": before.sample.response,
                "ppo": after.sample.response,
                "scores": {"sft": dict(before.scores), "ppo": dict(after.scores)},
                "winner": winners[preference],
            }
        )
    return rows
