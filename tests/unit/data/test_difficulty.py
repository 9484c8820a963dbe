"""`ppo.difficulty`: prompts by the pass rate in their rows.

- prompts outside of the limits, and those without a number, are left out; others keep their order
- with `easy_first` the highest pass rates come first, in each pass over the prompts
- limits that no prompt meets are an error with both counts
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.ppo_sections import DifficultyConfig
from rlhf_core.data.difficulty import by_difficulty
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo.sampling.rollouts import prompts_of_step
from rlhf_core.types import PromptExample

RATES: list[Any] = [0.5, 1, 0.25, None, 0.75, True, "0.5", 0.0, float("nan")]
PROMPTS = [PromptExample(f"p{i}", "", (1,), {"pass_rate": rate}) for i, rate in enumerate(RATES)]


def kept(**settings: Any) -> list[str]:
    return [prompt.prompt_id for prompt in by_difficulty(PROMPTS, DifficultyConfig(**settings))]


def test_prompts_outside_of_the_limits_are_left_out() -> None:
    assert kept(min=0.25, max=0.75) == ["p0", "p2", "p4"]
    assert kept() == ["p0", "p1", "p2", "p4", "p7"]


def test_easy_prompts_come_first_in_each_pass() -> None:
    assert kept(order="easy_first") == ["p1", "p4", "p0", "p2", "p7"]
    steps = [prompts_of_step(5, 2, 0, step, shuffled=False) for step in (1, 2, 3, 4)]
    assert steps == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_limits_that_no_prompt_meets_are_an_error() -> None:
    text = r"none of 9 training prompts has pass_rate from 0\.8 to 0\.9 \(4 have no number in the field"
    with pytest.raises(DataError, match=text):
        kept(min=0.8, max=0.9)
    with pytest.raises(ConfigError, match=r"min must be at most max \(0\.2\); got 0\.5"):
        config_from_tree({"ppo": {"difficulty": {"min": 0.5, "max": 0.2}}}, "test")
