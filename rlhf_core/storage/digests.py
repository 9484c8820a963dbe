"""Digests of models."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlhf_core.errors import ModelError
from rlhf_core.storage.bundles import hash_file


def weights_sha256(folder: Path) -> str:
    """sha256 of a model's weights: that of its one `*.safetensors` file, or over `name:sha256` of all,
    sorted.

    Raises ModelError if there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} has no .safetensors file; a model folder must have its weights in that format."
        )
    if len(files) == 1:
        return hash_file(files[0])
    lines = "".join(f"{path.name}:{hash_file(path)}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()
