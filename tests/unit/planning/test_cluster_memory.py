"""The GPUs of a cluster are compared with the needs of all stages, with the sentences of the preflight.

- a later stage of the run that will not fit is an error of the first one, with the fields that make it fit
- a stage has what the evaluation lacks if it uses the ranks or engines of the evaluation
- a stage that the run does not come to is a warning, and so is every stage on a cluster of one stage, without
  numbers of GPUs
- GPUs that are unknown or of several kinds, nodes without GPUs and unknown models are not compared
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster import handshake
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.pipeline import StageName, stages_between
from rlhf_core.planning.check import check_cluster_memory
from rlhf_core.planning.hardware import Hardware, cluster_hardware
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.scripted_cluster import node

LLAMA_8B = Path(__file__).resolve().parents[3] / "deployments" / "configs" / "shapes" / "llama-3-8b.json"
H100 = "NVIDIA H100 80GB HBM3"
NODES = [node(f"{n}", f"gpu-{n}", {"GPU": 8.0}) for n in range(4)] + [node("9", "head", {"CPU": 8.0})]


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    """A model of 70B that each stage can train on 32 GPUs, but the one rank of `evaluate` cannot score."""
    shape = json.loads(LLAMA_8B.read_text())
    shape |= {"hidden_size": 8192, "intermediate_size": 28672}
    shape |= {"num_hidden_layers": 80, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    deepspeed = {"zero_stage": 3, "ranks": 32, "dtype": "bfloat16", "gradient_checkpointing": True}
    training = {"deepspeed": deepspeed, "micro_batch_tokens": 1024, "batch_size": 32}
    tree: dict[str, Any] = {
        "run": {"device": "cuda"},
        "model": {"path": str(tmp_path)},
        "sft": training,
        "reward": training,
        "ppo": {
            "policy_deepspeed": deepspeed,
            "critic_deepspeed": deepspeed,
            "colocate": "all",
            "prompts_per_step": 256,
            "lora": {"r": 16, "alpha": 32},
            "micro_batch_tokens": 1024,
            "engine": {"dtype": "bfloat16", "tensor_parallel": 8, "count": 4, "gpu_memory_utilization": 0.7},
        },
    }
    return config_from_tree(tree, "test")


def check(
    config: PipelineConfig, gpus: list[str], stages: Collection[StageName] = stages_between("sft", "register")
) -> None:
    reports = {each["NodeID"]: {"gpus": gpus if "GPU" in each["Resources"] else []} for each in NODES}
    handshake._check_memory(NODES, reports, config, stages)


def test_a_later_stage_that_does_not_fit_is_an_error_with_a_fix(config: PipelineConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config, [H100] * 8)
    assert "evaluate: policy needs 1" in caught.value.message
    assert "GiB on each device" in caught.value.message
    assert "evaluate.ranks=" in caught.value.message
    assert not any(f"{stage}:" in caught.value.message for stage in ("sft", "reward", "ppo"))
    overrides = shlex.split(caught.value.message.rpartition("it fits with ")[2])
    check(config_from_tree(config.model_dump(mode="json", by_alias=True), "test", overrides), [H100] * 8)


@pytest.mark.parametrize("stages", [("ppo",), ("sample",)])
def test_stages_that_use_the_ranks_of_the_evaluation_do_not_fit_either(
    stages: tuple[StageName, ...], config: PipelineConfig
) -> None:
    """PPO with an adapter measures its files there."""
    with pytest.raises(ConfigError, match="evaluate: policy needs 1"):
        check(config, [H100] * 8, stages)


def test_on_a_cluster_of_one_stage_it_is_a_warning(
    config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    check(config, [H100] * 8, ())
    assert "evaluate: policy needs 1" in caplog.text and "H100-80G has 79.1" in caplog.text
    small = cluster_hardware([(1, [H100])])
    assert small is not None
    found = check_cluster_memory(config, small, ())
    assert isinstance(found, str) and "devices;" not in found


def test_a_stage_that_the_run_does_not_come_to_is_a_warning(
    config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    check(config, [H100] * 8, stages_between("sft", "reward"))
    assert "evaluate: policy needs 1" in caplog.text
    # The fix of what the run needs does not change other stages.
    deepspeed = config.sft.deepspeed.model_copy(update={"zero_stage": 0})
    sft = config.sft.model_copy(update={"deepspeed": deepspeed})
    with pytest.raises(ConfigError, match=r"it fits with .*sft\.deepspeed") as caught:
        check(config.model_copy(update={"sft": sft}), [H100] * 8, stages_between("sft", "reward"))
    assert "evaluate" not in caught.value.message


@pytest.mark.parametrize("gpus", [[], ["NVIDIA T4"] * 8, [H100] * 7 + ["NVIDIA H200"]])
def test_unknown_gpus_are_not_compared(
    config: PipelineConfig, gpus: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    check(config, gpus)
    assert "is not compared" in caplog.text


def test_an_unknown_model_is_not_compared(config: PipelineConfig) -> None:
    model = config.model.model_copy(update={"path": "nobody/unknown-model", "revision": "0" * 40})
    check(config.model_copy(update={"model": model}), [H100] * 8)


def test_hosts_with_different_numbers_of_gpus_count_as_one() -> None:
    found = cluster_hardware([(8, [H100] * 8), (4, [H100] * 8), (0, [])])
    assert found is not None and (found.count, found.hosts) == (12, 1)
    found = cluster_hardware([(8, [H100] * 8), (8, [H100] * 8), (0, ["NVIDIA T4"])])
    assert isinstance(found, Hardware) and (found.count, found.hosts, found.per_host) == (16, 2, 8)
    assert cluster_hardware([(0, [])]) is None
