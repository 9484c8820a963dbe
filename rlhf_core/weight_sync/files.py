"""Weights of model folders, for an engine that samples several models one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from rlhf_core.models.folder import ModelFolder
from rlhf_core.weight_sync.wire import tensor_checksum


def folder_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and values of each tensor of a model folder. One at a time is in memory."""
    for file in ModelFolder(folder).weight_files():
        # "pread", as in models.sharded: a mapped file counts as memory of the process as a whole.
        with safe_open(file, framework="pt", backend="pread") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def folder_checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each tensor of a model folder by name."""
    return {name: tensor_checksum(tensor) for name, tensor in folder_tensors(folder)}


def are_interchangeable(one: Path, other: Path) -> bool:
    """Return whether an engine of the model in `one` can get the weights of the model in `other`.

    Their configurations must be equal, and so must names, types and shapes of their tensors. Weights that are
    quantized in the files are never replaced.
    """
    folders = [ModelFolder(one), ModelFolder(other)]
    if not all(folder.has_config for folder in folders):
        return False
    configs = [folder.config for folder in folders]
    if configs[0] != configs[1] or "quantization_config" in configs[0]:
        return False
    tensors = [
        {name: (entry["dtype"], entry["shape"]) for name, entry in folder.tensors.items()}
        for folder in folders
    ]
    return tensors[0] == tensors[1] and len(tensors[0]) > 0
