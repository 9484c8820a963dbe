"""Files of a model whose weights arrive one decoder layer at a time.

- they have the bytes that transformers writes, in every precision, with experts and tied embeddings
- a large model has several files and an index, and is loaded with the same weights
- a tensor without values is an error
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.models.policy import load_policy
from rlhf_core.models.saving import WeightStream, save_model
from rlhf_core.models.weights import check_headers
from tests.support.tiny_llama import save_tiny_llama
from tests.support.weight_streams import stream_of


def stream(lm: Any, dtype: torch.dtype | None = None) -> WeightStream:
    """Return the weights of `lm` in two groups, layers in the wrong order."""
    tensors = [(name, p.detach().to(dtype or p.dtype)) for name, p in lm.named_parameters()]
    return stream_of(dict(tensors[5:]), dict(tensors[:5]))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_files_are_those_of_transformers(dtype: str, tied: bool, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "start", tie_word_embeddings=tied)
    lm = load_policy(tmp_path / "start", dtype=dtype, attention="sdpa", device="cpu").lm
    lm.save_pretrained(tmp_path / "expected")
    save_model(lm, tmp_path / "saved", stream(lm))
    assert files(tmp_path / "saved") == files(tmp_path / "expected")


def test_another_precision_is_that_of_the_configuration(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "start")
    lm = load_policy(tmp_path / "start", dtype="bfloat16", attention="sdpa", device="cpu").lm
    save_model(lm, tmp_path / "saved", stream(lm, torch.float32))
    lm.float().save_pretrained(tmp_path / "expected")
    assert files(tmp_path / "saved") == files(tmp_path / "expected")


def test_experts_are_separate_tensors_again(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 101}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path / "start")
    lm = load_policy(tmp_path / "start", dtype="float32", attention="sdpa", device="cpu").lm
    lm.save_pretrained(tmp_path / "expected")
    tensors = list(lm.named_parameters())
    layers = [[(name, p) for name, p in tensors if f"layers.{layer}." in name] for layer in range(2)]
    others = [(name, p) for name, p in tensors if "layers." not in name]
    save_model(lm, tmp_path / "saved", stream_of(*map(dict, layers), dict(others)))
    assert files(tmp_path / "saved") == files(tmp_path / "expected")
    assert b"experts.1.w2.weight" in files(tmp_path / "saved")["model.safetensors"]


def test_a_large_model_has_several_files(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "start")
    lm = load_policy(tmp_path / "start", dtype="float32", attention="sdpa", device="cpu").lm
    save_model(lm, tmp_path / "saved", stream_of(dict(lm.named_parameters())), "100KB")
    lm.save_pretrained(tmp_path / "expected", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("model-0000*.safetensors"))) > 1
    assert files(tmp_path / "saved") == files(tmp_path / "expected")
    check_headers(tmp_path / "saved", attention="sdpa")
    again = load_policy(tmp_path / "saved", dtype="float32", attention="sdpa", device="cpu").lm
    assert all(
        torch.equal(a, b) for a, b in zip(lm.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "start")
    lm = load_policy(tmp_path / "start", dtype="float32", attention="sdpa", device="cpu").lm
    whole = stream(lm)
    with pytest.raises(AssertionError, match="no values for"):
        save_model(lm, tmp_path / "saved", WeightStream(whole.layout, iter([next(whole.groups)])))
