"""A small model with the architecture, tokenizer and attention pattern of a large one, and random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rlhf_core.errors import InputError
from rlhf_core.models.weights import model_config

_HEAD = 32
"""Width of an attention head: the smallest that vLLM has on the CPU."""
_MOST_GROUPED = 8
"""Query heads of one key-value head, at most."""
_EXPERT = 64
"""Width of an expert."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def shrink(source: Path, out: Path, seed: int) -> str:
    """Write a small model in the place of a large one, and say how it differs.

    Only depth and width are less. A kind of layer, such as one with a sliding window, occurs at least once.

    Args:
        source: Folder with `config.json` and a tokenizer. Its weights are not read.
        out: Is created.
        seed: Seed of the random weights.

    Raises:
        InputError: `source` has no `config.json`, or no model of this shape can be made.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if not (source / "config.json").is_file():
        raise InputError(
            f"--model: {source} has no config.json; give a folder with config.json and tokenizer.json"
        )
    try:
        config = model_config(source, attention="sdpa")
        before = (config.num_hidden_layers, config.hidden_size)
        _make_small(config)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None))
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"--model: no small model can be made of {source}/config.json: {type(error).__name__}:"
            f" {str(error)[:200]}; give a folder of the same architecture that is small already"
        ) from error
    model.save_pretrained(out)
    for file in source.iterdir():
        is_weights = file.name.endswith(_WEIGHTS) or file.name == "config.json"
        if file.is_file() and not is_weights and not (out / file.name).exists():
            shutil.copy(file, out)
    after = (config.num_hidden_layers, config.hidden_size)
    return f"{after[0]} of {before[0]} layers, width {after[1]} in place of {before[1]}, random weights"


def _make_small(config: Any) -> None:
    """Reduce depth and width of a configuration of transformers, in place."""
    heads = config.num_attention_heads
    groups = max(1, heads // (getattr(config, "num_key_value_heads", None) or heads))
    kv_heads = 1 if groups > 1 else 2
    heads_now = kv_heads * min(groups, _MOST_GROUPED)
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not _fixes_head(config):
        head = min(head, _HEAD)
    layers = config.num_hidden_layers
    kept = min(layers, max(2, _with_every_kind(getattr(config, "layer_types", None) or [])))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:kept])  # one entry for each layer
    smaller = {
        "num_hidden_layers": kept,
        "num_attention_heads": heads_now,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_size": heads_now * head,
        "intermediate_size": 2 * heads_now * head,
        "moe_intermediate_size": _EXPERT,
        "shared_expert_intermediate_size": _EXPERT,
    }
    for name, value in smaller.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)


def _fixes_head(config: Any) -> bool:
    """Return whether the positions have one number for each part of a head, as those of type longrope."""
    rope = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, list) for value in rope.values())


def _with_every_kind(kinds: list[str]) -> int:
    """Return the number of layers from the first on that have one of each kind."""
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
