"""Scaled-dot-product attention for packed rows: each sequence attends to itself alone, at the cost of its own length.

Hugging Face models can keep packed sequences apart with a block-diagonal mask, but pay for the whole row squared. Here
the row is cut at the sequences' borders (`cu_seq_lens_q`, as flash attention names them); without them it is plain
causal attention.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

NAME = "rlhf_sdpa"


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers; a second call does nothing."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME in ALL_ATTENTION_FUNCTIONS:
        return

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        borders = kwargs.pop("cu_seq_lens_q", None)
        for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(name, None)
        if borders is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        # (1, heads, N, d) in; (1, N, heads, d) out.
        parts = [
            sdpa_attention_forward(
                module, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, **{**kwargs, "is_causal": True}
            )[0]
            for a, b in itertools.pairwise(borders)
        ]
        return torch.cat(parts, dim=1), None

    def no_mask(*_args: Any, **_kwargs: Any) -> None:
        """Rows are right-padded or cut at borders: causality is all that is needed."""

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def implementation(attention: str) -> str:
    """The `attn_implementation` for a configured `model.attention`."""
    if attention == "sdpa":
        register()
        return NAME
    return attention
