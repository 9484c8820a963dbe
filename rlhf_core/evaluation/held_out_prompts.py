"""Which held-out prompts are for what: the first ones for the evaluation and the match, the last ones for the
evaluations during PPO, which choose the policy. They are in the order of the split, which does not depend on
sources, so both parts have the sources in the same proportions, up to chance.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import PipelineConfig
from rlhf_core.types import PromptExample


def prompts_of_evaluation(config: PipelineConfig, held_out: Sequence[PromptExample]) -> list[PromptExample]:
    """Return the first `evaluate.prompts` held-out prompts, or all if there are fewer."""
    return list(held_out[: config.evaluate.prompts])


def prompts_of_ppo(config: PipelineConfig, held_out: Sequence[PromptExample]) -> list[PromptExample]:
    """Return the last `ppo.evaluate_prompts` held-out prompts, or all if there are fewer."""
    return list(held_out[-config.ppo.evaluate_prompts :])


def shared_prompts(config: PipelineConfig, held_out: Sequence[PromptExample]) -> int:
    """Return how many prompts of the evaluation are of a group of the evaluations during PPO."""
    of_ppo = {prompt.group for prompt in prompts_of_ppo(config, held_out)}
    return sum(prompt.group in of_ppo for prompt in prompts_of_evaluation(config, held_out))
