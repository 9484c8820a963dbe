"""Placement: which processes run, as plain data.

- each colocation puts the right roles together, with the right number of ranks
- without a reward model or a critic no process is made for it
- the count agrees with what the preflight tells the user
"""

from __future__ import annotations

import pytest

from rlhf_core.cluster.placement import plan
from rlhf_core.config.devices import placement as preflight_placement
from rlhf_core.config.load import config_from_tree

PPO = {
    "prompts_per_step": 8,
    "minibatches": 2,
    "policy_deepspeed": {"ranks": 2},
    "critic_deepspeed": {"ranks": 2},
    "reference_ranks": 3,
    "engine": {"count": 2},
}


@pytest.mark.parametrize(
    ("colocate", "groups"),
    [
        ("none", {"policy": 2, "reference": 3, "critic": 2, "reward": 1}),
        ("policy_reference", {"policy+reference": 2, "critic": 2, "reward": 1}),
        ("critic_reward", {"policy": 2, "reference": 3, "critic+reward": 2}),
        ("pairs", {"policy+reference": 2, "critic+reward": 2}),
        ("all", {"policy+reference+critic+reward": 2}),
    ],
)
def test_each_colocation_puts_the_named_roles_together(colocate: str, groups: dict[str, int]) -> None:
    config = config_from_tree({"ppo": {**PPO, "colocate": colocate}}, "test")
    made = plan(config.ppo, critic=True, reward_model=True, device="cuda")
    assert {group.name: group.ranks for group in made.groups} == groups
    assert made.processes == sum(groups.values()) + 2
    assert made.processes == preflight_placement(config).processes


def test_no_process_is_made_for_a_model_that_does_not_exist() -> None:
    config = config_from_tree({"ppo": {**PPO, "colocate": "none"}}, "test")
    made = plan(config.ppo, critic=True, reward_model=False, device="cpu")
    assert [group.name for group in made.groups] == ["policy", "reference", "critic"]


def test_together_trainers_and_engines_share_each_device_half_and_half() -> None:
    config = config_from_tree({"ppo": {**PPO, "colocate": "all"}}, "test")
    made = plan(config.ppo, critic=True, reward_model=True, device="cuda")
    assert (made.gpus_per_rank, made.gpus_per_engine) == (0.5, 0.5)
