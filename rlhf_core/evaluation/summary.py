"""Numbers of the evaluation from its scores: `evaluation.json`, metrics and sample rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rlhf_core.config import PipelineConfig
from rlhf_core.config.register import POLICIES
from rlhf_core.errors import RewardError
from rlhf_core.evaluation.length_control import length_controlled
from rlhf_core.evaluation.measures import LENGTH_CONTROLLED, MEASURES, WIN_RATE_NAMES
from rlhf_core.evaluation.policy_results import main_policy, own_name, with_own_names
from rlhf_core.evaluation.statistics import (
    Answer,
    Comparison,
    Interval,
    bootstrap_mean,
    compare,
    distinct_n,
    group_of,
    win_rate,
)
from rlhf_core.seeds import derive_seed
from rlhf_core.types import PairExample, PromptExample, RewardInput

T = TypeVar("T")

ByModel = dict[str, list[float]]
"""(n,) values of each model (`sft`, and `ppo` and `dpo` as far as there are), in the order of the prompts."""


@dataclass(frozen=True)
class Measured:
    """All values of the models' responses to n prompts, always in the same order."""

    measures: Mapping[str, ByModel]
    """`gold`, `judge_model`, `reward_model`, `rules` (the weighted sum), as far as the run has them."""
    rules: Mapping[str, ByModel]
    """Raw values of each rule source. NaN if a failure is masked."""
    kl: ByModel
    """Nats per response of each policy against the SFT model."""
    sources: list[str]
    """(n,) data source of each prompt."""

    def select(self, indices: Sequence[int]) -> Measured:
        """Return the values of the prompts with these indices."""
        return Measured(
            {name: _select(by_model, indices) for name, by_model in self.measures.items()},
            {name: _select(by_model, indices) for name, by_model in self.rules.items()},
            _select(self.kl, indices),
            [self.sources[i] for i in indices],
        )


def without_masked(
    responses: Mapping[str, list[RewardInput]], measured: Measured
) -> tuple[dict[str, list[RewardInput]], Measured]:
    """Drop prompts for which a measure has no value for some model. Return the other responses and values.

    If a source with nonzero weight masks a failure, the weighted sum is NaN. A source of weight 0 is only
    measured, and its failures exclude no prompt.

    Raises RewardError if no prompt is left, as after an outage of a source.
    """
    masked: set[int] = set()
    failed: set[str] = set()
    for name, by_model in measured.measures.items():
        for values in by_model.values():
            without = {i for i, value in enumerate(values) if math.isnan(value)}
            masked |= without
            if without:
                failed.add(name)
    indices = [i for i in range(len(measured.sources)) if i not in masked]
    if not indices:
        raise RewardError(
            f"none of {len(measured.sources)} held-out prompts has a value of each measure: failures are"
            f" masked (on_error) for {', '.join(sorted(failed))}; the log has a warning with the reason of"
            " each source; run again when it is removed"
        )
    return _select(responses, indices), measured.select(indices)


def _select(by_model: Mapping[str, list[T]], indices: Sequence[int]) -> dict[str, list[T]]:
    return {model: [values[i] for i in indices] for model, values in by_model.items()}


def answers(responses: Mapping[str, list[RewardInput]], measured: Measured) -> dict[str, list[Answer]]:
    """Return the answers of each model, with all their scores that are not masked."""
    columns = dict(measured.measures) | {f"rule/{name}": rule for name, rule in measured.rules.items()}
    found: dict[str, list[Answer]] = {}
    for model, samples in responses.items():
        found[model] = []
        for i, sample in enumerate(samples):
            values = {name: by_model[model][i] for name, by_model in columns.items()}
            scores = {name: value for name, value in values.items() if not math.isnan(value)}
            found[model].append(Answer(sample, scores))
    return found


class Intervals:
    """Intervals with the configured level, over groups of prompts (`evaluation.statistics`).

    The seed of a bootstrap depends on the name of the quantity, and is the same for both models.

    Args:
        config: Configuration of the run.
        sets: Prompts and pairs, for their groups. All values of a prompt that is in none are a group.
    """

    def __init__(self, config: PipelineConfig, *sets: Iterable[PromptExample | PairExample]) -> None:
        self._config = config
        self._groups = {example.prompt_id: group_of(example) for each in sets for example in each}

    @property
    def confidence(self) -> float:
        return self._config.evaluate.confidence

    @property
    def answers_per_prompt(self) -> int:
        return self._config.evaluate.answers_per_prompt

    def groups(self, samples: Iterable[RewardInput]) -> tuple[str, ...]:
        """Return the group of each sample: that of its prompt, or the prompt itself."""
        return tuple(self._groups.get(sample.prompt_id, sample.prompt_id) for sample in samples)

    def mean(self, name: str, values: Sequence[float], groups: Sequence[str] | None = None) -> Interval:
        return bootstrap_mean(
            values,
            resamples=self._config.evaluate.bootstrap,
            confidence=self.confidence,
            seed=derive_seed(self._config.run.seed, "evaluate", "bootstrap", name),
            groups=groups,
        )

    def compare(self, answers_a: Sequence[Answer], answers_b: Sequence[Answer], measure: str) -> Comparison:
        groups = self.groups(answer.sample for answer in answers_a)
        return compare(answers_a, answers_b, measure, confidence=self.confidence, groups=groups)

    def win_rate(self, preferences: Sequence[float], groups: Sequence[str] | None = None) -> Interval:
        return win_rate(preferences, confidence=self.confidence, groups=groups)

    def by_model(
        self, name: str, values: ByModel, groups: Sequence[str] | None = None
    ) -> dict[str, dict[str, float]]:
        """Return the mean of each model, and of the differences by prompt: `difference`, PPO's policy minus
        SFT model, `difference_dpo`, DPO's policy minus SFT model, and with both policies `ppo_minus_dpo`.
        """
        columns = dict(values)
        for policy in POLICIES:
            if policy in values:
                columns[own_name("difference", policy)] = _difference(values[policy], values["sft"])
        if "ppo" in values and "dpo" in values:
            columns["ppo_minus_dpo"] = _difference(values["ppo"], values["dpo"])
        return {model: self.mean(name, column, groups).to_json() for model, column in columns.items()}


def _difference(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


@dataclass(frozen=True)
class JudgeFacts:
    """The entry about the judge in `evaluation.json`."""

    measure: str
    """Name of the measure that decided the comparison."""
    digests: Mapping[str, str]
    """Digest of each measure that can be a judge. Only numbers with equal digests are comparable."""
    trained_on: bool
    """Whether the policy (`main_policy`) was trained with the judge."""
    language_model: Mapping[str, Any] | None
    """Numbers of the language model that judged; None for a comparison of scores."""


@dataclass(frozen=True)
class OptionalResults:
    """Results besides the comparison of the policy with the SFT model on the held-out prompts."""

    dpo: Mapping[str, Any]
    """See `dpo_json`; empty unless there are two policies."""
    gold_exchanged: Mapping[str, Any] | None
    """See `exchanged_gold`."""
    over_chosen: Mapping[str, Any] | None
    """See `compare_with_chosen`."""
    regression: Mapping[str, Any]
    """See `compare_on_sets`; empty without regression sets."""
    unscored: int
    """Prompts (with several answers: answers) that are left out, because a measure has no value for them."""


def evaluation_json(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    comparison: Comparison,
    judge: JudgeFacts,
    interval: Intervals,
    others: OptionalResults,
) -> dict[str, Any]:
    """Return the content of `evaluation.json`. Intervals are `{mean, low, high}`.

    Args:
        responses: (n,) responses of each model.
        measured: Their values.
        comparison: Policy (`main_policy`) against SFT model.
        judge: The judge of the comparison.
        interval: Computes the confidence intervals.
        others: Further results.
    """
    language_model, policy = judge.language_model, main_policy(responses)
    evaluation = {
        **_numbers(responses, measured, comparison.preferences, interval),
        own_name("verdicts", policy): asdict(comparison.verdicts),
        "judge": judge.measure,
        # Share of verdicts that depend on the order of the two answers. A comparison of scores has none.
        "inconsistent": 0.0 if language_model is None else language_model["inconsistent"],
        "distinct": _distinct(responses),
        "by_source": _by_source(responses, measured, comparison.preferences, interval),
        "confidence": interval.confidence,
        **others.dpo,
        "judge_digests": dict(judge.digests),
    }
    if language_model is not None:
        evaluation["language_model"] = language_model
    evaluation[own_name("judge_trained_on", policy)] = judge.trained_on
    evaluation["gold_reward_exchanged"] = others.gold_exchanged
    evaluation["over_chosen"] = others.over_chosen
    if others.regression:
        evaluation["regression"] = others.regression
    evaluation["unscored"] = others.unscored
    if interval.answers_per_prompt > 1:
        evaluation["answers_per_prompt"] = interval.answers_per_prompt
    return evaluation


def _numbers(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    preferences: Sequence[float],
    interval: Intervals,
) -> dict[str, Any]:
    """Return the measures of some prompts. `preferences` are those for the policy (`main_policy`)."""
    policy = main_policy(responses)
    groups = interval.groups(responses["sft"])
    lengths: ByModel = {}
    ended: ByModel = {}
    eos_rate = {}
    for model, samples in responses.items():
        lengths[model] = [float(len(sample.response_ids)) for sample in samples]
        ended[model] = [float(sample.finished) for sample in samples]
        eos_rate[model] = sum(sample.finished for sample in samples) / len(samples)
    kl = interval.mean("kl" if policy == "ppo" else "kl_dpo", measured.kl[policy], groups)
    measures = {
        name: interval.by_model(name, by_model, groups) for name, by_model in measured.measures.items()
    }
    rules = {}
    for name, by_model in measured.rules.items():
        indices = _without_nan(by_model)
        # A source whose values are all masked has no mean.
        if indices:
            of_indices = [groups[i] for i in indices]
            rules[name] = interval.by_model(f"rule/{name}", _select(by_model, indices), of_indices)
    numbers = {
        "win_rate": interval.win_rate(preferences, groups).to_json(),
        "win_rate_length_controlled": length_controlled(
            preferences,
            _difference(lengths[policy], lengths["sft"]),
            interval.confidence,
            groups,
        ).to_json(),
        "gold_reward": measures.get("gold"),
        "reward_model": measures.get("reward_model"),
        **({"judge_model": measures["judge_model"]} if "judge_model" in measures else {}),
        "rules": rules,
        "kl": kl.mean,
        "kl_interval": kl.to_json(),
        "lengths": interval.by_model("length", lengths, groups),
        "eos_rate": eos_rate,
        "eos_rate_difference": interval.by_model("eos_rate", ended, groups)[own_name("difference", policy)],
        "prompts": len({sample.prompt_id for sample in responses["sft"]}),
    }
    return with_own_names(numbers, policy)


def dpo_json(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    dpo_over_sft: Comparison,
    ppo_over_dpo: Comparison,
    interval: Intervals,
    *,
    trained_on: bool,
) -> dict[str, Any]:
    """Return what `evaluation.json` has in addition if there is a policy of DPO next to that of PPO.

    Args:
        responses: (n,) responses of each model.
        measured: Their values.
        dpo_over_sft: DPO's policy against SFT model.
        ppo_over_dpo: PPO's policy against DPO's.
        interval: Computes the confidence intervals.
        trained_on: Whether DPO's policy was trained with the judge.
    """
    found: dict[str, Any] = {"verdicts_dpo": asdict(dpo_over_sft.verdicts)}
    rates = (
        ("win_rate_dpo", dpo_over_sft, "dpo", "sft"),
        ("win_rate_ppo_over_dpo", ppo_over_dpo, "ppo", "dpo"),
    )
    for name, comparison, ours, theirs in rates:
        pairs = zip(responses[ours], responses[theirs], strict=True)
        longer_by = [float(len(a.response_ids) - len(b.response_ids)) for a, b in pairs]
        controlled = length_controlled(
            comparison.preferences, longer_by, interval.confidence, comparison.groups
        )
        found[name] = comparison.win_rate.to_json()
        found[f"{name}{LENGTH_CONTROLLED}"] = controlled.to_json()
    return {
        **found,
        "kl_dpo": interval.mean("kl_dpo", measured.kl["dpo"], dpo_over_sft.groups).to_json(),
        "judge_trained_on_dpo": trained_on,
    }


def _without_nan(by_model: ByModel) -> list[int]:
    """Return the indices of the prompts for which all models have a value."""
    rows = zip(*by_model.values(), strict=True)
    return [i for i, values in enumerate(rows) if not math.isnan(sum(values))]


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
    for model, shares in evaluation["distinct"].items():
        flat |= {f"distinct_{n}/{model}": value for n, value in shares.items()}
    for source, numbers in evaluation["by_source"].items():
        of_source = _flat(numbers) | {"prompts": float(numbers["prompts"])}
        flat |= {f"by_source/{source}/{name}": value for name, value in of_source.items()}
    return flat


def _flat(evaluation: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {"kl": evaluation["kl"]} if "kl" in evaluation else {}
    names = (*MEASURES, "gold_reward_exchanged")
    measures = {name: evaluation[name] for name in names if evaluation.get(name)}
    measures |= {f"rules/{name}": rule for name, rule in evaluation["rules"].items()}
    for name, by_model in measures.items():
        for model, interval in by_model.items():
            flat |= {f"{name}/{model}/{part}": value for part, value in interval.items()}
    for name in WIN_RATE_NAMES:
        flat |= {f"{name}/{part}": value for part, value in evaluation.get(name, {}).items()}
    if "kl_dpo" in evaluation:
        flat["kl_dpo"] = evaluation["kl_dpo"]["mean"]
    for model, rate in evaluation["eos_rate"].items():
        flat[f"eos_rate/{model}"] = rate
        flat[f"length/{model}"] = evaluation["lengths"][model]["mean"]
    return flat


def sample_rows(
    answers: Mapping[str, Sequence[Answer]], comparison: Comparison, count: int, dpo: Comparison | None = None
) -> list[dict[str, Any]]:
    """Return the models' answers to the first `count` prompts. They are not selected, so that they are
    representative. `winner` is PPO's policy or the SFT model, and `winner_dpo` DPO's policy or the SFT model.

    Args:
        answers: (n,) answers of each model.
        comparison: Policy (`main_policy`) against SFT model.
        count: Number of rows.
        dpo: DPO's policy against SFT model, if `comparison` is about PPO's policy and there are both.
    """
    policy = main_policy(answers)
    winners = {1.0: policy, 0.5: "tie", 0.0: "sft"}
    rows = []
    for i, preference in enumerate(comparison.preferences[:count]):
        sample = answers["sft"][i].sample
        rows.append(
            {
                "prompt_id": sample.prompt_id,
                "prompt": sample.prompt,
                **{model: found[i].sample.response for model, found in answers.items()},
                "scores": {model: dict(found[i].scores) for model, found in answers.items()},
                own_name("winner", policy): winners[preference],
            }
        )
        if comparison.groups is not None and comparison.groups[i] != sample.prompt_id:
            rows[-1]["group"] = comparison.groups[i]
        if dpo is not None:
            rows[-1]["winner_dpo"] = (winners | {1.0: "dpo"})[dpo.preferences[i]]
    return rows
