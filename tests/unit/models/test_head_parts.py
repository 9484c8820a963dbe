"""Logits that are made a few tokens at a time.

- log-probabilities, entropy and every gradient are those of all logits at once
- no more logits are kept for the backward pass than one part has; none where everything fits in one part
- ranks that share the head's weight make as many parts as the one with the most tokens
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_core.models.attention import implementation
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import Policy
from tests.support.two_ranks import as_rank_one

VOCABULARY = 53
TOKENS = 24
HIDDEN = 32


@pytest.fixture
def policy() -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(
        **shape, vocab_size=VOCABULARY, max_position_embeddings=64, attn_implementation=implementation("sdpa")
    )
    return Policy(LlamaForCausalLM(config)).double()


def batch() -> Any:
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, VOCABULARY, (12,), generator=g).tolist() for _ in range(3)]
    return collate([TokenSequence.of(row[:4], row[4:]) for row in rows], pad_id=0, pack=True)


def outcome(whole: Policy, chunk: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """(outputs and gradients by name, rows of each tensor of logits that was kept)"""
    policy = Policy(whole.lm, chunk)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (VOCABULARY,) and tensor.shape[0] != HIDDEN:  # not the weight
            kept.append(tensor.shape[0])
        return tensor

    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = policy(batch(), 0.7, with_entropy=True)
        assert output.entropy_N is not None
        weights = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
        (output.logprobs_N * weights + 0.1 * output.entropy_N).sum().backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return found | {"logprobs": output.logprobs_N.detach(), "entropy": output.entropy_N.detach()}, kept


@pytest.mark.parametrize("rows", [1, 5, 8, 23])
def test_parts_give_what_the_whole_gives(policy: Policy, rows: int) -> None:
    whole, kept = outcome(policy, 1 << 27)
    assert max(kept) == TOKENS
    parts, kept = outcome(policy, rows * VOCABULARY)
    assert max(kept, default=0) <= rows
    assert parts.keys() == whole.keys() and len(whole) > 5
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-12, atol=1e-12)


def test_ranks_that_share_the_weight_call_the_head_equally_often(policy: Policy) -> None:
    whole, _ = outcome(policy, 1 << 27)
    calls: list[int] = []
    policy.lm.lm_head.register_forward_hook(lambda _module, inputs, _output: calls.append(len(inputs[0])))
    policy.lm.lm_head.weight.ds_id = 0  # as ZeRO-3 marks what it shards
    with as_rank_one(lambda: dist.all_reduce(torch.tensor(5), dist.ReduceOp.MAX)):
        parts, _ = outcome(policy, 8 * VOCABULARY)
    assert calls[:5] == [8, 8, 8, 0, 0]
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-12, atol=1e-12)
