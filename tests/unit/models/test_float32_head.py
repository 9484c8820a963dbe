"""`model.head_dtype: float32`: the language-model head of a model in 16 bits.

- its log-probabilities are those of the unrounded logits of the same hidden states; a plain head's are not
- it trains: gradients of head and decoder are those of a plain head to bfloat16's rounding, in 16 bits
- a model in float32, and one where nothing is asked, has a plain head
- a head that is no linear layer is refused
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_core.errors import ModelError
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.linear import Float32Head, use_float32_head
from rlhf_core.models.policy import Policy, load_policy
from tests.support.tiny_llama import save_tiny_llama

BATCH = collate([TokenSequence.of((3, 4, 5), tuple(range(6, 40)))], pad_id=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), initializer_range=0.5, tie_word_embeddings=True)


def load(folder: Path, head_dtype: str, dtype: str = "bfloat16") -> Policy:
    return load_policy(folder, dtype=dtype, attention="sdpa", device="cpu", head_dtype=head_dtype)


@torch.no_grad()
def test_log_probabilities_are_those_of_unrounded_logits(folder: Path) -> None:
    found = {}
    for head in ("float32", "model"):
        policy = load(folder, head)
        hidden_LH = policy.lm.model(**BATCH.model_inputs("sdpa")).last_hidden_state[0]
        exact_NV = (hidden_LH.double() @ policy.lm.lm_head.weight.double().t())[BATCH.select_N]
        exact_N = exact_NV.log_softmax(-1).gather(1, BATCH.labels_N[:, None])[:, 0]
        found[head] = (policy(BATCH).logprobs_N - exact_N).abs().max().item()
    assert found["float32"] < 1e-5
    assert found["model"] > 1e-2


def test_it_trains_as_a_plain_head_does(folder: Path) -> None:
    gradients = {}
    for head in ("float32", "model"):
        policy = load(folder, head)
        policy(BATCH).logprobs_N.mean().backward()
        found = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        assert len(found) == len(list(policy.parameters()))
        assert {gradient.dtype for gradient in found} == {torch.bfloat16}
        gradients[head] = torch.cat([gradient.float().flatten() for gradient in found])
    assert torch.cosine_similarity(gradients["float32"], gradients["model"], dim=0) > 0.999
    assert not torch.equal(gradients["float32"], gradients["model"])


def test_only_a_model_in_16_bits_that_is_asked_for_it_has_one(folder: Path) -> None:
    kinds = [
        isinstance(load(folder, *given).lm.lm_head, Float32Head)
        for given in (("float32",), ("model",), ("float32", "float32"))
    ]
    assert kinds == [True, False, False]


def test_a_head_with_a_bias_adds_it() -> None:
    torch.manual_seed(0)
    head = nn.Linear(32, 50).bfloat16()
    x = torch.randn(2, 5, 32).bfloat16()
    exact = (x.double() @ head.weight.double().t() + head.bias.double()).float()
    model = SimpleNamespace(lm_head=head)
    logits = use_float32_head(model).lm_head(x)
    torch.testing.assert_close(logits, exact, rtol=1e-5, atol=1e-5)
    logits.sum().backward()
    assert head.bias.grad is not None
    assert head.bias.grad.tolist() == [10.0] * 50


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.head_dtype: float32 needs a head that is a linear layer"):
        use_float32_head(SimpleNamespace(lm_head=nn.Embedding(3, 4)))
