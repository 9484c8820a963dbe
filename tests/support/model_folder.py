"""A minimal folder in the layout of a Hugging Face model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def safetensors(**tensors: list[int]) -> bytes:
    """Return a safetensors file of float32 zeros with these shapes. `__` in a name stands for a dot."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 4
        for axis in shape:
            size *= axis
        header[name.replace("__", ".")] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def model_folder(folder: Path, **changes: Any) -> Path:
    """Write a valid model folder.

    `changes` replaces files by name with bytes, a JSON value, or None to omit the file. `__` in a name stands
    for a dot.
    """
    files: dict[str, Any] = {
        "config.json": {
            "max_position_embeddings": 256,
            "vocab_size": 8,
            "hidden_size": 64,
            "num_attention_heads": 2,
        },
        "tokenizer.json": {
            "model": {"vocab": {"a": 0, "b": 1}},
            "added_tokens": [{"id": 7, "content": "</s>"}],
        },
        "tokenizer_config.json": {"chat_template": "{{ messages }}"},
        "model.safetensors": safetensors(model__embed_tokens__weight=[8, 64], model__norm__weight=[64]),
    }
    folder.mkdir(parents=True)
    for name, content in {
        **files,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }.items():
        if content is not None:
            (folder / name).write_bytes(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )
    return folder
