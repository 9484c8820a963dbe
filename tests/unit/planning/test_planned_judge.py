"""A local language model as judge in `rlhf plan`.

- its engine is a load of the evaluation with the sizes of its own config.json, and of the stage `sample` if
  it labels the answers there
- a judge that does not fit is a problem, and the changes offered make it fit
- on a CPU the models of the evaluation are in memory one after the other
- a judge at an address, or whose config.json is not here, needs nothing
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.models.shape import ModelShape, known_shape
from rlhf_core.planning.hardware import GIB, Device, Hardware, parse_gpus
from rlhf_core.planning.search import advise, compare_memory
from tests.support.demo_data import config_with_demo_data as config_from_tree

SHAPES = Path(__file__).resolve().parents[3] / "deployments" / "configs" / "shapes"
PARAMETERS = 8_030_261_248


@pytest.fixture
def folder(tmp_path: Path) -> str:
    shutil.copy(SHAPES / "llama-3-8b.json", tmp_path / "config.json")
    return str(tmp_path)


def small() -> ModelShape:
    shape = known_shape("qwen3-0.6b")
    assert shape is not None
    return shape


def config(
    language_model: dict[str, Any] | None, labels: bool = False, judge: str = "auto", **engine: Any
) -> PipelineConfig:
    sharded = {"ranks": 2, "zero_stage": 3, "dtype": "bfloat16", "gradient_checkpointing": True}
    trained = {"deepspeed": sharded, "micro_batch_tokens": 2048}
    ppo = {"policy_deepspeed": sharded, "critic_deepspeed": sharded, "micro_batch_tokens": 2048}
    tree = {
        "model": {"path": "a/model"},
        "sft": trained,
        "reward": trained,
        "ppo": {**ppo, "engine": {"dtype": "bfloat16", "count": 4, **engine}},
        "sample": {"judge": "language_model"} if labels else None,
        "evaluate": {"language_model": language_model, "engines": 2, "judge": judge},
    }
    return config_from_tree(tree, "test")


def loads(configured: PipelineConfig, hardware: Hardware) -> list[Any]:
    found = compare_memory(configured, small(), hardware).loads
    return [load for load in found if load.what == "language model"]


def test_the_engine_of_a_local_judge_is_a_load_of_the_evaluation(folder: str) -> None:
    hardware = parse_gpus("8xA100-80G")
    [load] = loads(config({"path": folder}), hardware)
    assert (load.stage, load.phase, load.devices) == ("evaluate", "judge", 2)
    assert load.engine.weights == 2 * PARAMETERS
    [half] = loads(config({"path": folder}, tensor_parallel=2), hardware)
    assert (half.devices, half.engine.weights) == (4, PARAMETERS)
    assert loads(config(None), hardware) == []
    assert loads(config({"path": f"{folder}/missing"}), hardware) == []
    address = {"url": "https://judge.example/v1", "model": "j"}
    assert loads(config(address), hardware) == []


def test_a_judge_that_labels_answers_is_a_load_of_the_stage_sample(folder: str) -> None:
    hardware = parse_gpus("8xA100-80G")
    both = loads(config({"path": folder}, labels=True), hardware)
    assert [(load.stage, load.phase, load.devices) for load in both] == [
        ("sample", "judge", 2),
        ("evaluate", "judge", 2),
    ]
    [load] = loads(config({"path": folder}, labels=True, judge="gold"), hardware)
    assert load.stage == "sample", "another judge decides the evaluation"
    small_gpus = parse_gpus("8xRTX4090-24G")
    configured = config({"path": folder}, labels=True, gpu_memory_utilization=0.6)
    verdict = compare_memory(configured, small(), small_gpus)
    assert [problem.stage for problem in verdict.problems] == ["sample", "evaluate"]
    assert verdict.problems[0].text.startswith("sample: the KV cache of an engine with evaluate.language_")
    changes = advise(configured, small(), small_gpus)
    assert changes is not None and any("gpu_memory_utilization" in change for change in changes)


def test_a_judge_that_does_not_fit_is_a_problem_with_a_way_out(folder: str) -> None:
    hardware = parse_gpus("8xRTX4090-24G")
    assert compare_memory(config(None, gpu_memory_utilization=0.6), small(), hardware).fits
    configured = config({"path": folder}, gpu_memory_utilization=0.6)
    verdict = compare_memory(configured, small(), hardware)
    assert [(problem.stage, problem.what) for problem in verdict.problems] == [("evaluate", "language model")]
    assert verdict.problems[0].text.startswith(
        "evaluate: the KV cache of an engine with evaluate.language_model.path holds 0 tokens; a question"
    )
    changes = advise(configured, small(), hardware)
    assert changes is not None
    tree = configured.model_dump(mode="json", by_alias=True)
    assert compare_memory(config_from_tree(tree, "test", changes), small(), hardware).fits
    assert not any(change.startswith("evaluate.ranks") for change in changes), "ranks do not help a judge"


def test_on_a_cpu_the_models_of_the_evaluation_are_in_memory_one_after_the_other(folder: str) -> None:
    def problems(gib: float) -> list[str]:
        hardware = Hardware(4, Device("CPU", gib * GIB, 0.15e12, 10e9, 1e9))
        verdict = compare_memory(config({"path": folder}), small(), hardware)
        return [problem.text for problem in verdict.problems if problem.stage == "evaluate"]

    hardware = Hardware(4, Device("CPU", 1000 * GIB, 0.15e12, 10e9, 1e9))
    totals = {
        load.what: load.total * load.devices / GIB
        for load in compare_memory(config({"path": folder}), small(), hardware).loads
        if load.stage == "evaluate"
    }
    largest = max(totals.values())
    assert totals["language model"] == largest < sum(totals.values()) - 2
    assert problems(largest + 1) == []
    assert problems(largest - 1)[0].startswith("evaluate: all processes need ")
