"""Adapters before a run starts.

- targets that the model's layers do not have are refused, with those that they have
- quantization is refused without a GPU or bitsandbytes, under ZeRO-3, and in PPO where engines or reference
  would hold other weights than the policy
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.models.check import check_adapters
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.scripted_machine import ScriptedMachine, on_machine


def _problems(*overrides: str, **tree: Any) -> list[str]:
    return [str(finding) for finding in check_adapters(config_from_tree(tree, overrides=overrides))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    names = (
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "lm_head",
    )
    header = {f"{name}.weight": {"dtype": "F32", "shape": [0, 0], "data_offsets": [0, 0]} for name in names}
    norm = "model.layers.0.input_layernorm.weight"
    header[norm] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return tmp_path


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_targets_that_the_layers_do_not_have_are_refused(model: Path, stage: str) -> None:
    good = {stage: {"lora": {"targets": ["q_proj", "down_proj"]}}, "model": {"path": str(model)}}
    assert _problems(**good) == []
    bad = {
        stage: {"lora": {"targets": ["q_proj", "query", "lm_head", "input_layernorm"]}},
        "model": {"path": str(model)},
    }
    (problem,) = _problems(**bad)
    assert problem.startswith(
        f"{stage}.lora.targets: {model} has no input_layernorm, lm_head, query in its layers;"
        " it has down_proj, q_proj;"
    )


def test_quantization_needs_a_gpu_and_bitsandbytes() -> None:
    tree: dict[str, Any] = {"reward": {"lora": {"quantize": "nf4"}}}
    (problem,) = _problems("run.device=cpu", **tree)
    assert problem.startswith("reward.lora.quantize: nf4 needs a GPU; got 0 visible")
    with on_machine(ScriptedMachine()):
        (problem,) = _problems("run.device=cuda", **tree)
    assert "needs bitsandbytes, which is not installed" in problem


def test_quantization_is_refused_where_others_would_hold_other_weights() -> None:
    tree: dict[str, Any] = {"run": {"device": "cuda"}, "ppo": {"lora": {"quantize": "nf4"}}}
    with_bitsandbytes = ScriptedMachine(packages=["bitsandbytes"])
    with on_machine(with_bitsandbytes):
        assert _problems(**tree) == []
        (problem,) = _problems("ppo.critic_deepspeed.zero_stage=3", **tree)
    assert "zero_stage 0, 1 or 2" in problem
    for setting in ("ppo.weight_sync.lora=adapter", "ppo.colocate=critic_reward"):
        with on_machine(with_bitsandbytes):
            (problem,) = _problems(setting, **tree)
        assert "needs ppo.weight_sync.lora=merged and ppo.colocate=pairs" in problem
        assert "got adapter and pairs" in problem or "got merged and critic_reward" in problem
