"""The shape of a model, from its `config.json`.

- parameters of all families that are known are counted as transformers counts them, biases and norms included
- those of an adapter as PEFT makes it; targets that do not exist are refused
- the shipped shapes have the published numbers of parameters
- other architectures, and models whose shape cannot be read, are refused with what to do
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
        (
            {**SMALL, "model_type": "mamba"},
            "model_type must be one of gemma, llama.*got mamba; `rlhf run` accepts",
        ),
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
