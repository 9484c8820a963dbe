"""Llama models with a few thousand random parameters, for tests that do not need a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_tiny_llama(folder: Path, seed: int = 0, **shape: Any) -> Path:
    """Write a model in Hugging Face layout and return `folder`.

    The weights depend only on `seed` and `shape` (fields of LlamaConfig). With `eos_token_id=None` a response
    always has the maximum length.
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
        # save_pretrained omits None, and loading would then use the default of LlamaConfig.
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": []}))
    return folder


def save_tiny_benchmark_model(folder: Path, positions: int = 256) -> Path:
    """Write a model of one small layer in place of that of `tests.benchmarks.ppo_iteration.make_model`."""
    return save_tiny_llama(
        folder,
        num_hidden_layers=1,
        vocab_size=2048,
        max_position_embeddings=positions,
        eos_token_id=None,
        bos_token_id=1,
        dtype="float32",
    )
