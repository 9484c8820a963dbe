"""Rules in an actor of a real Ray.

- they return what they return in one process
- a dead actor is named by the next call
"""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import PPOSettings
from rlhf_core.errors import WorkerDied
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.reward_actor import RewardActors, RewardSettings
from rlhf_core.ppo.sampling.rollouts import RewardInputs
from rlhf_core.ppo.training.batch import Places, RolloutBatch, columns_of
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.types import PromptExample, Rollout


class OnlyRewards(Fleet):
    """Starts Ray, and no ranks and engines."""

    @override
    def _start_actors(self) -> None:
        return None

    @property
    @override
    def nodes(self) -> list[str]:
        import ray

        return [ray.get_runtime_context().get_node_id()]


def test_rules_score_on_ray_as_in_one_process() -> None:
    rules = [{"type": "token_share", "below": 5, "normalize": "batch"}, {"type": "repetition"}]
    config = config_from_tree({"run": {"device": "cpu"}, "ppo": {"rewards": rules}}, "test")
    prompts = [PromptExample(f"p{i}", f"prompt {i}", (1, i)) for i in range(6)]
    rollouts = [
        Rollout(prompt.prompt_id, 0, prompt.input_ids, tuple(range(2, 4 + i)), (0.0,) * (2 + i), True, 0)
        for i, prompt in enumerate(prompts)
    ]
    with OnlyRewards(PPOSettings.of(config), "cpu", {}, 0) as fleet:
        chunks = [fleet.put(columns_of(rollouts[:4], 1)), fleet.put(columns_of(rollouts[4:], 1))]
        places = Places(np.array([0, 0, 0, 0, 1, 1]), np.array([0, 1, 2, 3, 0, 1]))
        lengths = np.array([len(rollout.response_ids) for rollout in rollouts], np.int32)
        batch = RolloutBatch(chunks, places, lengths, np.ones(6, np.bool_), prompts)
        inputs = RewardInputs(fleet, batch, str)
        with RewardComposer(config.ppo.rewards) as composer:
            expected = composer.score(inputs, None)
        rewards = RewardActors(fleet, RewardSettings(config.ppo.rewards, str))
        assert rewards.score(inputs, None) == expected
        _kill(rewards)
        with pytest.raises(WorkerDied, match="died"):  # Ray may not know its name yet
            rewards.score(inputs, None)


def _kill(rewards: RewardActors) -> None:
    import ray

    [actor] = rewards._actors
    pid = ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGKILL)
