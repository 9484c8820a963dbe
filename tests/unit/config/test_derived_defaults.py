"""Defaults that depend on the device or on other settings. A value that is given stays.

- with adapters, learning rates are ten times those of all parameters
- on GPUs, a PPO step has 512 responses in minibatches of 64 or more; on CPUs 64 in minibatches of 16
- algorithms that compare the samples of a prompt have the KL in the loss
- the best policy is published where evaluations have a judge, or rules alone, and the KL counts
- a critic that starts from the reward model has a warm-up of at most a tenth of the steps
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from tests.support.demo_data import with_demo_data
from tests.support.scripted_machine import ScriptedMachine, on_machine

RULE: dict[str, Any] = {"type": "relevance"}
GROUPS = {"algorithm": "rloo", "samples_per_prompt": 4}


def loaded(tree: dict[str, Any], device: str = "cpu") -> PipelineConfig:
    with on_machine(ScriptedMachine()):
        return config_from_tree({"run": {"device": device}, **tree}, "test")


def ppo(**settings: Any) -> Any:
    return loaded({"ppo": settings}).ppo


def rates(tree: dict[str, Any]) -> tuple[float, ...]:
    """Learning rates of SFT, reward model, DPO, policy and critic."""
    config = loaded(with_demo_data({"model": {"path": "model"}, **tree}))
    optimizers = (
        config.sft.optimizer,
        config.reward.optimizer,
        config.dpo.optimizer,
        config.ppo.policy,
        config.ppo.critic,
    )
    return tuple(optimizer.learning_rate for optimizer in optimizers)


def test_learning_rates_of_adapters_are_ten_times_those_of_all_parameters() -> None:
    assert rates({}) == (2e-5, 1e-5, 1e-6, 1e-6, 5e-6)
    adapters: dict[str, Any] = {section: {"lora": {}} for section in ("sft", "reward", "dpo", "ppo")}
    assert rates(adapters) == (2e-4, 1e-4, 1e-5, 1e-5, 5e-5)
    assert rates({"ppo": {"lora": {"r": 4}}}) == (2e-5, 1e-5, 1e-6, 1e-5, 5e-5)
    assert rates({"sft": {"lora": None}}) == rates({})
    given = {"lora": {}, "optimizer": {"learning_rate": 3e-5, "warmup_ratio": 0.1}}
    assert rates({"sft": given})[0] == 3e-5
    # Another field of the optimizer is not a learning rate.
    assert rates({"sft": {"lora": {}, "optimizer": {"warmup_ratio": 0.1}}})[0] == 2e-4


@pytest.mark.parametrize(
    ("reward", "rate"),
    [
        ({"judge": {}}, 1e-5),
        ({"judge": {"lora": {}}}, 1e-4),
        ({"judge": {"lora": {}}, "optimizer": {"learning_rate": 3e-6}}, 3e-5),
        ({"judge": {"lora": {"r": 4}}, "lora": {}}, 1e-4),
        ({"judge": {"lora": {}, "optimizer": {"learning_rate": 2e-6}}}, 2e-6),
    ],
)
def test_a_judge_with_adapters_has_ten_times_the_rate_of_a_reward_model_without(
    reward: dict[str, Any], rate: float
) -> None:
    assert loaded({"reward": reward}).reward.of_judge.optimizer.learning_rate == rate


@pytest.mark.parametrize(
    ("settings", "steps", "prompts", "minibatches"),
    [
        ({}, 200, 512, 8),
        ({"samples_per_prompt": 4}, 200, 128, 8),
        ({"samples_per_prompt": 1000}, 200, 1, 10),  # 10 minibatches of 100: 1000 / 15 is no whole number
        ({"prompts_per_step": 100}, 200, 100, 1),
        ({"prompts_per_step": 256, "steps": 10}, 10, 256, 4),
        ({"minibatches": 4}, 200, 512, 4),
    ],
)
def test_a_step_on_gpus_has_512_responses_and_an_optimizer_step_64_or_more(
    settings: dict[str, Any], steps: int, prompts: int, minibatches: int
) -> None:
    found = loaded({"ppo": settings}, "cuda").ppo
    assert (found.steps, found.prompts_per_step, found.minibatches) == (steps, prompts, minibatches)
    assert found.minibatch_size >= 64


def test_cpus_keep_small_steps_and_gpus_evaluate_prompts_that_choose_no_policy() -> None:
    cpu, gpu = loaded({}), loaded({}, "cuda")
    assert (cpu.ppo.steps, cpu.ppo.prompts_per_step, cpu.ppo.minibatches) == (100, 64, 4)
    assert (cpu.evaluate.prompts, gpu.evaluate.prompts) == (128, 384)
    assert gpu.evaluate.prompts + gpu.ppo.evaluate_prompts == gpu.data.max_eval
    assert loaded({"evaluate": {"prompts": 5}}, "cuda").evaluate.prompts == 5


def test_group_algorithms_have_the_kl_in_the_loss() -> None:
    assert ppo().kl.place == ppo(algorithm="reinforce_pp").kl.place == "reward"
    assert (ppo(**GROUPS).kl.place, ppo(**GROUPS).kl.used_estimator) == ("loss", "k2")
    assert ppo(**GROUPS, kl={"place": "reward"}).kl.place == "reward"
    for estimator in ("k1", "abs", "k2", "k3"):
        assert ppo(**GROUPS, kl={"estimator": estimator}).kl.place == "reward"


@pytest.mark.parametrize(
    ("tree", "publish"),
    [
        ({}, "last"),
        ({"ppo": {"rewards": [{"type": "model"}, RULE]}}, "last"),
        ({"ppo": {"rewards": [{"type": "model", "weight": 0}, RULE]}}, "best"),
        ({"ppo": {"rewards": [RULE]}}, "best"),
        ({"ppo": {"rewards": [RULE], "evaluate_every": 0}}, "last"),
        ({"ppo": {"rewards": [RULE], "ema_decay": 0.5}}, "last"),
        ({"ppo": {"rewards": [RULE], "kl": {"coef": 0}}}, "last"),
        ({"ppo": {"rewards": [RULE], "kl": {"coef": 0}, "publish_max_kl": 9.0}}, "best"),
        ({"ppo": {"rewards": [{**RULE, "weight": 0}]}}, "last"),
        ({"ppo": {"rewards": [RULE], "publish": "last"}}, "last"),
        ({"reward": {"judge": {}}}, "best"),
        ({"ppo": {"enabled": False}, "reward": {"judge": {}}, "dpo": {"enabled": True}}, "last"),
    ],
)
def test_the_best_policy_is_published_where_the_evaluations_have_another_judge(
    tree: dict[str, Any], publish: str
) -> None:
    register = {"policy": "dpo"} if "dpo" in tree else {}
    assert loaded({**tree, "register": register}).ppo.publish == publish


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 10),
        ({"steps": 29}, 2),
        ({"steps": 9}, 0),
        ({"critic_warmup_steps": 0}, 0),
        ({"critic_warmup_steps": 3}, 3),
        ({"critic_warmup_max_steps": 20}, 20),
        ({"rewards": [RULE]}, 0),
        ({"rewards": [RULE, {"type": "model", "weight": 0}]}, 0),
        ({"rewards": [RULE, {"type": "model", "weight": 0.5}]}, 10),
        ({"algorithm": "reinforce_pp"}, 0),
    ],
)
def test_a_critic_from_the_reward_model_warms_up_for_at_most_a_tenth_of_the_steps(
    settings: dict[str, Any], longest: int
) -> None:
    found = ppo(**settings)
    assert found.longest_warmup == longest
    assert found.warmup_steps == (found.critic_warmup_steps or 0)


def test_reward_models_whose_weights_cancel_out_do_not_train_the_policy() -> None:
    weights = [
        {"type": "model", "name": name, "weight": weight} for name, weight in (("a", 1.0), ("b", -1.0))
    ]
    found = ppo(rewards=[*weights, RULE])
    assert (found.reward_model_weight, found.trains_on_reward_model) == (0, False)
    assert ppo(rewards=[{"type": "model", "weight": 0.5}]).reward_model_weight == 0.5
