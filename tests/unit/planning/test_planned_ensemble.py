"""An ensemble of reward models in `rlhf plan`."""

from __future__ import annotations

from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.models.shape import known_shape
from rlhf_core.ops.plan.speed import group_time
from rlhf_core.planning.hardware import parse_gpus
from rlhf_core.planning.loads import checkpoint_sizes, group_loads, ppo_models
from tests.support.demo_data import config_with_demo_data as config_from_tree

HARDWARE = parse_gpus("8xH100-80G")
BFLOAT16 = {"deepspeed": {"dtype": "bfloat16"}}


def config(ensemble: dict[str, Any] | None, **ppo: Any) -> PipelineConfig:
    tree = {
        "model": {"path": "a/model"},
        "reward": {**BFLOAT16, "ensemble": ensemble},
        "ppo": {"critic_deepspeed": {"dtype": "bfloat16"}, **ppo},
    }
    return config_from_tree(tree, "test")


def test_every_member_counts_in_memory_and_time() -> None:
    shape = known_shape("qwen2.5-7b")
    assert shape is not None
    weights = 2 * shape.score_parameters
    found = {}
    for members in (1, 3):
        changed = config({"members": members} if members > 1 else None)
        [group] = [group for group in plan(changed.ppo).groups if "reward" in group.roles]
        loads = {load.phase: load for load in group_loads(changed, shape, group, "cuda")}
        scoring, _ = group_time(changed, shape, group, HARDWARE)
        sizes = checkpoint_sizes(changed, shape)
        found[members] = (loads["score"].bytes.weights, scoring, sizes["reward"], len(group.roles))
        assert len(ppo_models(changed, shape, group)) == len(group.roles) + members - 1
    assert found[3][0] - found[1][0] == 2 * weights
    assert found[3][1] / found[1][1] == (found[1][3] + 2) / found[1][3]
    # A checkpoint of the last member has the two others as they are saved.
    assert found[3][2] - found[1][2] == 2 * weights


def test_members_have_their_own_weights_where_the_first_shares_the_critics() -> None:
    shape = known_shape("qwen2.5-7b")
    assert shape is not None
    changed = config({}, lora={}, colocate="all")
    [group] = plan(changed.ppo).groups
    assert set(ppo_models(changed, shape, group)) == {
        "policy", "critic", "reward member 1", "reward member 2",
    }  # fmt: skip
