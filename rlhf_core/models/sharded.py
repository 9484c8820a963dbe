"""Load a pretrained model. With ZeRO-3, its parameters are sharded while they are read.

    safetensors -> one tensor in host memory -> conversions of transformers -> checks -> this rank's shard

The model is built on `meta`. transformers sets its parameters one after another, and each matrix is replaced
by its shard before the next one is read, so a rank holds its shards and two whole tensors at most. Vectors
(norms, biases, the score head) stay whole until DeepSpeed shards them. Every rank reads the files: the page
cache of the host serves all but the first, and no rank waits for another one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rlhf_core.config.address import is_hub_model
from rlhf_core.errors import ModelError
from rlhf_core.models.architectures import OTHER_MODEL
from rlhf_core.models.folder import ModelFolder, text_tensors

_COMPARED_ROWS = 4096
"""Rows of tied parameters that are read at a time."""


class Shards(Protocol):
    """Cuts parameters into shards. `engines.sharding` has the implementation."""

    def cut(self, parameter: nn.Parameter) -> None:
        """Replace the values of a parameter by the shard of this rank, in place."""

    def gathered_in_turn(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `model` can be called, on all ranks at the same time. At most one decoder
        layer is gathered at a time.
        """


def load_tensors(
    auto: Any,
    folder: Path | str,
    config: Any,
    shards: Shards | None = None,
    *,
    revision: str | None,
    dtype: torch.dtype,
    **options: Any,
) -> tuple[Any, dict[str, Any], list[str]]:
    """Load the tensors of the text model in `folder` into a model, whose parameters are sharded if `shards`
    is given.

    Args:
        auto: A class such as `AutoModelForCausalLM`.
        folder: Path or hub id.
        config: Result of `model_config`.
        shards: Cuts each matrix after it was read.
        revision: Revision of a hub model.
        dtype: Data type of the parameters.
        **options: Other arguments of `from_pretrained`.

    Returns:
        The model, the loading info of transformers, and the names of sharded parameters that are not finite.
    """
    if shards is not None and getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.path: {folder} is quantized (quantization_config), which ZeRO-3 cannot shard while it is"
            " loaded; give the model that it was made from, or set zero_stage=2"
        )
    local = local_folder(folder, revision)
    # A mapped file counts as address space of the process as a whole, but processes share its pages.
    backend = "pread"
    if shards is None:
        backend = "mmap"
    tensors = text_tensors(open_tensors(ModelFolder(local).weight_files(), backend))
    with ExitStack() as stack:
        not_finite: list[tuple[nn.Module, str]] = []
        if shards is not None:
            stack.enter_context(_one_tensor_at_a_time())
            not_finite = stack.enter_context(_cutting(shards, dtype))
        model, info = from_tensors(auto, folder, config, tensors, dtype=dtype, **options)
    refuse_different_ties(folder, model, tensors)
    # Without a path, transformers does not read this file.
    if model.can_generate() and (local / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(local)
    modules = {id(module): name for name, module in model.named_modules()}
    return model, info, [f"{modules.get(id(module), '?')}.{name}" for module, name in not_finite]


def from_tensors(
    auto: Any, folder: Path | str, config: Any, tensors: Mapping[str, Any], **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the model of `tensors`, and the loading info of transformers. Other arguments are as for
    `load_tensors`.
    """
    # The auto class itself needs a path.
    kind = auto._model_mapping.get(type(config), None)
    if kind is None:
        raise ModelError(
            f"model.path: {folder}: transformers has no {auto.__name__} of the type {config.model_type};"
            f" {OTHER_MODEL}"
        )
    model, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        attn_implementation=config._attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # all of them are reported together by the callers
        **options,
    )
    return model, info


def open_tensors(files: Sequence[Path], backend: str = "pread") -> dict[str, Any]:
    """Return the tensors of safetensors files by name. Their values are read when they are indexed."""
    opened: list[Any] = [safe_open(file, framework="pt", backend=backend) for file in files]
    return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118


def local_folder(folder: Path | str, revision: str | None) -> Path:
    """Return `folder`, or the copy of a hub model on this machine, which is downloaded if there is none."""
    if Path(folder).is_dir() or not is_hub_model(str(folder)):
        return Path(folder)
    from huggingface_hub import snapshot_download

    # No pickles, and not `consolidated.safetensors`, with which some repositories have all weights twice.
    patterns = ["*.json", "model*.safetensors"]
    return Path(snapshot_download(str(folder), revision=revision, allow_patterns=patterns))


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Let transformers read a tensor when it sets it. By default threads read all of them ahead."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _cutting(shards: Shards, dtype: torch.dtype) -> Iterator[list[tuple[nn.Module, str]]]:
    """Cut each matrix when transformers sets it after reading. Yields parameters that are not finite."""
    not_finite: list[tuple[nn.Module, str]] = []

    def on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        # Only values that were read have this mark. Others are empty, on `meta`, or initialized later.
        was_read = getattr(parameter, "_is_hf_initialized", False) and not parameter.is_meta
        # `ds_id`: tied parameters are registered once more, after they were cut.
        if not was_read or hasattr(parameter, "ds_id"):
            return
        # As DeepSpeed does with whole parameters. transformers keeps a few of them in float32.
        parameter.data = parameter.data.to(dtype)
        if not is_finite(parameter):
            not_finite.append((module, name))
        # Only a matrix has more elements than its longest axis. A score head, (1, hidden), has not.
        if parameter.numel() > max(parameter.shape, default=1):
            shards.cut(parameter)

    handle = register_module_parameter_registration_hook(on_registration)
    try:
        yield not_finite
    finally:
        handle.remove()


@torch.no_grad()
def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has neither NaN nor infinity. Integers, 8-bit floats and `meta` count as
    finite.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta or tensor.element_size() == 1:
        return True
    low, high = torch.aminmax(tensor)  # aminmax propagates NaN and allocates no tensor of this size
    return math.isfinite(low.item()) and math.isfinite(high.item())


def refuse_different_ties(folder: Path | str, model: Any, tensors: Mapping[str, Any]) -> None:
    """Raise ModelError if `tensors`, those of the files, have different values for tied parameters.

    transformers does not tie these, but vLLM does. In a sharded or an empty model it cannot compare them.
    """
    # Not `all_tied_weights_keys`, from which transformers has removed those that it found to be different.
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if target in tensors and source in tensors and not _equal(tensors[target], tensors[source]):
            raise ModelError(
                f"model.path: {folder}: config.json ties {target} to {source}, but the weights have different"
                " values for them; set tie_word_embeddings to false in config.json"
            )


def _equal(first: Any, second: Any) -> bool:
    shape = first.get_shape()
    if shape != second.get_shape() or not shape:
        return bool(shape == second.get_shape() and torch.equal(first[...], second[...]))
    # In blocks of rows, so that neither tensor is read as a whole. safetensors refuses an end after the last.
    starts = range(0, shape[0], _COMPARED_ROWS)
    blocks = [slice(start, min(start + _COMPARED_ROWS, shape[0])) for start in starts]
    return all(torch.equal(first[block], second[block]) for block in blocks)
