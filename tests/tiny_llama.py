"""Random Llamas of a few thousand parameters, for tests of what does not depend on what a model knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_tiny_llama(folder: Path, seed: int = 0, **shape: Any) -> Path:
    """Write one in Hugging Face layout, the same for the same `seed` and `shape` (LlamaConfig's names);
    returns `folder`.

    With `eos_token_id=None` nothing ends a response before its full length.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
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
    if shape.get("eos_token_id", 0) is None:
        # Left out of the file, it would be LlamaConfig's default again.
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"eos_token_id": []}))
    return folder
