"""Shapes of public models, so that `rlhf plan` needs no download.

Each is the part of the model's `config.json` on the Hugging Face hub that `models.shape` reads. The tests
compare the number of parameters with that of the published weights.
"""

from __future__ import annotations

from typing import Any

from rlhf_core.models.shape import ModelShape, shape_from_config


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 152064,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }


_CONFIGS = {
    "meta-llama/Meta-Llama-3-8B": _llama(4096, 14336, 32, 32),
    "meta-llama/Meta-Llama-3-70B": _llama(8192, 28672, 80, 64),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8),
    "Qwen/Qwen2.5-72B": _qwen2(8192, 29568, 80, 64, 8),
    "Qwen/Qwen3-0.6B-Base": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B-Base": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B-Base": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B-Base": _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-14B-Base": _qwen3(5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64),
}
"""Configurations by the id on the hub. The files are at https://huggingface.co/<id>/blob/main/config.json."""

NAMES = tuple(_CONFIGS)


def known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model by its id on the hub, with or without the owner, in any case."""
    wanted = name.lower()
    for known, settings in _CONFIGS.items():
        names = {known.lower(), known.partition("/")[2].lower()}
        if wanted in names | {each.removesuffix("-base").removeprefix("meta-") for each in names}:
            return shape_from_config(settings)
    return None
