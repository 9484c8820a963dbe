"""Both models against the chosen answers of held-out pairs.

- a model's win rate counts the pairs whose chosen answer has a lower score; the difference is paired
- each prompt counts once, at most `evaluate.prompts`, and responses that are known are not sampled again
- the length-controlled win rate of a model that wins by length only is lower
- there is no comparison for other judges, for pairs without a true reward, or if it is switched off
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import write
from rlhf_core.evaluation.summary import Intervals, interval_metrics
from rlhf_core.stages.evaluate import (
    by_score,
    compare_with_chosen,
    load_chosen,
    prompts_to_answer,
)
from rlhf_core.types import PairExample, PromptExample, RewardInput

TEXTS = [f"Tell me about a small {subject} in the garden." for subject in ("fox", "cat", "dog", "bear")]
PAIRS = [PairExample(f"p{i}", text, (1, 2), (5,) * 4, (6,), "a") for i, text in enumerate(TEXTS)]


def config_of(**evaluate: Any) -> PipelineConfig:
    tree = {"evaluate": {"bootstrap": 200, **evaluate}}
    return PipelineConfig.model_validate_json(json.dumps(tree))


def answers(scores: list[int], lengths: list[int]) -> list[RewardInput]:
    """The first token is the score."""
    rows = zip(PAIRS, scores, lengths, strict=True)
    return [RewardInput(p.prompt_id, p.prompt, "", (1, 2), (s,) * n, True) for p, s, n in rows]


def score(samples: list[RewardInput]) -> list[float]:
    return [float(sample.response_ids[0]) for sample in samples]


def test_each_model_is_compared_with_the_chosen_answers() -> None:
    responses = {"sft": answers([9, 5, 1, 1], [4] * 4), "ppo": answers([9, 9, 9, 1], [4] * 4)}
    found = compare_with_chosen(PAIRS, responses, str, by_score(score), Intervals(config_of()))
    assert found is not None and found["prompts"] == 4
    # SFT: one win and one tie of four; PPO: three wins.
    rates, difference = found["win_rate"], found["win_rate"]["difference"]["ppo"]
    assert (rates["sft"]["mean"], rates["ppo"]["mean"], difference["mean"]) == (0.375, 0.75, 0.375)
    metrics = interval_metrics("chosen", rates)
    assert metrics["chosen/ppo/mean"] == 0.75 and metrics["chosen/difference/low"] == difference["low"]


def test_dpo_is_compared_too() -> None:
    ppo, dpo = answers([9, 9, 9, 1], [4] * 4), answers([9, 1, 1, 1], [4] * 4)
    responses = {"sft": answers([1, 1, 1, 1], [4] * 4), "ppo": ppo, "dpo": dpo}
    found = compare_with_chosen(PAIRS, responses, str, by_score(score), Intervals(config_of()))
    assert found is not None and found["win_rate"]["dpo"]["mean"] == 0.25
    assert found["win_rate"]["ppo_minus_dpo"]["mean"] == 0.5


def test_the_difference_is_paired() -> None:
    """Both models win half of the prompts, the same ones: the difference has no error."""
    same = answers([9, 9, 1, 1], [4] * 4)
    found = compare_with_chosen(
        PAIRS, {"sft": same, "ppo": same}, str, by_score(score), Intervals(config_of())
    )
    assert found is not None
    assert found["win_rate"]["difference"]["ppo"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert found["win_rate"]["ppo"]["low"] < found["win_rate"]["ppo"]["high"]


def test_longer_winners_have_a_lower_controlled_win_rate() -> None:
    responses = {"sft": answers([9, 9, 9, 1], [4] * 4), "ppo": answers([9, 9, 9, 1], [40, 40, 40, 2])}
    found = compare_with_chosen(PAIRS, responses, str, by_score(score), Intervals(config_of()))
    assert found is not None
    controlled = found["win_rate_length_controlled"]
    assert controlled["ppo"]["mean"] < controlled["sft"]["mean"] - 0.05


def test_known_responses_are_not_sampled_again() -> None:
    held_out = [PromptExample("p1", TEXTS[1], (1, 2)), PromptExample("other", "x", (1,))]
    assert [prompt.prompt_id for prompt in prompts_to_answer(PAIRS, held_out)] == ["p0", "p2", "p3"]


@pytest.mark.parametrize(
    ("evaluate", "judge", "pairs", "expected"),
    [
        ({}, "gold", PAIRS, ["p0", "p1", "p2", "p3"]),
        ({"prompts": 2}, "reward_model", [PAIRS[0], PAIRS[0], *PAIRS[1:]], ["p0", "p1"]),
        ({"chosen": False}, "gold", PAIRS, []),
        ({}, "rules", PAIRS, []),
        ({}, "gold", [PairExample("q", "How are you?", (1,), (2,), (3,), "a")], []),
        ({}, "judge_model", [], []),
    ],
)
def test_only_pairs_that_the_judge_can_compare_are_loaded_each_prompt_once(
    evaluate: dict[str, Any], judge: str, pairs: list[PairExample], expected: list[str], tmp_path: Path
) -> None:
    write(tmp_path, "pairs", "eval", pairs)
    found = load_chosen(config_of(**evaluate), tmp_path, judge)
    assert [pair.prompt_id for pair in found] == expected
