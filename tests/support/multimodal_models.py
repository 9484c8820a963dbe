"""Small multimodal models with random weights, in the layout that their families have on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
_GATED_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 1, "out_hidden_size": 64, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64,
    "patch_size": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _TEXT | _WINDOWS,
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _TEXT
        | _WINDOWS
        | {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256},
        "vision_config": _TOWER | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
        "audio_config": None,
    },
    "llama4": {
        "text_config": _TEXT
        | {"intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 128}
        | {"interleave_moe_layer_step": 2},
        "vision_config": _TOWER
        | {"intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64}
        | {"projector_output_dim": 64},
    },
    "qwen3_5": {"text_config": _TEXT | _GATED_DELTA, "vision_config": _QWEN_TOWER},
    "qwen3_5_moe": {"text_config": _TEXT | _GATED_DELTA | _EXPERTS, "vision_config": _QWEN_TOWER},
}
"""Values of the configuration, by model type."""


def save_multimodal(family: str, folder: Path, **changes: Any) -> Any:
    """Save a model of `FAMILIES` in `folder` and return it, in evaluation mode. `changes` are other values of
    its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family], **changes)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model
