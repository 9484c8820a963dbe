"""Random Llamas of a few thousand parameters, for tests of what does not depend on what a model knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_tiny_llama(folder: Path, **shape: Any) -> Path:
    """Write one in Hugging Face layout, the same for the same `shape` (LlamaConfig's names); returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    defaults = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    LlamaForCausalLM(LlamaConfig(**{**defaults, **shape})).save_pretrained(folder)
    return folder
