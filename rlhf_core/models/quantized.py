"""Frozen weights in 4 bits under an adapter (QLoRA, Dettmers et al. 2023). The only importer of bitsandbytes.

Layers compute with the weights that their 4 bits stand for; those weights are what is merged, sent and saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_core.errors import ModelError
from rlhf_core.system.machine import machine


def loading_options(quantize: str | None, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return more arguments of `from_pretrained`: none without `quantize`.

    Raises ModelError if bitsandbytes is not installed.
    """
    if quantize is None:
        return {}
    if not machine().has_package("bitsandbytes"):
        raise ModelError(f"lora.quantize={quantize} needs bitsandbytes; install it, or leave quantize out")
    from transformers import BitsAndBytesConfig

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
