"""Both models against the data's own answers: the preferred (`chosen`) answers of held-out pairs.

The judge of the evaluation compares the answers of both models with the chosen ones. If it is a sum of rules,
there is no comparison, because pairs do not have the fields of a prompt's row, which rules may read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_pairs
from rlhf_core.evaluation.scoring import has_gold
from rlhf_core.evaluation.statistics import preference
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.types import PairExample, PromptExample, RewardInput

_JUDGES = ("language_model", "gold", "judge_model", "reward_model")

ResponsesByModel = Mapping[str, list[RewardInput]]
Prefer = Callable[[ResponsesByModel, list[RewardInput]], Mapping[str, Sequence[float]]]
"""Returns the preferences of each model's answers over the (n,) chosen ones."""


def by_score(score: Callable[[list[RewardInput]], list[float]]) -> Prefer:
    """Return the preferences by a score, which is called once for all answers."""

    def prefer(answers: ResponsesByModel, chosen: list[RewardInput]) -> dict[str, list[float]]:
        samples = list(chosen)
        for own in answers.values():
            samples += own
        scores = score(samples)
        count = len(chosen)
        preferences = {}
        for number, model in enumerate(answers, 1):
            of_model = scores[number * count : (number + 1) * count]
            preferences[model] = list(map(preference, of_model, scores[:count]))
        return preferences

    return prefer


def load_chosen(config: PipelineConfig, data: Path, judge: str) -> list[PairExample]:
    """Return the first `evaluate.prompts` held-out pairs with different prompts, or none if there is no
    comparison with them.

    Args:
        config: Configuration of the run.
        data: Folder of the data artifact.
        judge: Judge of the evaluation.
    """
    if not config.evaluate.chosen or judge not in _JUDGES:
        return []
    by_prompt: dict[str, PairExample] = {}
    for pair in load_pairs(data, "eval"):
        by_prompt.setdefault(pair.prompt_id, pair)
    pairs = list(by_prompt.values())[: config.evaluate.prompts]
    if judge == "gold" and not has_gold(list(map(_prompt, pairs))):
        return []
    return pairs


def prompts_to_answer(pairs: Sequence[PairExample], held_out: Sequence[PromptExample]) -> list[PromptExample]:
    """Return the prompts of `pairs` that are not in `held_out`: to these, the models' responses are known."""
    known = {prompt.prompt_id for prompt in held_out}
    return [_prompt(pair) for pair in pairs if pair.prompt_id not in known]


def compare_with_chosen(
    pairs: Sequence[PairExample],
    responses: Mapping[str, Sequence[RewardInput]],
    decode: Callable[[Sequence[int]], str],
    prefer: Prefer,
    interval: Intervals,
) -> dict[str, Any] | None:
    """Return each model's win rate over the chosen answers, and the difference paired by prompt; None without
    pairs.

    Args:
        pairs: (n,) pairs with different prompts.
        responses: Responses of each model, to all prompts of the pairs and possibly to others.
        decode: Decodes the tokens of a response.
        prefer: Returns the judge's preferences.
        interval: Computes the confidence intervals.
    """
    if not pairs:
        return None
    chosen = [_chosen(pair, decode) for pair in pairs]
    answers: dict[str, list[RewardInput]] = {}
    for model, own in responses.items():
        by_prompt = {answer.prompt_id: answer for answer in own}
        answers[model] = [by_prompt[pair.prompt_id] for pair in pairs]
    preferences = {model: list(values) for model, values in prefer(answers, chosen).items()}
    groups = interval.groups(chosen)
    rates: dict[str, Any] = {}
    controlled = {}
    for model, own in answers.items():
        rates[model] = interval.win_rate(preferences[model], groups).to_json()
        controlled[model] = interval.length_controlled(preferences[model], own, chosen, groups).to_json()
    for name, found in interval.by_model("win_rate_over_chosen", preferences, groups).items():
        # Only the differences. The rates of models are above, with Wilson's interval.
        if name not in responses:
            rates[name] = found
    return {"prompts": len(pairs), "win_rate": rates, "win_rate_length_controlled": controlled}


def _prompt(pair: PairExample) -> PromptExample:
    return PromptExample(pair.prompt_id, pair.prompt, pair.prompt_ids, {}, pair.source, pair.group)


def _chosen(pair: PairExample, decode: Callable[[Sequence[int]], str]) -> RewardInput:
    return RewardInput(
        prompt_id=pair.prompt_id,
        prompt=pair.prompt,
        response=decode(pair.chosen_ids),
        prompt_ids=pair.prompt_ids,
        response_ids=pair.chosen_ids,
        finished=True,
    )
