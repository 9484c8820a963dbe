"""The stage dpo in `rlhf plan` and in the checks before a run, if it is enabled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.models.shape import known_shape
from rlhf_core.ops.plan.plan import fastest_settings
from rlhf_core.ops.plan.rows import batches
from rlhf_core.planning.check import check_gpu_counts
from rlhf_core.planning.hardware import parse_gpus
from rlhf_core.planning.loads import checkpoint_sizes
from rlhf_core.planning.search import compare_memory, with_changes
from tests.support.demo_data import config_with_demo_data as config_from_tree

HARDWARE = parse_gpus("2xA100-40G")
SHARDED = {"deepspeed": {"ranks": 4, "zero_stage": 3, "dtype": "bfloat16"}}


def config(**dpo: Any) -> PipelineConfig:
    tree = {"model": {"path": "a/model"}, "sft": SHARDED, "reward": SHARDED, "dpo": {**SHARDED, **dpo}}
    return config_from_tree(tree, "test")


def test_the_plan_has_dpo_only_if_it_is_enabled() -> None:
    shape = known_shape("qwen2.5-7b")
    assert shape is not None
    wanted = config(enabled=True)
    # A pair has as many tokens as for the reward model, and the model has as many weights as in SFT.
    of_model = {batch.model: batch for batch in batches(wanted)}
    assert of_model["dpo"] == replace(of_model["reward"], model="dpo")
    verdict = compare_memory(wanted, shape, HARDWARE)
    loads = {load.stage: load.total for load in verdict.loads if load.phase == "load"}
    assert loads["dpo"] == loads["sft"]
    assert "dpo: needs 4 devices; there are 2" in [problem.text for problem in verdict.problems]
    sizes = checkpoint_sizes(wanted, shape)
    assert sizes["dpo"] == sizes["sft"]
    errors = [str(error) for error in check_gpu_counts(wanted, 2)]
    assert any("dpo.deepspeed.ranks: must be at most the 2 visible GPUs; got 4" in error for error in errors)

    plain = compare_memory(config(), shape, HARDWARE)
    assert "dpo" not in {load.stage for load in plain.loads} | {problem.stage for problem in plain.problems}
    assert not any("dpo" in str(error) for error in check_gpu_counts(config(), 2))


def test_the_fastest_settings_of_dpo_fit() -> None:
    shape = known_shape("qwen3-0.6b")
    assert shape is not None
    [(_, changes)] = fastest_settings(config(enabled=True), (), shape, HARDWARE)["dpo"]
    changed = with_changes(config(enabled=True), changes)
    assert changed is not None and all(name.startswith("dpo.") for name in changes)
    assert "dpo" not in {problem.stage for problem in compare_memory(changed, shape, HARDWARE).problems}
