"""Attention of packed rows on a GPU; torch's kernel is scripted here, with its real signature.

- a row is one call for each layer, and gives what a call for each sequence gives, with grouped heads too
- the signature of the kernel is read once
- the kernel is not used on the CPU, in float32, and for heads that it does not support
- flash attention gets the borders, so that transformers derives nothing from the positions
- heads of keys that were repeated give the same as groups of heads
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from rlhf_core.models import attention
from rlhf_core.models.attention import implementation
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import Policy

BATCH = collate([TokenSequence.of((1, 2), tuple(range(3, 3 + n))) for n in (4, 4, 9, 1)], pad_id=0, pack=True)
LAYERS = 2
REAL = inspect.signature(torch_varlen.varlen_attn)


@pytest.fixture(scope="module")
def policy() -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
        attn_implementation=implementation("sdpa"),
    )
    return Policy(LlamaForCausalLM(config)).double().eval()


class Kernel:
    """A kernel that counts how often its signature is read."""

    def __init__(self, compute: Any, signature: inspect.Signature) -> None:
        self._compute, self._signature = compute, signature
        self.read = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        self.read += 1
        return self._signature


def kernel(calls: list[dict[str, Any]], *, old: bool) -> Any:
    """Return a kernel that computes one sequence after the other. The old one has no `enable_gqa`."""

    def compute(*given: Any, scale: Any = None, window_size: Any = (-1, -1), **options: Any) -> torch.Tensor:
        REAL.bind(*given, scale=scale, window_size=window_size, **options)
        query, key, value, cu_seq_q, _cu_seq_k, longest, _longest = given
        calls.append({"borders": cu_seq_q, "longest": longest, "window": window_size, **options})
        outputs = []
        for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            rows = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            outputs.append(rows.transpose(0, 1))
        return torch.cat(outputs)

    if not old:
        return lambda *args, enable_gqa=False, **kwargs: compute(*args, enable_gqa=enable_gqa, **kwargs)
    return compute


@pytest.mark.parametrize("old", [False, True])
@torch.no_grad()
def test_a_packed_row_is_one_call_for_each_layer(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    expected_N = policy(BATCH).logprobs_N
    calls: list[dict[str, Any]] = []
    names = [name for name in REAL.parameters if not old or name != "enable_gqa"]
    signature = REAL.replace(parameters=[REAL.parameters[name] for name in names])
    scripted = Kernel(kernel(calls, old=old), signature)
    monkeypatch.setattr(torch_varlen, "varlen_attn", scripted)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value: True)
    torch.testing.assert_close(policy(BATCH).logprobs_N, expected_N, rtol=0, atol=1e-9)
    assert (len(calls), scripted.read) == (LAYERS, 1)
    assert calls[0]["borders"].tolist() == [0, 6, 12, 23, 26]
    assert calls[0]["borders"].dtype == torch.int32
    assert (calls[0]["longest"], calls[0]["window"]) == (11, (-1, 0))
    assert calls[0].get("enable_gqa") is (None if old else True)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, True),
        ({"is_cuda": False}, False),
        ({"dtype": torch.float32}, False),
        ({"shape": (1, 4, 9, 20)}, False),
        ({"shape": (1, 4, 9, 512)}, False),
        ({"shape": (1, 4, 9, 192)}, False),  # larger than the values, as in DeepSeek-V3
    ],
)
def test_the_kernel_is_used_where_it_computes(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], used: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query: Any = SimpleNamespace(
        **{"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 4, 9, 64), "device": "cuda", **changes}
    )
    value: Any = SimpleNamespace(shape=(1, 4, 9, 128 if query.shape[-1] == 192 else query.shape[-1]))
    assert attention.has_varlen_kernel(query, value) is used


def test_flash_attention_gets_the_borders() -> None:
    inputs = BATCH.model_inputs("flash_attention_2")
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 6, 12, 23, 26]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 11
    padded = collate([TokenSequence.of((1,), (2, 3))], pad_id=0)
    assert "cu_seq_lens_q" not in padded.model_inputs("flash_attention_2")
    assert "cu_seq_lens_q" not in BATCH.model_inputs("eager")


def test_repeated_heads_of_keys_give_the_same_as_groups() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    groups = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    module, keys, values = attention._expanded(groups, query, key, value)
    assert keys.shape[1] == 4 and not hasattr(module, "num_key_value_groups")
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(query, keys, values, is_causal=True), expected)
