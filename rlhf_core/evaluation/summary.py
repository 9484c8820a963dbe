"""From scores to the numbers, rows and metrics that evaluation hands on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.evaluation.judge import Answer, Comparison
from rlhf_core.evaluation.statistics import Interval, bootstrap_mean, distinct_n, win_rate
from rlhf_core.seeds import derive_seed
from rlhf_core.types import RewardInput

ByModel = dict[str, list[float]]
"""model (`sft`, `ppo`) -> (n,) values, prompt by prompt."""


@dataclass(frozen=True)
class Measured:
    """All values of both models' responses; n prompts, in the same order everywhere."""

    measures: Mapping[str, ByModel]
    """`gold`, `reward_model`, `rules` (the weighted sum), where they exist."""
    rules: Mapping[str, ByModel]
    """Raw values of each rule source. NaN if a failure is masked."""
    kl: list[float]
    """(n,) nats per response of the policy."""
    sources: list[str]
    """(n,) data source of each prompt."""

    def at(self, places: Sequence[int]) -> Measured:
        """Return the values of some prompts."""

        def kept(pairs: Mapping[str, ByModel]) -> dict[str, ByModel]:
            return {
                name: {model: [values[i] for i in places] for model, values in pair.items()}
                for name, pair in pairs.items()
            }

        return Measured(
            kept(self.measures),
            kept(self.rules),
            [self.kl[i] for i in places],
            [self.sources[i] for i in places],
        )


def scored(
    responses: Mapping[str, list[RewardInput]], measured: Measured
) -> tuple[dict[str, list[RewardInput]], Measured]:
    """Return the prompts for which every measure has a value for both models.

    If a source with nonzero weight masks a failure, the weighted sum is NaN. A source of weight 0 is only
    measured, and its failures exclude no prompt.
    """
    columns = [values for pair in measured.measures.values() for values in pair.values()]
    whole = [i for i in range(len(measured.kl)) if not any(math.isnan(values[i]) for values in columns)]
    return _chosen(responses, whole), measured.at(whole)


def _chosen(
    responses: Mapping[str, list[RewardInput]], places: Sequence[int]
) -> dict[str, list[RewardInput]]:
    return {model: [samples[i] for i in places] for model, samples in responses.items()}


def answers(
    responses: Mapping[str, list[RewardInput]], measured: Measured
) -> tuple[list[Answer], list[Answer]]:
    columns = dict(measured.measures) | {f"rule/{name}": pair for name, pair in measured.rules.items()}

    def of(model: str) -> list[Answer]:
        return [
            Answer(
                sample,
                {name: pair[model][i] for name, pair in columns.items() if not math.isnan(pair[model][i])},
            )
            for i, sample in enumerate(responses[model])
        ]

    return of("sft"), of("ppo")


class Intervals:
    """Bootstrap intervals with the configured level; one seed per quantity, the same for both models."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config

    def settings(self, name: str) -> dict[str, Any]:
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
    """The content of `evaluation.json`. Intervals are `{mean, low, high}`."""
    return {
        **_numbers(responses, measured, comparison.preferences, interval),
        "verdicts": asdict(comparison.verdicts),
        "judge": judge,
        "inconsistent": comparison.inconsistent,
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
    lengths = {model: [float(len(s.response_ids)) for s in samples] for model, samples in responses.items()}
    kl = interval.mean("kl", measured.kl)
    measures = {name: interval.pair(name, pair) for name, pair in measured.measures.items()}
    return {
        "win_rate": win_rate(preferences, **interval.settings("win_rate")).to_json(),
        "gold_reward": measures.get("gold"),
        "reward_model": measures.get("reward_model"),
        "rules": {name: interval.pair(f"rule/{name}", pair) for name, pair in _known(measured.rules).items()},
        "kl": kl.mean,
        "kl_interval": kl.to_json(),
        "lengths": interval.pair("length", lengths),
        "eos_rate": {
            model: sum(s.finished for s in samples) / len(samples) for model, samples in responses.items()
        },
        "prompts": len(responses["sft"]),
    }


def _known(rules: Mapping[str, ByModel]) -> dict[str, ByModel]:
    """Return the prompts for which each source has a value for both models. Sources without any have no
    entry.
    """
    found: dict[str, ByModel] = {}
    for name, pair in rules.items():
        both = [(a, b) for a, b in zip(pair["sft"], pair["ppo"], strict=True) if not math.isnan(a + b)]
        if both:
            found[name] = {"sft": [a for a, _ in both], "ppo": [b for _, b in both]}
    return found


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
    places = {name: [i for i, source in enumerate(measured.sources) if source == name] for name in names}
    return {
        name: _numbers(_chosen(responses, some), measured.at(some), [preferences[i] for i in some], interval)
        for name, some in places.items()
    }


def _distinct(responses: Mapping[str, list[RewardInput]]) -> dict[str, dict[str, float]]:
    texts = {model: [sample.response for sample in samples] for model, samples in responses.items()}
    found = {str(n): distinct_n(texts, n) for n in (1, 2, 3)}
    return {model: {n: shares[model] for n, shares in found.items()} for model in texts}


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
    names = ("gold_reward", "gold_reward_exchanged", "reward_model")
    pairs = {name: evaluation[name] for name in names if evaluation.get(name)}
    pairs |= {f"rules/{name}": pair for name, pair in evaluation["rules"].items()}
    for name, pair in pairs.items():
        flat |= {
            f"{name}/{model}/{part}": value for model, mean in pair.items() for part, value in mean.items()
        }
    flat |= {f"win_rate/{part}": value for part, value in evaluation["win_rate"].items()}
    for model in ("sft", "ppo"):
        flat[f"eos_rate/{model}"] = evaluation["eos_rate"][model]
        flat[f"length/{model}"] = evaluation["lengths"][model]["mean"]
    return flat


def sample_rows(
    sft: Sequence[Answer], ppo: Sequence[Answer], comparison: Comparison, count: int
) -> list[dict[str, Any]]:
    """The first `count` pairs: not selected, so that they show the usual case."""
    rows = []
    for before, after, preference in list(zip(sft, ppo, comparison.preferences, strict=True))[:count]:
        rows.append(
            {
                "prompt_id": before.sample.prompt_id,
                "prompt": before.sample.prompt,
                "sft": before.sample.response,
                "ppo": after.sample.response,
                "scores": {"sft": dict(before.scores), "ppo": dict(after.scores)},
                "winner": "ppo" if preference > 0.5 else "sft" if preference < 0.5 else "tie",
            }
        )
    return rows
