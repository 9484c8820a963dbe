"""Llama models whose outputs are known without running them, for tests of what uses their outputs.

Attention and MLP of their only layer add nothing, so the hidden state of a token depends on that token alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HIDDEN = 4


def save_unigram_policy(
    folder: Path, logits: Mapping[int, float], vocabulary: int, kind: str = "Llama"
) -> Path:
    """Write a causal model whose next token does not depend on the previous ones, and return `folder`.

    Args:
        folder: Is created.
        logits: Logit of each token. Other tokens have 0.
        vocabulary: Number of tokens.
        kind: Beginning of the names of its classes in transformers.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_shape(vocabulary))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        _pass_on(model.model)
        model.model.embed_tokens.weight.fill_(1.0)  # each hidden state is (1, 1, 1, 1)
        model.lm_head.weight.zero_()
        for token, logit in logits.items():
            model.lm_head.weight[token, 0] = logit
    model.save_pretrained(folder)
    return folder


def save_last_token_scorer(
    folder: Path, scores: Mapping[int, float], vocabulary: int, overflowing: Sequence[int] = ()
) -> Path:
    """Write a reward model whose score of a response is that of its last token, and return `folder`.

    Args:
        folder: Is created.
        scores: Score of each token. Other tokens have 0.
        vocabulary: Number of tokens.
        overflowing: Tokens whose score is NaN, although all weights are finite.
    """
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    model = LlamaForSequenceClassification(LlamaConfig(**_shape(vocabulary), num_labels=1))
    largest = max(map(abs, scores.values()), default=0.0) or 1.0
    with torch.no_grad():
        _pass_on(model.model)
        # A unit vector for each token. The last norm makes it `_HIDDEN ** 0.5` long.
        cosines = torch.zeros(vocabulary)
        for token, score in scores.items():
            cosines[token] = score / largest
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = cosines
        model.model.embed_tokens.weight[:, 1] = (1.0 - cosines.square()).sqrt()
        model.score.weight.zero_()
        model.score.weight[0, 0] = largest / _HIDDEN**0.5
        if overflowing:
            model.model.embed_tokens.weight[list(overflowing)] = torch.tensor([0.0, 0.0, 0.5**0.5, 0.5**0.5])
            model.score.weight[0, 2:] = torch.tensor([3e38, -3e38])  # infinity minus infinity
    model.save_pretrained(folder)
    return folder


def _shape(vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _pass_on(backbone: Any) -> None:
    """Make the layers add nothing to their inputs."""
    for layer in backbone.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
