"""From scores to the numbers, rows and metrics that evaluation hands on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.evaluation.judge import Answer, Comparison
from rlhf_core.evaluation.statistics import Interval, bootstrap_mean, distinct_n
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
    """Raw value of each rule source."""
    kl: list[float]
    """(n,) nats per response of the policy."""


def scored(
    responses: Mapping[str, list[RewardInput]], measured: Measured
) -> tuple[dict[str, list[RewardInput]], Measured]:
    """The prompts on which every measure has a value for both models; one that a reward source masks is NaN."""
    columns = [
        values for pairs in (measured.measures, measured.rules) for pair in pairs.values() for values in pair.values()
    ]
    whole = [i for i in range(len(measured.kl)) if not any(math.isnan(values[i]) for values in columns)]

    def kept(pairs: Mapping[str, ByModel]) -> dict[str, ByModel]:
        return {
            name: {model: [values[i] for i in whole] for model, values in pair.items()} for name, pair in pairs.items()
        }

    rest = {model: [samples[i] for i in whole] for model, samples in responses.items()}
    return rest, Measured(kept(measured.measures), kept(measured.rules), [measured.kl[i] for i in whole])


def answers(responses: Mapping[str, list[RewardInput]], measured: Measured) -> tuple[list[Answer], list[Answer]]:
    columns = dict(measured.measures) | {f"rule/{name}": pair for name, pair in measured.rules.items()}

    def of(model: str) -> list[Answer]:
        return [
            Answer(sample, {name: pair[model][i] for name, pair in columns.items()})
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
        return {"resamples": config.evaluate.bootstrap, "confidence": config.evaluate.confidence, "seed": seed}

    @property
    def confidence(self) -> float:
        return self._config.evaluate.confidence

    def mean(self, name: str, values: Sequence[float]) -> Interval:
        return bootstrap_mean(values, **self.settings(name))

    def pair(self, name: str, pair: ByModel) -> dict[str, dict[str, float]]:
        return {model: self.mean(name, values).to_json() for model, values in pair.items()}


def evaluation_json(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    comparison: Comparison,
    judge: str,
    interval: Intervals,
) -> dict[str, Any]:
    """The content of `evaluation.json`. Intervals are `{mean, low, high}`."""
    lengths = {model: [float(len(s.response_ids)) for s in samples] for model, samples in responses.items()}
    kl = interval.mean("kl", measured.kl)
    measures = {name: interval.pair(name, pair) for name, pair in measured.measures.items()}
    return {
        "win_rate": comparison.win_rate.to_json(),
        "judge": judge,
        "inconsistent": comparison.inconsistent,
        "gold_reward": measures.get("gold"),
        "reward_model": measures.get("reward_model"),
        "rules": {name: interval.pair(f"rule/{name}", pair) for name, pair in measured.rules.items()},
        "kl": kl.mean,
        "kl_interval": kl.to_json(),
        "lengths": interval.pair("length", lengths),
        "eos_rate": {model: sum(s.finished for s in samples) / len(samples) for model, samples in responses.items()},
        "distinct": {
            model: {str(n): distinct_n([s.response for s in samples], n) for n in (1, 2, 3)}
            for model, samples in responses.items()
        },
        "prompts": len(responses["sft"]),
        "confidence": interval.confidence,
    }


def flat_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {name: evaluation[name] for name in ("kl", "inconsistent", "unscored")}
    pairs = {name: evaluation[name] for name in ("gold_reward", "reward_model") if evaluation[name]}
    pairs |= {f"rules/{name}": pair for name, pair in evaluation["rules"].items()}
    for name, pair in pairs.items():
        flat |= {f"{name}/{model}/{part}": value for model, mean in pair.items() for part, value in mean.items()}
    flat |= {f"win_rate/{part}": value for part, value in evaluation["win_rate"].items()}
    for model in ("sft", "ppo"):
        flat[f"eos_rate/{model}"] = evaluation["eos_rate"][model]
        flat[f"length/{model}"] = evaluation["lengths"][model]["mean"]
        flat |= {f"distinct_{n}/{model}": value for n, value in evaluation["distinct"][model].items()}
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
