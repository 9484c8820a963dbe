"""Settings of PPO that the rules of the configuration restrict, and groups with different numbers of ranks.

- the settings found are a valid configuration with staleness, without critic, and with settings of the weight
  sync that not every placement can have
- data types that need ZeRO also on one device are planned there, without offload
- engines of several GPUs on the devices of ranks are on one host, have their part of the weights on each
  device, and are found where they are faster
- memory and time of a group depend on its own number of ranks
- demonstrations (`ppo.ptx`) need memory of the policy alone, in micro-batches of PPO
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.models.shape import ModelShape, known_shape
from rlhf_core.ops.plan.plan import fastest_settings
from rlhf_core.ops.plan.speed import group_time
from rlhf_core.planning.hardware import Hardware, parse_gpus
from rlhf_core.planning.loads import device_loads
from rlhf_core.planning.search import Changes, advise, compare_memory, room_for_engines, with_changes
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.sampled import share

RULES_ALONE = {"algorithm": "reinforce_pp", "rewards": [{"type": "repetition"}]}
"""Neither critic nor reward model."""


def shape(name: str) -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found


def config(**ppo: Any) -> PipelineConfig:
    bfloat16 = {"dtype": "bfloat16"}
    tree = {
        "model": {"path": "a/model"},
        "data": {"max_prompt_tokens": 256, "max_response_tokens": 256},
        "reward": {"enabled": "rewards" not in ppo, "deepspeed": bfloat16},
        "ppo": {
            "policy_deepspeed": bfloat16,
            "critic_deepspeed": bfloat16 | ppo.pop("critic_deepspeed", {}),
            "engine": bfloat16 | ppo.pop("engine", {}),
            "prompts_per_step": 512,
            "max_new_tokens": 256,
            **ppo,
        },
    }
    return config_from_tree(tree, "test")


def found_settings(configured: PipelineConfig, model: str, hardware: Hardware) -> list[tuple[float, Changes]]:
    """Return the fastest settings of PPO, which fit."""
    fix = advise(configured, shape(model), hardware)
    assert fix is not None
    found = fastest_settings(configured, fix, shape(model), hardware)["ppo"]
    for _, changes in found:
        changed = with_changes(configured, changes)
        assert changed is not None
        problems = compare_memory(changed, shape(model), hardware).problems
        assert not [problem.text for problem in problems if problem.stage == "ppo"]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "gpus"), share([("qwen3-0.6b", "H100"), ("qwen3-8b", "4xH100")], 2))
def test_further_settings_place_the_processes_in_another_way(model: str, gpus: str) -> None:
    found, placements = found_settings(config(), model, parse_gpus(gpus)), set()
    for _, changes in found:
        changed = with_changes(config(), changes)
        assert changed is not None
        placements.add((plan(changed.ppo), changed.ppo.engine.sleep_level))
    assert 1 <= len(placements) == len(found) <= 3


RESTRICTED = [
    pytest.param({"staleness": 1, "max_new_tokens": 16}, "qwen3-0.6b", "4xH100-80G", {}, id="staleness"),
    pytest.param(
        {**RULES_ALONE, "critic_deepspeed": {"ranks": 3}},
        "qwen3-8b",
        "8xA100-80G",
        {"ppo.colocate": "all"},
        id="no critic",
    ),
    pytest.param(
        {"weight_sync": {"backend": "nccl"}},
        "qwen3-8b",
        "2xH100-80G",
        {"ppo.colocate": "all", "ppo.weight_sync.backend": "auto"},
        id="nccl",
    ),
]


@pytest.mark.parametrize(("ppo", "model", "gpus", "changes"), RESTRICTED)
def test_settings_are_found_that_are_a_valid_configuration(
    ppo: dict[str, Any], model: str, gpus: str, changes: dict[str, str]
) -> None:
    _, found = found_settings(config(**ppo), model, parse_gpus(gpus))[0]
    assert changes.items() <= found.items()


@pytest.mark.parametrize(
    "deepspeed",
    [
        {"dtype": "float16", "zero_stage": 1},
        {"dtype": "bfloat16", "grad_accum_dtype": "float32", "zero_stage": 2},
    ],
    ids=["float16", "float32 sums"],
)
def test_data_types_that_need_zero_are_planned_on_one_device(deepspeed: dict[str, Any]) -> None:
    sections = {name: {"deepspeed": deepspeed} for name in ("sft", "reward")}
    ppo = {"policy_deepspeed": deepspeed, "critic_deepspeed": deepspeed}
    configured = config_from_tree({**sections, "ppo": ppo}, "test")
    hardware = parse_gpus("H100-80G", host_memory_gib=0)
    fix = advise(configured, shape("qwen3-0.6b"), hardware)
    assert fix is not None
    for found in fastest_settings(configured, fix, shape("qwen3-0.6b"), hardware).values():
        changed = [field for field in found[0][1] if field.endswith((".zero_stage", ".offload"))]
        assert not changed, "the configured stage is the lowest one"


def test_a_reward_model_in_float16_has_ranks_of_its_own() -> None:
    float16 = {"dtype": "float16", "zero_stage": 1}
    without_critic = {"algorithm": "grpo", "samples_per_prompt": 2, "staleness": 1}
    configured = config(policy_deepspeed=float16, critic_deepspeed=float16, **without_critic)
    _, changes = found_settings(configured, "qwen3-0.6b", parse_gpus("3xH100-80G"))[0]
    changed = with_changes(configured, changes)
    assert changed is not None and changed.ppo.reward_ranks == 1


def test_the_critic_has_the_same_memory_and_time_with_any_number_of_policy_ranks() -> None:
    hardware, model = parse_gpus("16xH100-80G"), shape("qwen3-0.6b")

    def critic(policy_ranks: int) -> tuple[Any, ...]:
        policy = {"dtype": "bfloat16", "ranks": policy_ranks}
        sharded = {"ranks": 2, "zero_stage": 3}
        wanted = config(policy_deepspeed=policy, critic_deepspeed=sharded, minibatches=32)
        _, group = plan(wanted.ppo).groups
        loads = device_loads(wanted, model, hardware.device)
        found = [load for load in loads if (load.stage, load.what) == ("ppo", group.name)]
        return found, group_time(wanted, model, group, hardware)

    assert critic(8) == critic(2)


def test_demonstrations_are_computed_by_the_policy_alone_in_micro_batches_of_ppo() -> None:
    def backward(**ppo: Any) -> dict[str, float]:
        configured = config(minibatches=256, colocate="none", **ppo)
        loads = device_loads(configured, shape("qwen3-0.6b"), parse_gpus("4xH100-80G").device)
        return {
            load.what: load.trainer.total
            for load in loads
            if load.stage == "ppo" and load.phase == "backward"
        }

    alone = backward()  # a minibatch has 2 responses, 1024 tokens
    more = backward(ptx={"coef": 1.0, "batch_size": 16})
    limited = backward(ptx={"coef": 1.0, "batch_size": 16}, micro_batch_tokens=1024)
    assert more["policy"] > 1.5 * alone["policy"] and more["critic"] == alone["critic"]
    assert limited["policy"] == alone["policy"], "the limit is that of PPO, not that of SFT"


HOSTS = parse_gpus("2x8xH100-80G", "8x400gbit")


def colocated(ranks: int, engines: int, ways: int, **engine: Any) -> PipelineConfig:
    sharded = {"dtype": "bfloat16", "ranks": ranks, "zero_stage": 3}
    return config(
        colocate="all",
        policy_deepspeed=sharded,
        critic_deepspeed=sharded,
        engine={"count": engines, "tensor_parallel": ways, "gpu_memory_utilization": 0.3, **engine},
    )


@pytest.mark.parametrize(
    ("ranks", "engines", "ways", "room"),
    [
        (16, 4, 4, 4),
        (16, 2, 4, 4),
        (12, 3, 4, 3),
        (10, 5, 2, 5),
        (12, 2, 6, 1),  # the second host has 4 ranks
        (16, 1, 16, 0),
    ],
)
def test_a_colocated_engine_is_on_ranks_of_one_host(ranks: int, engines: int, ways: int, room: int) -> None:
    wanted = colocated(ranks, engines, ways)
    assert room_for_engines(plan(wanted.ppo), HOSTS) == room
    problems = [problem.text for problem in compare_memory(wanted, shape("qwen3-0.6b"), HOSTS).problems]
    expected = (
        f"ppo: the {ways} GPUs of an engine must be in one host of 8; the training ranks are on too few"
    )
    assert any(text.startswith(expected) for text in problems) == (room < engines)


@pytest.mark.parametrize("level", [0, 2])
def test_a_colocated_engine_has_its_part_of_the_weights_on_each_device(level: int) -> None:
    def weights(engines: int, ways: int) -> float:
        wanted = colocated(8, engines, ways, dtype="bfloat16", sleep_level=level)
        loads = device_loads(wanted, shape("qwen3-8b"), HOSTS.device)
        return max(load.engine.weights for load in loads if load.stage == "ppo")

    assert weights(2, 4) == weights(8, 1) / 4 == 2 * shape("qwen3-8b").parameters / 4


@pytest.mark.parametrize(
    ("model", "gpus", "ways"), [("llama-3-70b", "4x8xH200-141G", 8), ("qwen3-0.6b", "8xH100-80G", 1)]
)
def test_engines_of_several_gpus_are_found_where_they_are_faster(model: str, gpus: str, ways: int) -> None:
    hardware = parse_gpus(gpus, "8x400gbit")
    _, found = found_settings(config(), model, hardware)[0]
    changed = with_changes(config(), found)
    assert changed is not None and changed.ppo.engine.tensor_parallel == ways
    if ways > 1:
        # With one GPU for each engine and the same ranks, the model has no room.
        alone = with_changes(config(), found | {"ppo.engine.tensor_parallel": "1", "ppo.engine.count": "32"})
        assert alone is not None and compare_memory(alone, shape(model), hardware).problems
