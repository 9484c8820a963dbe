"""Held-out prompts: the first ones judge the policy, the last ones choose it.

- with enough prompts both have none in common; otherwise their number is known
- those that choose the policy are left out if enough others remain, also in a match
- both parts have the sources in the same proportions, also if one source comes after the other in the data
"""

from __future__ import annotations

from dataclasses import replace

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.data.examples import split_key, split_position
from rlhf_core.evaluation.prompts import prompts_of_evaluation, prompts_of_ppo, shared_prompts
from rlhf_core.types import PromptExample


def config_of(evaluation: int, ppo: int, publish: str = "last") -> PipelineConfig:
    tree = {
        "evaluate": {"prompts": evaluation},
        "ppo": {"evaluate_prompts": ppo, "publish": publish},
        "run": {"device": "cpu"},
    }
    return config_from_tree(tree, "test")


def held_out(count: int) -> list[PromptExample]:
    """Return prompts of two sources, one after the other, in the order of the stage `data`."""
    texts = [f"prompt {i}" for i in range(count)]
    positions = {text: split_position(0, split_key(text)) for text in texts}
    sources = ["a"] * (count // 4) + ["b"] * (count - count // 4)
    prompts = [PromptExample(t, t, (1,), source=s) for t, s in zip(texts, sources, strict=True)]
    return sorted(prompts, key=lambda prompt: positions[prompt.prompt])


def test_prompts_that_choose_the_policy_do_not_judge_it_if_there_are_enough() -> None:
    for count, shared in ((10, 0), (9, 1), (6, 4), (4, 4), (2, 2)):
        prompts, config = held_out(count), config_of(6, 4)
        first, last = prompts_of_evaluation(config, prompts), prompts_of_ppo(config, prompts)
        assert (first, last) == (prompts[:6], prompts[-4:])
        assert shared_prompts(config, prompts) == shared == sum(prompt in last for prompt in first)


def test_prompts_that_choose_the_policy_are_left_out_if_50_others_remain() -> None:
    config = config_of(384, 128, "best")
    for count, left in ((600, 384), (256, 128), (178, 50), (177, 177), (100, 100)):
        prompts = held_out(count)
        assert prompts_of_evaluation(config, prompts) == prompts[:left]
        assert prompts_of_evaluation(config_of(384, 128), prompts) == prompts[:384]
    prompts = held_out(256)
    assert prompts_of_evaluation(config, prompts, prompts[50:]) == prompts[50:128], "a match"
    related = [replace(prompt, group="related") for prompt in prompts[126:130]]
    assert prompts_of_evaluation(config, prompts[:126] + related + prompts[130:]) == prompts[:126]
    assert prompts_of_evaluation(config_of(12, 128, "best"), prompts[:140]) == prompts[:12]


def test_prompts_of_a_group_that_chose_the_policy_are_counted_as_shared() -> None:
    prompts, config = held_out(10), config_of(6, 4)
    prompts[4:8] = [replace(prompt, group="related") for prompt in prompts[4:8]]
    assert shared_prompts(config, prompts) == 2, "the fifth and the sixth"


def test_both_parts_have_the_sources_in_the_same_proportions() -> None:
    prompts, config = held_out(4000), config_of(1000, 1000)
    for part in (prompts_of_evaluation(config, prompts), prompts_of_ppo(config, prompts)):
        share = sum(prompt.source == "a" for prompt in part) / len(part)
        assert abs(share - 0.25) < 0.04, "three standard errors"
