"""Models and configurations of the tests of `rlhf plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.hardware import parse_gpus
from rlhf_core.planning.loads import device_loads
from tests.support.demo_data import config_with_demo_data as config_from_tree

CONFIGS = Path(__file__).resolve().parents[2] / "deployments" / "configs"
LLAMA_8B, MISTRAL_7B = CONFIGS / "shapes" / "llama-3-8b.json", CONFIGS / "shapes" / "mistral-7b.json"
BFLOAT16 = {"dtype": "bfloat16", "gradient_checkpointing": True}


def eight_b() -> ModelShape:
    return base_model_shape(PipelineConfig(), LLAMA_8B)


def config(sft: dict[str, Any] | None = None, **ppo: Any) -> PipelineConfig:
    trained = {"ranks": 2, "zero_stage": 3, **BFLOAT16}
    engine = {"dtype": "bfloat16", **ppo.pop("engine", {})}
    tree = {
        "model": {"path": "an/8b-model"},
        "sft": {"deepspeed": {"ranks": 4, "zero_stage": 3, **BFLOAT16}} | (sft or {}),
        "reward": {"deepspeed": {"ranks": 4, "zero_stage": 3, **BFLOAT16}},
        "ppo": {"policy_deepspeed": trained, "critic_deepspeed": trained, "engine": engine, **ppo},
    }
    return config_from_tree(tree, "test")


def peak(
    configured: PipelineConfig, stage: str, what: str = "", gpus: str = "8xA100-80G", phase: str = ""
) -> float:
    loads = device_loads(configured, eight_b(), parse_gpus(gpus).device)
    return max(
        load.total for load in loads if load.stage == stage and what in load.what and phase in load.phase
    )
