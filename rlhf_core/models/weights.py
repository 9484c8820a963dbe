"""Loading of pretrained models with validation of all weights.

`from_pretrained` gives random values to tensors that are missing in the files and ignores tensors that the
model does not have. In both cases it only logs a message. Here, both are errors. Integer weights and values
that are not finite are refused as well. An attention implementation in `config.json` is replaced by the
configured one.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_core.errors import InfrastructureError, ModelError, OutOfMemory, RLHFError, classified
from rlhf_core.models.attention import implementation
from rlhf_core.models.folder import ModelFolder, text_tensors
from rlhf_core.models.shape import text_settings
from rlhf_core.models.sharded import (
    Shards,
    from_tensors,
    is_finite,
    load_tensors,
    local_folder,
    open_tensors,
    refuse_different_ties,
)
from rlhf_core.system.machine import machine

log = logging.getLogger(__name__)

FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Data types of safetensors from which a model can be trained."""

_OF_ANOTHER_HEAD = ("lm_head.weight", "lm_head.bias")
"""Tensors of a causal language model that a score model created from it does not use."""

_OF_THE_MACHINE = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT)
"""Errors of a disk, a network file system or the process limits. The files of the model can be valid."""


@contextmanager
def model_errors(folder: Path | str) -> Iterator[None]:
    """Convert exceptions in this context to ModelError, because they are caused by the model's files.

    Invalid files can raise KeyError, TypeError, RuntimeError and validation errors of libraries. Errors of
    the memory and the GPU are raised unchanged. Errors of the disk and the network become
    InfrastructureError. No other rank takes part in this context, so a RuntimeError does not come from a
    collective operation.
    """
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        # cuBLAS raises a plain RuntimeError, whose text begins with `CUDA error`.
        of_a_gpu = isinstance(error, torch.AcceleratorError) or "CUDA" in str(error)
        if of_a_gpu or isinstance(classified(error), OutOfMemory):
            raise
        kind: type[RLHFError] = ModelError
        # The cause, because transformers raises an OSError of its own for errors of files and the network.
        if _of_the_machine(error) or _of_the_machine(error.__cause__):
            kind = InfrastructureError
        raise kind(
            f"model.path: cannot load a model from {folder}: {type(error).__name__}: {error}"
        ) from error


def _of_the_machine(error: BaseException | None) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno in _OF_THE_MACHINE


def load_pretrained(
    auto: Any,
    folder: Path | str,
    config: Any,
    *,
    revision: str | None = None,
    new: tuple[str, ...] = (),
    shards: Shards | None = None,
    **options: Any,
) -> Any:
    """Load a model, and check the names, shapes and data types of its weights.

    Args:
        auto: A class with `from_pretrained`.
        folder: A model folder, or a hub id.
        config: The result of `model_config`.
        revision: Commit or branch of a hub id.
        new: Tensors that may be missing in the files because the caller creates them. A language-model head
            in the files is then ignored.
        shards: Cuts matrices while they are read (`models.sharded`). Whether values are finite is then
            checked here, because no rank sees all of them later.
        **options: Other arguments of `from_pretrained`.

    Raises:
        ModelError: For all problems of the model.
    """
    with model_errors(folder):
        model, info, not_finite = load_tensors(auto, folder, config, shards, revision=revision, **options)
        refuse(folder, info, new=new)
        refuse_integers(folder, model)
        if shards is not None:
            refuse_non_finite(folder, model, not_finite)
        keep_weight_layout(model)
    return model


@contextmanager
def self_test_context(folder: Path | str, model: Any, shards: Shards | None) -> Iterator[None]:
    """Return a context in which a loaded model, sharded or not, can be called."""
    if shards is not None:
        # Without `model_errors`: a RuntimeError can be that of a collective operation.
        with shards.gathered_in_turn(model):
            yield
    else:
        with model_errors(folder):
            yield


def left_out(folder: Path | str, revision: str | None = None) -> dict[str, float]:
    """Return `left_out_tensors` and `left_out_mib` of the tensors in the files of a base model that are not
    of its text model, and log what they are. Empty if there are none.
    """
    with model_errors(folder):
        entries = ModelFolder(local_folder(folder, revision)).left_out
    if not entries:
        return {}
    parts = sorted({name.removeprefix("model.").partition(".")[0] for name in entries})
    size = 0
    for entry in entries.values():
        size += math.prod(entry["shape"]) * FLOATING.get(entry["dtype"], torch.uint8).itemsize
    log.warning(
        "only the text part of %s is trained and served; %s (%d tensors, %.1f MiB) are left out",
        folder, ", ".join(parts), len(entries), size / 2**20,
    )  # fmt: skip
    return {"left_out_tensors": float(len(entries)), "left_out_mib": size / 2**20}


def check_headers(folder: Path, *, attention: str) -> None:
    """Raise ModelError if names, shapes or data types of the weights in `folder` do not match its
    config.json.

    Only headers are read and no memory is allocated: transformers loads empty tensors into an empty model.
    Values are read only of tied tensors that the files have twice, to compare them.
    Models with a quantization in their configuration are checked only when they are loaded.
    """
    from transformers import AutoModelForCausalLM

    with model_errors(folder):
        config = model_config(folder, attention=attention)
        if getattr(config, "quantization_config", None) is not None:
            return
        entries = ModelFolder(folder).tensors
        if not entries:
            return  # the caller handles a folder without weights
        empty = {}
        for name, entry in entries.items():
            # Other types are refused below, from the headers. Here any type does.
            dtype = FLOATING.get(entry["dtype"], torch.float32)
            empty[name] = torch.empty(entry["shape"], dtype=dtype, device="meta")
        options = {"dtype": torch.float32, "device_map": {"": "meta"}}
        model, info = from_tensors(AutoModelForCausalLM, folder, config, empty, **options)
        refuse(folder, info)
        refuse_integers(folder, model)
        tensors = open_tensors(ModelFolder(folder).weight_files())
        refuse_different_ties(folder, model, text_tensors(tensors))


def model_config(folder: Path | str, *, attention: str, revision: str | None = None, **changes: Any) -> Any:
    """Return the `config.json` of `folder`, or its part for the text model, without dropout and with the
    configured attention implementation.

    Args:
        folder: A model folder, or a hub id.
        attention: `model.attention`.
        revision: Commit or branch of a hub id.
        **changes: Other values of fields.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if Path(folder).is_dir() and (Path(folder) / "adapter_config.json").exists():
        raise ModelError(
            f"model.path: {folder} holds an adapter (adapter_config.json); it would be loaded over the"
            " weights; merge it into the model and give that folder"
        )
    config = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=False)
    if hasattr(config, "text_config"):
        settings = text_settings(PreTrainedConfig.get_config_dict(folder, revision=revision)[0])
        config = config.text_config
        config.tie_word_embeddings = settings.get("tie_word_embeddings", config.tie_word_embeddings)
    config.update(changes)
    # A name such as owner/kernel would be downloaded from the hub as code.
    config._attn_implementation = implementation(attention)
    # A config.json can set this one as well. None leaves the choice to transformers.
    config._experts_implementation = None
    # A config.json can ask for them. Each pass would then hold what all layers return, and nothing reads it.
    config.output_attentions = config.output_hidden_states = False
    without_random_parts(config)
    return config


def without_random_parts(config: Any) -> None:
    """Disable dropout and jitter in a configuration and its sub-configurations. Modules copy these values on
    creation.
    """
    for name, value in list(vars(config).items()):
        if is_random(name, value):
            setattr(config, name, 0.0)
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            without_random_parts(getattr(config, name))


def is_random(name: str, value: Any) -> bool:
    """Return whether an attribute is a nonzero probability or size of dropout or jitter."""
    # A configuration can have the integer 1. Other integers are not probabilities.
    is_size = (isinstance(value, float) and value != 0) or (type(value) is int and value == 1)
    return is_size and any(word in name.lower() for word in ("drop", "jitter"))


def refuse(folder: Path | str, info: Mapping[str, Any], *, new: tuple[str, ...] = ()) -> None:
    """Raise ModelError for missing, unexpected or wrongly shaped tensors in `output_loading_info`.

    Tensors that transformers declares as optional (tied heads, buffers) are not listed there.
    """
    missing = sorted(set(info["missing_keys"]) - set(new))
    unexpected = sorted(set(info["unexpected_keys"]))
    if new:
        unexpected = [name for name in unexpected if name not in _OF_ANOTHER_HEAD]
    mismatched = sorted(info["mismatched_keys"])
    problems = []
    if missing:
        problems.append(f"the weights lack {_some(missing)}")
    if unexpected:
        problems.append(f"the model has no {_some(unexpected)}, which the weights hold")
    if mismatched:
        shapes = [f"{name} {list(has)} instead of {list(needs)}" for name, has, needs in mismatched]
        problems.append(f"the weights have {_some(shapes)}")
    if info.get("error_msgs"):
        problems.append(_some([str(message) for message in info["error_msgs"]]))
    if problems:
        raise ModelError(
            f"model.path: {folder}: {'; '.join(problems)}; config.json and weights must be of one model:"
            " missing weights would be random; take both from where the model is from"
        )


def refuse_integers(folder: Path | str, model: Any) -> None:
    """Raise ModelError for parameters that are stored as integers or 8-bit floats, which need separate
    scales.

    Only local folders are checked, and only if no quantization of the configuration has read the weights.
    """
    if getattr(model, "hf_quantizer", None) is not None or not Path(folder).is_dir():
        return
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    wrong = []
    for name, entry in ModelFolder(folder).tensors.items():
        # Experts are stored as separate tensors, while the model holds them in one tensor with another name.
        trained = name in parameters or (name.endswith(".weight") and name not in buffers)
        if trained and entry["dtype"] not in FLOATING:
            wrong.append(f"{name} ({entry['dtype']})")
    if wrong:
        raise ModelError(
            f"model.path: {folder}: {_some(wrong)}: weights must be {', '.join(FLOATING)}; a quantized model"
            " cannot be trained from; give the model that it was made from"
        )


def refuse_non_finite(folder: Path | str, model: torch.nn.Module, of_shards: Sequence[str] = ()) -> None:
    """Raise ModelError with the names of the tensors that contain NaN or infinity.

    `of_shards` names those that were found before they were sharded.
    """
    # Sharded parameters are empty here and count as finite.
    wrong = []
    for name, tensor in model.state_dict().items():
        if name in of_shards or not is_finite(tensor):
            wrong.append(name)
    if wrong:
        precision = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ModelError(
            f"model.path: {folder}: not finite in {precision}: {_some(wrong)}; the file is damaged,"
            " or its numbers do not fit this precision; fetch it again, or set a dtype with a larger range"
        )


def _some(names: list[str]) -> str:
    # The names are from files that may come from anywhere.
    text = ", ".join(name[:200] for name in names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text


# -- frozen weights in 4 bits under an adapter (QLoRA, Dettmers et al. 2023) --
#
# Layers compute with the weights that their 4 bits stand for. Those are what is merged, sent and saved.


def loading_options(quantize: str | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return more arguments of `from_pretrained`: none without `quantize`.

    Raises ModelError if bitsandbytes is not installed.
    """
    if quantize is None:
        return {}
    if not machine().has_package("bitsandbytes"):
        raise ModelError(f"lora.quantize={quantize} needs bitsandbytes; install it, or leave quantize out")
    from transformers import BitsAndBytesConfig

    # `planning.memory.NF4` counts the bytes of a parameter with these options.
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # Applies to 4 bits as well, despite its name.
        llm_int8_skip_modules=["lm_head", "score"],
    )
    return {"quantization_config": config, "device_map": {"": device}}


def keep_weight_layout(model: nn.Module) -> None:
    """Let 4-bit layers compute in the same way in training and evaluation mode.

    On CPUs with `avx512_bf16`, the first pass of bitsandbytes in evaluation mode rounds to bfloat16 and
    stores the weights in another layout, in place. `dequantize_4bit` does not know that layout, so what would
    be merged, sent and saved are other weights.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def dequantized(parameter: nn.Parameter) -> torch.Tensor:
    """Return the values of a parameter, in the precision of the model."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(parameter.data, state)
    return values


def shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the values, even if the parameter is quantized or sharded."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return tuple(state.shape)
    # ZeRO-3 leaves an empty tensor on the parameter, and its shape in this attribute.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def value_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the data type of the values, even if the parameter is quantized."""
    state = getattr(parameter, "quant_state", None)
    return parameter.dtype if state is None else state.dtype
