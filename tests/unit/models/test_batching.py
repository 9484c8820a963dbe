"""Batching: layouts that agree.

- padded and packed layouts give the same log-probabilities, and no sequence sees another
- a copy to a GPU does not wait for it; on the CPU nothing is copied
- labels are the next tokens; an empty micro-batch is a dummy for ranks that must take part
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.models.attention import implementation
from rlhf_core.models.batching import TokenSequence, collate, to_device
from rlhf_core.models.policy import Policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
        attn_implementation=implementation("sdpa"),
    )
    return Policy(LlamaForCausalLM(config)).double().eval()


def _sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    g = torch.Generator().manual_seed(seed)
    return [
        TokenSequence.of(
            torch.randint(1, 50, (3 + i % 4,), generator=g).tolist(),
            torch.randint(1, 50, (2 + (5 * i) % 7,), generator=g).tolist(),
        )
        for i in range(count)
    ]


@torch.no_grad()
def test_padded_and_packed_rows_give_the_log_probabilities_of_each_sequence_alone(policy: Policy) -> None:
    sequences = _sequences(6)
    alone = torch.cat([policy(collate([s], pad_id=0)).logprobs_N for s in sequences])
    padded = policy(collate(sequences, pad_id=0)).logprobs_N
    packed = policy(collate(sequences, pad_id=0, pack=True)).logprobs_N
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_packed_neighbour_changes_nothing(policy: Policy) -> None:
    first, *others = _sequences(4)
    one = collate([first, others[0]], pad_id=0, pack=True)
    two = collate([first, others[1], others[2]], pad_id=0, pack=True)
    torch.testing.assert_close(one.split(policy(one).logprobs_N)[0], two.split(policy(two).logprobs_N)[0])


def test_labels_are_the_next_tokens_and_the_last_position_is_the_last_real_one() -> None:
    batch = collate([TokenSequence.of((5, 6), (7, 8)), TokenSequence.of((9,), (4,))], pad_id=0)
    # Row 0 is 5 6 7 8, row 1 is 9 4 0 0: targets 7 and 8 are predicted at 1 and 2, target 4 at 4.
    assert batch.select_N.tolist() == [1, 2, 4]
    assert batch.labels_N.tolist() == [7, 8, 4]
    assert batch.last_S.tolist() == [3, 5]
    assert batch.counts == (2, 1)


def test_a_masked_first_token_is_never_a_target() -> None:
    batch = collate([TokenSequence((3, 4), (1, 1))], pad_id=0)
    assert batch.labels_N.tolist() == [4]


def test_an_empty_micro_batch_is_a_dummy_without_targets() -> None:
    batch = collate([], pad_id=0)
    assert batch.input_ids_BL.shape == (1, 1)
    assert batch.labels_N.numel() == 0


def test_a_copy_to_a_gpu_does_not_wait_for_it() -> None:
    pinned = SimpleNamespace(to=lambda device, non_blocking: ("copy", str(device), non_blocking))
    tensor: Any = SimpleNamespace(is_cuda=False, pin_memory=lambda: pinned)
    assert to_device(tensor, torch.device("cuda", 0)) == ("copy", "cuda:0", True)
    on_gpu: Any = SimpleNamespace(is_cuda=True, to=lambda device: ("the same", device))
    assert to_device(on_gpu, "cuda:0") == ("the same", "cuda:0")
    here = torch.ones(2)
    assert to_device(here, "cpu") is here
