"""Adapters on tiny Llamas.

- only adapters and the score head are trained, in the decoder's linear layers or those that are named
- a new adapter changes no bit; switched off, a trained one leaves the model, head included, as it started
- merged weights in a model without adapters compute the same as the adapted model
- PEFT opens what is saved, for the policy on its base and for the score model with its head; same weights,
  same bytes
- a target that the decoder does not have is refused with the names that it has
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.training import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.adapters import WithoutAdapter, adapter_name, add_adapter, merged, save_adapter
from rlhf_core.models.batching import TokenBatch, TokenSequence, collate
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import load_score_model
from tests.support.tiny_llama import save_tiny_llama

LORA = LoraConfig(r=2, alpha=6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
    return save_tiny_llama(tmp_path_factory.mktemp("base"), **shape)


def _plain(kind: str, folder: Path) -> Any:
    torch.manual_seed(1)
    load = load_policy if kind == "policy" else load_score_model
    return load(folder, dtype="float32", attention="sdpa", device="cpu")


def _trained(kind: str, folder: Path) -> Any:
    """A model whose adapter and head have moved."""
    model = add_adapter(_plain(kind, folder), LORA)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.lm.named_parameters()}


def _batch() -> TokenBatch:
    return collate([TokenSequence.of((5, 6), (7, 8, 9)), TokenSequence.of((1,), (2, 3))], pad_id=0)


@torch.no_grad()
def _output(model: Any, kind: str) -> torch.Tensor:
    output: torch.Tensor = model(_batch()).logprobs_N if kind == "policy" else model(_batch(), "last")
    return output


@pytest.mark.parametrize("kind", ["policy", "score"])
def test_a_new_adapter_changes_no_bit_and_a_trained_one_switched_off_gives_the_start_back(
    base: Path, kind: str
) -> None:
    start = _output(_plain(kind, base), kind)
    assert torch.equal(_output(add_adapter(_plain(kind, base), LORA), kind), start)
    model = _trained(kind, base)
    assert (_output(model, kind) - start).abs().max() > 1e-3
    assert torch.equal(_output(WithoutAdapter(model), kind), start)
    assert (_output(model, kind) - start).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["policy", "score"])
def test_adapters_and_the_head_are_all_that_is_trained(base: Path, kind: str) -> None:
    model = add_adapter(_plain(kind, base), LORA)
    trained = {name for name, parameter in model.lm.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in _parameters(model) if adapter_name(name)}
    assert len(trained) == 2 * 7 * 2 + (kind == "score")


def test_only_the_named_layers_get_one(base: Path) -> None:
    model = add_adapter(_plain("policy", base), LoraConfig(r=2, targets=("q_proj", "v_proj")))
    names = [name for name in _parameters(model) if adapter_name(name)]
    assert len(names) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in names)


def test_a_target_that_the_decoder_does_not_have_is_refused(base: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no linear layer lm_head, query in its decoder; use some of down_proj, gate"
    ):
        add_adapter(_plain("policy", base), LoraConfig(targets=("query", "q_proj", "lm_head")))


@pytest.mark.parametrize("kind", ["policy", "score"])
def test_merged_weights_compute_what_the_adapted_model_computes(base: Path, kind: str) -> None:
    adapted, plain = _trained(kind, base), _plain(kind, base)
    weights = dict(merged(_parameters(adapted), adapted.lora))
    assert set(weights) == set(_parameters(plain))
    plain.lm.load_state_dict(weights)
    torch.testing.assert_close(_output(plain, kind), _output(adapted, kind), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["policy", "score"])
def test_peft_opens_a_saved_adapter(base: Path, kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    adapted, plain = _trained(kind, base), _plain(kind, base)
    tensors = {new: tensor for name, tensor in _parameters(adapted).items() if (new := adapter_name(name))}
    for folder in ("first", "second"):
        save_adapter(tmp_path / folder, adapted.lm, adapted.lora, tensors, base="somewhere/model")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    config = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somewhere/model"
    assert config["target_modules"] == sorted(config["target_modules"])
    opened = PeftModel.from_pretrained(plain.lm, tmp_path / "first")
    plain.lm = opened.base_model.model
    torch.testing.assert_close(_output(plain, kind), _output(adapted, kind), rtol=0, atol=1e-6)
