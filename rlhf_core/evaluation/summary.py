"""Numbers of the evaluation from its scores: `evaluation.json`, metrics and sample rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, TypeVar

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import RewardError
from rlhf_core.evaluation.measures import (
    LENGTH_CONTROLLED,
    MEASURES,
    OVER_SFT,
    PPO_OVER_DPO,
    flat_name,
    main_policy,
)
from rlhf_core.evaluation.statistics import (
    Answer,
    Comparison,
    Interval,
    LengthControlled,
    bootstrap_mean,
    compare,
    distinct_n,
    group_of,
    length_controlled,
    win_rate,
)
from rlhf_core.seeds import derive_seed
from rlhf_core.types import AnsweredPrompt, PairExample, PromptExample, RewardInput

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
            {name: select(by_model, indices) for name, by_model in self.measures.items()},
            {name: select(by_model, indices) for name, by_model in self.rules.items()},
            select(self.kl, indices),
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
    # Of all models, because the comparisons are paired by prompt.
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
    return select(responses, indices), measured.select(indices)


def select(columns: Mapping[str, Sequence[T]], indices: Sequence[int]) -> dict[str, list[T]]:
    """Return the values with these indices of each column."""
    selected = {}
    for name, values in columns.items():
        selected[name] = [values[i] for i in indices]
    return selected


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
        self._groups = {example.prompt_id: group_of(example) for example in chain.from_iterable(sets)}

    @property
    def confidence(self) -> float:
        return self._config.evaluate.confidence

    @property
    def answers_per_prompt(self) -> int:
        return self._config.evaluate.answers_per_prompt

    def groups(self, samples: Iterable[RewardInput]) -> tuple[str, ...]:
        """Return the group of each sample: that of its prompt, or the prompt itself."""
        return self.groups_of(sample.prompt_id for sample in samples)

    def groups_of(self, prompt_ids: Iterable[str]) -> tuple[str, ...]:
        """Return the group of each prompt, or the prompt itself."""
        return tuple(self._groups.get(prompt_id, prompt_id) for prompt_id in prompt_ids)

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

    def length_controlled(
        self,
        preferences: Sequence[float],
        ours: Sequence[RewardInput],
        theirs: Sequence[RewardInput],
        groups: Sequence[str] | None,
    ) -> LengthControlled:
        longer_by = _difference(_lengths(ours), _lengths(theirs))
        return length_controlled(preferences, longer_by, self.confidence, groups)

    def by_model(
        self, name: str, values: ByModel, groups: Sequence[str] | None = None, opponent: str = "sft"
    ) -> dict[str, Any]:
        """Return the mean of each model, in `difference` that of each policy minus the `opponent` by prompt,
        and with both policies `ppo_minus_dpo`.
        """

        def mean(column: Sequence[float]) -> dict[str, float]:
            return self.mean(name, column, groups).to_json()

        found: dict[str, Any] = {model: mean(column) for model, column in values.items()}
        found["difference"] = {}
        for policy in values:
            if policy != opponent:
                found["difference"][policy] = mean(_difference(values[policy], values[opponent]))
        if "ppo" in values and "dpo" in values:
            found["ppo_minus_dpo"] = mean(_difference(values["ppo"], values["dpo"]))
        return found


def _lengths(samples: Sequence[RewardInput]) -> list[float]:
    """Return the tokens of each response."""
    return [float(len(sample.response_ids)) for sample in samples]


def _difference(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


@dataclass(frozen=True)
class JudgeFacts:
    """The entry about the judge in `evaluation.json`."""

    measure: str
    """Name of the measure that decided the comparisons."""
    digests: Mapping[str, str]
    """Digest of each measure that can be a judge. Only numbers with equal digests are comparable."""
    trained_on: Mapping[str, bool]
    """Whether each policy was trained with the judge."""
    language_model: Mapping[str, Any] | None
    """Numbers of the language model that judged; None for a comparison of scores."""


@dataclass(frozen=True)
class OptionalResults:
    """Results besides the comparisons of the policies with the SFT model on the held-out prompts."""

    ppo_over_dpo: Comparison | None
    """PPO's policy against DPO's; None unless there are both."""
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
    comparisons: Mapping[str, Comparison],
    judge: JudgeFacts,
    interval: Intervals,
    others: OptionalResults,
) -> dict[str, Any]:
    """Return the content of `evaluation.json`. Intervals are `{mean, low, high}`.

    Args:
        responses: (n,) responses of each model.
        measured: Their values.
        comparisons: Each policy against the SFT model.
        judge: The judge of the comparisons.
        interval: Computes the confidence intervals.
        others: Further results.
    """
    preferences = {policy: found.preferences for policy, found in comparisons.items()}
    evaluation = _numbers(responses, measured, preferences, interval)
    for policy, comparison in comparisons.items():
        evaluation["policies"][policy] |= {
            "verdicts": asdict(comparison.verdicts),
            "judge_trained_on": judge.trained_on[policy],
        }
    if (over := others.ppo_over_dpo) is not None:
        evaluation |= _win_rates(
            PPO_OVER_DPO, over.preferences, responses["ppo"], responses["dpo"], over.groups, interval
        )
    evaluation |= {
        "judge": judge.measure,
        "judge_digests": dict(judge.digests),
        # Share of verdicts that depend on the order of the two answers. A comparison of scores has none.
        "inconsistent": 0.0,
        "distinct": _distinct(responses),
        "by_source": _by_source(responses, measured, preferences, interval),
        "confidence": interval.confidence,
        "gold_reward_exchanged": others.gold_exchanged,
        "over_chosen": others.over_chosen,
        "unscored": others.unscored,
    }
    if judge.language_model is not None:
        evaluation["inconsistent"] = judge.language_model["inconsistent"]
        evaluation["language_model"] = judge.language_model
    if others.regression:
        evaluation["regression"] = others.regression
    if interval.answers_per_prompt > 1:
        evaluation["answers_per_prompt"] = interval.answers_per_prompt
    return evaluation


def _numbers(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    preferences: Mapping[str, Sequence[float]],
    interval: Intervals,
) -> dict[str, Any]:
    """Return the measures of some prompts. `preferences` are those for each policy over the SFT model."""
    groups = interval.groups(responses["sft"])
    lengths: ByModel = {}
    ended: ByModel = {}
    eos_rate = {}
    for model, samples in responses.items():
        lengths[model] = _lengths(samples)
        ended[model] = [float(sample.finished) for sample in samples]
        eos_rate[model] = sum(sample.finished for sample in samples) / len(samples)
    measures = {}
    for name, by_model in measured.measures.items():
        measures[name] = interval.by_model(name, by_model, groups)
    rules = {}
    for name, by_model in measured.rules.items():
        indices = _without_nan(by_model)
        # A source whose values are all masked has no mean.
        if indices:
            of_indices = [groups[i] for i in indices]
            rules[name] = interval.by_model(f"rule/{name}", select(by_model, indices), of_indices)
    more_often_ended = interval.by_model("eos_rate", ended, groups)["difference"]
    policies = {}
    for policy, of_policy in preferences.items():
        policies[policy] = {
            **_win_rates(OVER_SFT, of_policy, responses[policy], responses["sft"], groups, interval),
            # The name is the seed of the bootstrap.
            "kl": interval.mean(flat_name("kl", policy), measured.kl[policy], groups).to_json(),
            "eos_rate_difference": more_often_ended[policy],
        }
    return {
        "policies": policies,
        "gold_reward": measures.get("gold"),
        "reward_model": measures.get("reward_model"),
        **({"judge_model": measures["judge_model"]} if "judge_model" in measures else {}),
        "rules": rules,
        "lengths": interval.by_model("length", lengths, groups),
        "eos_rate": eos_rate,
        "prompts": len({sample.prompt_id for sample in responses["sft"]}),
    }


def _win_rates(
    name: str,
    preferences: Sequence[float],
    ours: Sequence[RewardInput],
    theirs: Sequence[RewardInput],
    groups: Sequence[str] | None,
    interval: Intervals,
) -> dict[str, Any]:
    """Return a win rate, and the same with responses of equal length."""
    controlled = interval.length_controlled(preferences, ours, theirs, groups)
    return {
        name: interval.win_rate(preferences, groups).to_json(),
        f"{name}{LENGTH_CONTROLLED}": controlled.to_json(),
    }


def _without_nan(by_model: ByModel) -> list[int]:
    """Return the indices of the prompts for which all models have a value."""
    rows = zip(*by_model.values(), strict=True)
    return [i for i, values in enumerate(rows) if not math.isnan(sum(values))]


def _by_source(
    responses: Mapping[str, list[RewardInput]],
    measured: Measured,
    preferences: Mapping[str, Sequence[float]],
    interval: Intervals,
) -> dict[str, dict[str, Any]]:
    """Return `_numbers` for the prompts of each data source. Empty if there is only one source."""
    # Sorted, because a set of texts has another order in each process.
    names = sorted(set(measured.sources))
    if len(names) < 2:
        return {}
    by_source = {}
    for name in names:
        indices = [i for i, source in enumerate(measured.sources) if source == name]
        by_source[name] = _numbers(
            select(responses, indices),
            measured.select(indices),
            select(preferences, indices),
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
    for name in (PPO_OVER_DPO, f"{PPO_OVER_DPO}{LENGTH_CONTROLLED}"):
        flat |= {f"{name}/{part}": value for part, value in evaluation.get(name, {}).items()}
    if (chosen := evaluation["over_chosen"]) is not None:
        for suffix in ("", LENGTH_CONTROLLED):
            flat |= interval_metrics(f"win_rate_over_chosen{suffix}", chosen[f"win_rate{suffix}"])
    for name, found in evaluation.get("regression", {}).items():
        flat |= interval_metrics(f"regression/{name}", found)
    for source, numbers in evaluation["by_source"].items():
        of_source = _flat(numbers) | {"prompts": float(numbers["prompts"])}
        flat |= {f"by_source/{source}/{name}": value for name, value in of_source.items()}
    return flat


def _flat(evaluation: Mapping[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for policy, table in evaluation["policies"].items():
        flat |= policy_metrics(table, policy)
    for name in (*MEASURES, "gold_reward_exchanged"):
        flat |= interval_metrics(name, evaluation.get(name) or {})
    for name, by_model in evaluation["rules"].items():
        flat |= interval_metrics(f"rules/{name}", by_model)
    for model, rate in evaluation["eos_rate"].items():
        flat[f"eos_rate/{model}"] = rate
        flat[f"length/{model}"] = evaluation["lengths"][model]["mean"]
    return flat


def policy_metrics(table: Mapping[str, Any], policy: str) -> dict[str, float]:
    """Return the win rates and the KL in the table of a policy as metrics, with the names of `policy`."""
    flat = {flat_name("kl", policy): table["kl"]["mean"]} if "kl" in table else {}
    for name in (OVER_SFT, f"{OVER_SFT}{LENGTH_CONTROLLED}"):
        for part, value in table.get(name, {}).items():
            flat[f"{flat_name(name, policy)}/{part}"] = value
    return flat


def interval_metrics(name: str, by_model: Mapping[str, Any]) -> dict[str, float]:
    """Return the intervals of a measure as metrics: `{name}/{model}/mean` and so on, and
    `{name}/difference/mean` of PPO's policy minus the SFT model. Values that are no intervals are left out.
    """
    intervals = {model: found for model, found in by_model.items() if isinstance(found, Mapping)}
    for policy, found in intervals.pop("difference", {}).items():
        intervals[flat_name("difference", policy)] = found
    flat: dict[str, float] = {}
    for model, found in intervals.items():
        flat |= {f"{name}/{model}/{part}": value for part, value in found.items()}
    return flat


def notable_rows(
    answers: Mapping[str, Sequence[Answer]], comparisons: Mapping[str, Comparison], policy: str, count: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of prompts that are worth reading, by what was selected: the lowest scores of `policy`,
    and the largest changes of the score from the SFT model's. Empty if the answers have no score.

    The first measure counts: the true reward, if it is known. Arguments as for `sample_rows`.
    """
    measure = next(iter(answers[policy][0].scores), None)
    if measure is None:
        return {}
    score = [answer.scores.get(measure, math.nan) for answer in answers[policy]]
    before = [answer.scores.get(measure, math.nan) for answer in answers["sft"]]
    change = _difference(score, before)
    # NaN has no place in an order, and would leave the rows unsorted.
    known = [i for i, value in enumerate(change) if not math.isnan(value)]
    chosen = {
        "Lowest score": sorted(known, key=lambda i: score[i]),
        "Fell most from SFT": sorted((i for i in known if change[i] < 0), key=lambda i: change[i]),
        "Rose most from SFT": sorted((i for i in known if change[i] > 0), key=lambda i: -change[i]),
    }
    rows = {}
    for title, indices in chosen.items():
        if indices:
            title += f" ({measure.replace('_', ' ')})"
            rows[title] = sample_rows(answers, comparisons, indices[:count])
    return rows


def answered_prompts(
    answers: Mapping[str, Sequence[Answer]],
    comparisons: Mapping[str, Comparison],
    titles: Mapping[str, str],
    judge: str,
    count: int,
) -> list[AnsweredPrompt]:
    """Return the first `count` prompts with all answers, the verdicts and the scores of the main policy.

    `change` is its score by the first measure minus that of the SFT model.

    Args:
        answers: (n,) answers of each model.
        comparisons: Each policy against the SFT model.
        titles: Title of each model.
        judge: Name of the judge.
        count: Number of prompts.
    """
    policy = main_policy(answers)
    models = [policy, *(model for model in answers if model != policy)]
    found = []
    # Not strict, because only the first prompts of the policy are taken.
    for i, (answer, before) in enumerate(zip(answers[policy][:count], answers["sft"], strict=False)):
        assessments: dict[str, float | str] = {}
        for name, comparison in comparisons.items():
            winner = _winner(comparison, i, name)
            assessments[flat_name("winner", name)] = titles.get(winner, winner)
        assessments |= answer.scores
        # Of each answer: a masked measure is not among its scores.
        measure = next(iter(answer.scores), "")
        if measure in before.scores:
            assessments["change"] = answer.scores[measure] - before.scores[measure]
        texts = {titles[model]: answers[model][i].sample.response for model in models}
        found.append(AnsweredPrompt(answer.sample.prompt, texts, assessments, judge))
    return found


def _winner(comparison: Comparison, index: int, policy: str) -> str:
    """Return the policy, `sft` or `tie`."""
    # Exact floats: `statistics.preference` and `questions.judged` return no others.
    return {1.0: policy, 0.5: "tie", 0.0: "sft"}[comparison.preferences[index]]


def sample_rows(
    answers: Mapping[str, Sequence[Answer]], comparisons: Mapping[str, Comparison], indices: Iterable[int]
) -> list[dict[str, Any]]:
    """Return the models' answers to the prompts with these indices. `winner` is the policy of the stage `ppo`
    or the SFT model, and `winner_dpo` DPO's policy or the SFT model.

    Args:
        answers: (n,) answers of each model.
        comparisons: Each policy against the SFT model.
        indices: The prompts.
    """
    rows = []
    for i in indices:
        first = answers["sft"][i]
        row = {
            "prompt_id": first.sample.prompt_id,
            "prompt": first.sample.prompt,
            **{model: found[i].sample.response for model, found in answers.items()},
            "scores": {model: dict(found[i].scores) for model, found in answers.items()},
        }
        # Another order of the fields would give the pages of votes another digest (`review.blind_pairs`).
        for policy, comparison in comparisons.items():
            row[flat_name("winner", policy)] = _winner(comparison, i, policy)
            if comparison.groups is not None and comparison.groups[i] != first.sample.prompt_id:
                row["group"] = comparison.groups[i]
        rows.append(row)
    return rows
