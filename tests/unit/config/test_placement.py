"""Placement: which processes run, as plain data.

- each colocation has the right roles in one process, with the right number of ranks
- a model that does not exist (reward model, critic) has no process
- models on the policy's ranks have the same number of ranks, if they exist
- processes that share devices need as many as the larger of the two groups; engines have at most the ranks'
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import Group, plan
from rlhf_core.errors import ConfigError

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
def test_colocation_decides_which_roles_share_a_group(colocate: str, groups: dict[str, int]) -> None:
    config = config_from_tree({"ppo": {**PPO, "colocate": colocate}}, "test")
    made = plan(config.ppo)
    assert {group.name: group.ranks for group in made.groups} == groups
    assert made.processes == sum(groups.values()) + 2


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"rewards": [{"type": "repetition"}]}, ["policy", "reference", "critic"]),
        ({"algorithm": "reinforce_pp"}, ["policy", "reference", "reward"]),
    ],
)
def test_absent_model_has_no_process(settings: dict[str, Any], groups: list[str]) -> None:
    config = config_from_tree({"ppo": {**PPO, "colocate": "none", **settings}}, "test")
    assert [group.name for group in plan(config.ppo).groups] == groups


def test_a_teacher_is_not_the_policy_without_its_adapter() -> None:
    adapted = []
    for settings in ({}, {"teacher": {"path": "./teacher"}}):
        ppo = config_from_tree({"ppo": {**PPO, "lora": {}, **settings}}, "test").ppo
        adapted.append(Group(("policy", "reference"), 1).adapted_from("reference", ppo))
    assert adapted == ["policy", None]


def test_only_existing_models_must_have_the_ranks_of_the_policy() -> None:
    ppo = {**PPO, "colocate": "all", "critic_deepspeed": {"ranks": 1}}
    for algorithm in ("ppo", "reinforce_pp"):  # critic and reward model, reward model alone
        with pytest.raises(ConfigError, match=r"equal to ppo\.critic_deepspeed\.ranks; got 2 and 1"):
            config_from_tree({"ppo": {**ppo, "algorithm": algorithm}}, "test")
    alone = {**ppo, "algorithm": "reinforce_pp", "rewards": [{"type": "repetition"}]}
    [group] = plan(config_from_tree({"ppo": alone}, "test").ppo).groups
    assert (group.name, group.ranks) == ("policy+reference", 2)


def test_colocated_trainers_and_engines_have_half_a_device_each() -> None:
    config = config_from_tree({"ppo": {**PPO, "colocate": "all"}}, "test")
    made = plan(config.ppo)
    assert (made.gpus_per_rank, made.gpus_per_engine) == (0.5, 0.5)
    assert made.devices == 2 and made.describe().endswith("= 2")


def test_colocated_engines_of_several_gpus_are_on_those_of_the_ranks() -> None:
    ranks = {"policy_deepspeed": {"ranks": 4}, "critic_deepspeed": {"ranks": 4}}
    ppo = {**PPO, **ranks, "colocate": "all", "engine": {"count": 2, "tensor_parallel": 2}}
    made = plan(config_from_tree({"ppo": ppo}, "test").ppo)
    # Ray reserves half of the first GPU of an engine. No one else gets the other halves.
    assert (made.gpus_per_rank, made.gpus_per_engine, made.devices) == (0.5, 0.5, 4)
    assert made.describe().endswith(", 2 engines (2 GPUs each), on the same GPUs = 4")
    assert (made.cores(gpus=True), made.cores(gpus=False)) == (8, 6)


def test_colocated_engines_with_more_gpus_than_ranks_are_refused() -> None:
    for count, ways in ((3, 1), (2, 2), (1, 4)):
        engine = {"count": count, "tensor_parallel": ways}
        with pytest.raises(
            ConfigError, match=rf"at most ppo\.policy_deepspeed\.ranks \(2\); got {count} x {ways}"
        ):
            config_from_tree({"ppo": {**PPO, "colocate": "all", "engine": engine}}, "test")


@pytest.mark.parametrize(
    ("colocate", "devices"),
    [
        ("none", 2 + 3 + 2 + 1 + 4),
        ("policy_reference", 2 + 2 + 1 + 4),
        ("critic_reward", 2 + 3 + 2 + 4),
        ("pairs", 2 + 2 + 4),
    ],
)
def test_number_of_devices_of_each_colocation(colocate: str, devices: int) -> None:
    engines = {"engine": {"count": 2, "tensor_parallel": 2}}
    made = plan(config_from_tree({"ppo": {**PPO, **engines, "colocate": colocate}}, "test").ppo)
    assert made.devices == devices
    assert made.describe().endswith(f"= {devices}")
