"""Frozen weights in 4 bits.

- a quantized model saves the whole weights that it is given, and no trace of its 4 bits
- without bitsandbytes the message says what is missing
- where bitsandbytes runs: the merged model, loaded as it was saved, gives what quantized base and adapter
  give
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.adapters import add_adapter, merged
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy
from rlhf_core.models.saving import save_model
from rlhf_core.models.weights import dequantized, loading_options, shape
from tests.support.scripted_machine import ScriptedMachine, on_machine
from tests.support.weight_streams import stream_of

LOADING: Any = {"dtype": "float32", "attention": "eager", "device": "cpu"}


def _lm(seed: int, kind: Any = LlamaForCausalLM) -> Any:
    torch.manual_seed(seed)
    return kind(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=40,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            num_labels=1,
        )
    )


@pytest.mark.parametrize("kind", [LlamaForCausalLM, LlamaForSequenceClassification])
def test_a_quantized_model_saves_the_weights_that_it_is_given(kind: Any, tmp_path: Path) -> None:
    lm, given = _lm(0, kind), {name: p.detach() for name, p in _lm(1, kind).named_parameters()}
    lm.hf_quantizer = object()
    lm.config.quantization_config = {"quant_method": "bitsandbytes"}
    save_model(lm, tmp_path, stream_of(given))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    opened = kind.from_pretrained(tmp_path)
    assert dict(opened.named_parameters()).keys() == given.keys()
    assert all(torch.equal(p, given[name]) for name, p in opened.named_parameters())


def test_without_bitsandbytes_the_message_names_it() -> None:
    assert loading_options(None, torch.float32, "cpu") == {}
    with on_machine(ScriptedMachine()), pytest.raises(ModelError, match="needs bitsandbytes; install it"):
        loading_options("nf4", torch.float32, "cpu")


@torch.no_grad()
def test_the_merged_model_gives_what_quantized_base_and_adapter_give(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not part of the CPU set")
    _lm(0).save_pretrained(tmp_path / "base")
    batch = collate([TokenSequence.of((1, 5, 9), (7, 3, 2))], pad_id=0)
    plain = load_policy(tmp_path / "base", **LOADING)(batch).logprobs_N
    model = load_policy(tmp_path / "base", **LOADING, quantize="nf4").train()  # as it is trained and scored
    assert (model(batch).logprobs_N - plain).abs().max() > 1e-3
    add_adapter(model, LoraConfig(r=4, alpha=8))
    for name, parameter in model.lm.named_parameters():
        if ".lora_B" in name:
            parameter.normal_(std=0.1)
    trained = model(batch).logprobs_N
    assert torch.equal(model.eval()(batch).logprobs_N, trained), "evaluation computes with other weights"
    named = dict(model.lm.named_parameters())
    weights = dict(merged({name: dequantized(p) for name, p in named.items()}, model.lora))
    layer = "model.layers.1.mlp.up_proj"
    assert shape(named[f"{layer}.base_layer.weight"]) == tuple(weights[f"{layer}.weight"].shape) == (128, 64)
    model.save(tmp_path / "merged", stream_of(weights))
    opened = load_policy(tmp_path / "merged", **LOADING)
    torch.testing.assert_close(opened(batch).logprobs_N, model(batch).logprobs_N, atol=1e-5, rtol=0)
