"""Which held-out prompts are for what: the first ones for the evaluation and the match, the last ones for the
evaluations during PPO, which choose the policy. They are in the order of the split, which does not depend on
sources, so both parts have the sources in the same proportions, up to chance. If PPO's evaluations choose the
policy, their prompts are left out of the evaluation and the match, if enough others remain.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import LEAST_PROMPTS
from rlhf_core.types import PromptExample


def prompts_of_evaluation(
    config: PipelineConfig, held_out: Sequence[PromptExample], usable: Sequence[PromptExample] | None = None
) -> list[PromptExample]:
    """Return the first `evaluate.prompts` of the `usable` held-out prompts (None: all), or all if there are
    fewer. Groups that choose PPO's policy are left out if `LEAST_PROMPTS` other groups, or
    `evaluate.prompts` if that is less, remain.
    """
    prompts = list(held_out if usable is None else usable)
    count = config.evaluate.prompts
    if config.evaluations_choose:
        choosing = {prompt.group for prompt in prompts_of_ppo(config, held_out)}
        others = [prompt for prompt in prompts if prompt.group not in choosing]
        if len({prompt.group for prompt in others}) >= min(LEAST_PROMPTS, count):
            prompts = others
    return prompts[:count]


def prompts_of_ppo(config: PipelineConfig, held_out: Sequence[PromptExample]) -> list[PromptExample]:
    """Return the last `ppo.evaluate_prompts` held-out prompts, or all if there are fewer."""
    return list(held_out[-config.ppo.evaluate_prompts :])


def shared_prompts(config: PipelineConfig, held_out: Sequence[PromptExample]) -> int:
    """Return how many prompts of the evaluation are of a group of the evaluations during PPO."""
    of_ppo = {prompt.group for prompt in prompts_of_ppo(config, held_out)}
    return sum(prompt.group in of_ppo for prompt in prompts_of_evaluation(config, held_out))
