"""The shape of a model, from its `config.json`.

- parameters are counted as transformers counts them: of some families exactly, biases and norms included, and
  of others up to small parts; experts, linear attention and the text part of multimodal models are counted
- sizes that a config.json leaves out are the defaults of its class
- those of an adapter as PEFT makes it; targets that do not exist are refused
- the shipped shapes have the published numbers of parameters
- models whose shape cannot be read are refused with what to do
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape
from tests.support.demo_data import config_with_demo_data as config_from_tree

SHAPES = Path(__file__).resolve().parents[3] / "deployments" / "configs" / "shapes"
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def transformers_model(family: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def read(model: Any, tmp_path: Path) -> ModelShape:
    model.config.save_pretrained(tmp_path)
    return base_model_shape(config_from_tree({"model": {"path": str(tmp_path)}}, "test"))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("gemma", {"head_dim": 32}),
    ],
)
def test_parameters_are_counted_as_transformers_does(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = transformers_model(family, settings)
    assert read(model, tmp_path).parameters == sum(p.numel() for p in model.parameters())


WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 5000, "head_dim": 64,
    "num_attention_heads": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SHARED = {"shared_expert_intermediate_size": 128}
GATED_DELTA = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EVERY_SECOND = {"intermediate_size_mlp": 2048, "num_local_experts": 8, "interleave_moe_layer_step": 2}
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 5000, "global_head_dim": 64}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3_text", {}),
        ("gemma4_text", PER_LAYER),
        (
            "llama4_text",
            {"intermediate_size_mlp": 2048, "num_local_experts": 8, "interleave_moe_layer_step": 2},
        ),
        ("gpt_oss", {"num_local_experts": 8}),
        ("mixtral", {"num_local_experts": 8}),
        ("qwen3_moe", EXPERTS),
        ("qwen2_moe", EXPERTS | SHARED),
        ("qwen3_5_text", GATED_DELTA),
        ("qwen3_5_moe_text", EXPERTS | SHARED | GATED_DELTA),
        ("olmo2", {}),
        ("phi3", {}),
    ],
)
def test_parameters_of_any_decoder_are_counted_up_to_small_parts(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = transformers_model(family, WIDE | settings)
    expected = sum(p.numel() for p in model.parameters())
    assert read(model, tmp_path).parameters == pytest.approx(expected, rel=0.005)


def test_a_token_has_a_part_of_the_experts(tmp_path: Path) -> None:
    shape = read(transformers_model("qwen3_moe", WIDE | EXPERTS), tmp_path)
    # 6 of 8 experts in each of 4 layers, with three matrices of 512 x 256.
    assert shape.parameters - shape.active_parameters == 6 * 4 * 3 * 512 * 256
    assert shape.intermediate == 2 * 256
    assert "gate_proj" not in shape.linear_layers


def test_only_layers_with_attention_have_a_cache(tmp_path: Path) -> None:
    shape = read(transformers_model("qwen3_5_text", WIDE | GATED_DELTA), tmp_path)
    assert (shape.layers, shape.cached_layers) == (4, 2)
    assert {"q_proj", "in_proj_qkv", "gate_proj"} <= set(shape.linear_layers)


def test_sizes_of_a_text_part_that_are_left_out_are_the_defaults_of_its_class(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    # As in the file of Gemma 3 4B: neither heads nor vocabulary.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    shape, default = base_model_shape(PipelineConfig(), file), Gemma3TextConfig()
    assert (shape.heads, shape.vocabulary) == (default.num_attention_heads, default.vocab_size)
    assert (shape.hidden, shape.layers, shape.tied) == (2560, 34, True)


def test_a_score_model_has_one_output_in_place_of_the_vocabulary(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    classifier = LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=1))
    assert read(classifier, tmp_path).score_parameters == sum(p.numel() for p in classifier.parameters())


@pytest.mark.parametrize("targets", [None, ("q_proj", "v_proj")])
def test_an_adapter_is_counted_as_peft_makes_it(targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    from rlhf_core.config.training import LoraConfig
    from rlhf_core.models.adapters import add_adapter
    from rlhf_core.models.policy import Policy

    model = transformers_model("llama", {})
    shape = read(model, tmp_path)
    add_adapter(Policy(model), LoraConfig(r=4, targets=targets))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.adapter_parameters(4, targets) == trained
    with pytest.raises(ModelError, match=r"lora\.targets: must be some of q_proj.*got c_attn"):
        shape.adapter_parameters(4, ("q_proj", "c_attn"))


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3-8b", 8_030_261_248), ("mistral-7b", 7_241_732_096)]
)
def test_the_shipped_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert base_model_shape(PipelineConfig(), SHAPES / f"{name}.json").parameters == parameters


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"d_model": 512}, "hidden_size.*must be integers"),
        ({**SMALL, "model_type": "unknown", "vocab_size": None}, "config.json: vocab_size must be integers"),
        ([1], "is no JSON object"),
    ],
)
def test_a_config_json_that_cannot_be_counted_is_refused(content: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=words):
        base_model_shape(PipelineConfig(), file)


def test_a_model_on_the_hub_that_is_not_on_this_machine_needs_a_config_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"give --model-config with a copy of its config\.json"):
        base_model_shape(
            config_from_tree({"model": {"path": "nobody/nothing-at-all"}}, "test"), local_only=True
        )
