"""What a model computes beyond plain causal attention and a plain head is not left out without a word.

- logits that are scaled (Granite, Cohere) or capped (Gemma 2) are those of the model's own forward pass; a
  field for it that the architecture ignores is refused
- a sliding window, or capped attention scores, end a forward pass that would need them, packed or not
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.errors import ModelError
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "head_dim": 16,
}


def save(folder: Path, kind: str, **changes: Any) -> Path:
    """A model whose weights are large enough for logits that a cap bends."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes}, initializer_range=0.5)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def load(folder: Path, attention: str = "sdpa") -> Any:
    return load_policy(folder, dtype="float32", attention=attention, device="cpu")


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_models_whose_logits_are_the_output_of_their_head_load(kind: str, tmp_path: Path) -> None:
    load(save(tmp_path, kind))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Gemma2", {"attn_logit_softcapping": None, "sliding_window": 64, "final_logit_softcapping": 5.0}),
        ("Granite", {"logits_scaling": 8.0}),
        ("Cohere", {"logit_scale": 0.0625}),
    ],
)
def test_logits_are_scaled_and_capped_as_the_model_does(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    policy = load(save(tmp_path, kind, **changes))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    own = policy.lm(input_ids=ids).logits[0].log_softmax(-1)
    plain = policy.lm.lm_head(policy.lm.model(input_ids=ids).last_hidden_state)[0].log_softmax(-1)
    labels, places = torch.tensor([6, 7, 8]), torch.arange(2, 5)
    batch = collate([TokenSequence.of((3, 4, 5), (6, 7, 8))], pad_id=0, pack=True)
    torch.testing.assert_close(policy(batch).logprobs_N, own[places, labels])
    assert (own - plain)[places, labels].abs().min() > 0.01, "the model's own operation matters"


def test_a_field_that_the_architecture_ignores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ignores a field of config"):
        load(save(tmp_path, "Llama", logits_scaling=8.0))


@pytest.mark.parametrize("pack", [True, False])
def test_a_window_ends_the_pass_that_is_longer_and_no_other(pack: bool, tmp_path: Path) -> None:
    policy = load(save(tmp_path, "Mistral", sliding_window=12))
    short = [TokenSequence.of((3, 4, 5), (6, 7, 8)) for _ in range(4)]
    policy(collate(short, pad_id=0, pack=pack))
    with pytest.raises(ModelError, match=r"window of 12 tokens.*got 13 tokens"):
        policy(collate([*short, TokenSequence.of(range(1, 7), range(7, 14))], pad_id=0, pack=pack))


def test_capped_attention_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"softcap 50.*model\.attention=eager"):
        load(save(tmp_path, "Gemma2", final_logit_softcapping=None))
