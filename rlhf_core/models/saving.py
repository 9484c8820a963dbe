"""Save a model in Hugging Face layout while its weights arrive, one decoder layer at a time.

The header of a safetensors file has the position of every tensor, so names, shapes and data types must be
known before the first value. Values are then written to their positions. The files have the bytes that
`save_pretrained` of transformers writes, except that the size of a file is limited to `FILE_SIZE`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlhf_core.system.heartbeat import heartbeat

FILE_SIZE = "10GB"
"""Maximum size of a file of weights. A larger model has several, and an index."""

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ORDER = list(_NAMES)
"""Data types in the order of the tensors in a file of safetensors."""


@dataclass(frozen=True)
class WeightStream:
    """The weights of a model, by decoder layer."""

    layout: list[dict[str, torch.Tensor]]
    """Names, shapes and data types of all groups, as tensors on `meta`."""
    groups: Iterator[Mapping[str, torch.Tensor]]
    """Values of the groups, in the same order. A group is valid until the next one is taken."""


def save_model(lm: Any, folder: Path, weights: WeightStream | None, file_size: str = FILE_SIZE) -> None:
    """Save `lm` with `weights`, of which at most one group is in host memory, or with its own, which must be
    whole.

    The configuration is that of a model with the data type of `weights`, without quantization. `file_size` is
    the maximum size of a file, such as "100MB".
    """
    if weights is None:
        lm.save_pretrained(folder)
        return
    from huggingface_hub import split_torch_state_dict_into_shards

    shell = unquantized(lm, next(tensor.dtype for group in weights.layout for tensor in group.values()))
    shell.save_pretrained(folder, state_dict={})  # configurations only
    layout: dict[str, torch.Tensor] = {}
    for group in weights.layout:
        layout |= as_in_checkpoint(shell, group)
    # As `save_pretrained` of transformers does, so that files and index have the same names and content.
    split = split_torch_state_dict_into_shards(
        layout, filename_pattern="model{suffix}.safetensors", max_shard_size=file_size
    )
    files = {}
    for file_name, names in split.filename_to_tensors.items():
        own = {name: layout[name] for name in names}
        files[file_name] = _SafetensorsFile(folder / file_name, own)
    try:
        for values in weights.groups:
            heartbeat("save the model")
            for name, tensor in as_in_checkpoint(shell, values).items():
                files[split.tensor_to_filename[name]].write(name, tensor)
        for file in files.values():
            file.finish()
    finally:
        for file in files.values():
            file.close()
    if split.is_sharded:
        total = sum(tensor.numel() for tensor in layout.values())
        index = {
            "metadata": {"total_parameters": total, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n"
        )


def unquantized(lm: Any, dtype: torch.dtype) -> Any:
    """Return `lm`, or an empty model of its architecture if it is quantized or has another data type.

    A quantized model would always save its 4-bit weights, and a model in another precision would write its
    own precision to `config.json`.
    """
    quantized = getattr(lm, "hf_quantizer", None) is not None
    if not quantized and lm.dtype == dtype:
        return lm
    # The model itself keeps its configuration, with its quantization.
    config = copy.deepcopy(lm.config)
    if quantized:
        del config.quantization_config
    with torch.device("meta"):
        shell = type(lm)(config).to(dtype)
    if hasattr(lm, "generation_config"):
        # `type(lm)(config)` makes a new one from the configuration, without what the folder had.
        shell.generation_config = lm.generation_config
    return shell


def as_in_checkpoint(lm: Any, group: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of whole layers as they are in a file of the model.

    Modules of transformers can have other names than the tensors of a file, and can hold several of them in
    one, such as all experts of a layer. The order is that of `save_pretrained`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = lm._keys_to_ignore_on_save or ()
    saved = {name: tensor for name, tensor in group.items() if name not in ignored}
    converted: dict[str, torch.Tensor] = revert_weight_conversion(lm, saved)
    return converted


class _SafetensorsFile:
    """A safetensors file whose tensors are written in any order."""

    def __init__(self, path: Path, layout: Mapping[str, torch.Tensor]) -> None:
        names = sorted(layout, key=lambda name: (_ORDER.index(layout[name].dtype), name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._positions: dict[str, tuple[int, int]] = {}
        end = 0
        for name in names:
            tensor = layout[name]
            start, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            self._positions[name] = (start, end)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # As safetensors does, so that the tensors begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = self._file.tell()
        self._file.truncate(self._start + end)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        start, end = self._positions.pop(name)
        # As bytes, because numpy has no bfloat16. A scalar needs an axis before it can be viewed as bytes.
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        assert values.nbytes == end - start
        self._file.seek(self._start + start)
        self._file.write(values.data)

    def finish(self) -> None:
        assert not self._positions, f"no values for {sorted(self._positions)}"
        self._file.flush()

    def close(self) -> None:
        self._file.close()
